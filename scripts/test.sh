#!/usr/bin/env bash
# Lint, types and the test suite, in an environment of its own. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# DeepSpeed compiles its exchange through shared memory at first use (a minute or so): not inside a test's time limit.
PATH="$(dirname "$PYTHON"):$PATH" DS_ACCELERATOR=cpu "$PYTHON" -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()'
# One thread for each of two workers: on two cores more threads would only wait for one another.
export OMP_NUM_THREADS=1
exec "$PYTHON" -m pytest -n 2 -m "not full" "$@"
