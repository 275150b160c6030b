# Slurm signals this script, too, when it ends the job. It waits for the ranks, which save and queue the job again.
trap : TERM
NODES=@{nodes}

# srun is not given the CPUs per task by sbatch. What is left of a step ends at most so long after its first task, and
# what a lost node has left of one does not stand in the way of the next (--overlap).
ranks() {
    srun --nodes="$NODES" --ntasks="$((NODES*@{tasks}))" --ntasks-per-node=@{tasks} --cpus-per-task=@{cpus} \
        --overlap --kill-on-bad-exit=0 --wait=120 \
        --open-mode=append --output="$RUN/logs/slurm-%j-rank-%t.log" @{srun}"$PYTHON" -m llmstack "$@"
}

train() {
    ranks preflight "$RUN" && ranks fit -c "$RUN/slurm/config.yaml" --run.dir "$RUN" "$@"
}

@{train}
# The ranks have queued the job again if they were told to stop. If they failed, this does, unless they would again.
"$PYTHON" -m llmstack requeue "$RUN" --status "$status"
exit "$status"
