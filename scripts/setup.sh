# Sourced by the other scripts: makes the virtual environment once, with the pinned versions, and leaves in
# $ROOT the checkout and in $PYTHON its interpreter. LLMSTACK_VENV chooses another folder for the environment.
# Usage: source setup.sh [extra]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${LLMSTACK_VENV:-$ROOT/.venv}
PYTHON=$VENV/bin/python

setup() {
    local extra=${1:+[$1]} wanted stamp
    stamp=$VENV/.llmstack-installed${1:+-$1}
    wanted=$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | sha256sum; echo "$ROOT")
    mkdir -p "$VENV"
    # Two scripts started at once take turns; an interrupted installation leaves no stamp and is done again.
    exec 9>"$VENV/.llmstack-lock"
    flock 9
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "Setting up $VENV (once; about a minute or two) ..."
        local base=
        for base in python3 python3.13 python3.12 python3.11; do
            command -v "$base" >/dev/null && "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && break
            base=
        done
        if [ -z "$base" ]; then
            echo "llmstack: needs Python 3.11 or newer; none found on PATH" >&2
            exit 2
        fi
        "$base" -m venv "$VENV"
        "$PYTHON" -m pip install --quiet -c "$ROOT/constraints.txt" -e "$ROOT$extra" 2> >(grep -v '^WARNING: Location' >&2)
        echo "$wanted" >"$stamp"
    fi
    flock -u 9
    exec 9>&-
}
setup "${1:-}"
