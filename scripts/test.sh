#!/usr/bin/env bash
# Lint, types and the test suite, in an environment of its own. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest -m "not full" "$@"
