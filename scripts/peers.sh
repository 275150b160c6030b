#!/usr/bin/env bash
# Environments with the libraries that `llmstack bench ... --against` measures us beside, one for each: their
# requirements exclude one another's, and ours. Usage: peers.sh [folder]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PEERS=${1:-${LLMSTACK_PEERS:-$ROOT/.venv-peers}}
pinned() { grep "^$1==" "$ROOT/constraints.txt"; }
for library in transformers litgpt; do
    "${PYTHON:-python3}" -m venv "$PEERS/$library"
done
"$PEERS/transformers/bin/python" -m pip install --quiet "$(pinned torch)" "$(pinned transformers)"
"$PEERS/litgpt/bin/python" -m pip install --quiet "$(pinned torch)" litgpt==0.5.13
echo "now: llmstack bench decode --against transformers,litgpt --peers $PEERS"
