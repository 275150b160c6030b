#!/usr/bin/env bash
# The full tier: everything test.sh runs, and the tests that are marked `full`. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
export OMP_NUM_THREADS=1
exec "$PYTHON" -m pytest -n 2 "$@"
