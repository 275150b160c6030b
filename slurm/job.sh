#!/bin/bash
#SBATCH --job-name=@{name}
#SBATCH --nodes=@{nodes}
#SBATCH --ntasks-per-node=@{tasks}
#SBATCH --cpus-per-task=@{cpus}
#SBATCH --mem=@{memory}
#SBATCH --time=@{time}
#SBATCH --signal=USR1@@{lead}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH @{log}
@{directives}
# Written by `llmstack submit`. It stands alone: `sbatch` this file to start the work, or to continue it after a stop.
# USR1 comes @{lead} s before the time is over, and to srun's tasks alone (no B:).

set -uo pipefail
cd @{folder}
RUN=@{run}
CODE=@{code}
PYTHON=@{python}
export PYTHONPATH=$CODE@{pythonpath}
export OMP_NUM_THREADS=@{threads}
export LLMSTACK_STOP_SIGNAL=USR1
@{setup}
# A job that comes back runs the code and the environment that it began with, or says that they are gone and stops.
if ! (cd "$CODE" && sha256sum --check --quiet SHA256SUMS); then
    echo "llmstack: the code of this job, $CODE, is gone or changed: submit the run again" >&2
    exit 2
fi
if ! "$PYTHON" -c 'import importlib.util as i; exit(not all(map(i.find_spec, ("torch", "lightning", "deepspeed"))))'; then
    echo "llmstack: the environment of this job, $PYTHON, is gone or changed: mend it, or submit the run again" >&2
    exit 2
fi

@{work}
