# A lost node leaves the job (--no-kill), and the run goes on with those that are left: as many as divide @{nodes}, each
# accumulating so much more that a step keeps its samples.
left() { squeue --noheader --jobs "$SLURM_JOB_ID" --format %D; }
patience=$(scontrol show config | awk '$1 == "SlurmdTimeout" { print $3 + 30 }')
status=1
while true; do
    while ((NODES > $(left) || @{nodes} % NODES)); do ((NODES--)); done
    ((NODES >= @{min_nodes})) || break
    train --trainer.num_nodes "$NODES" --trainer.accumulate_grad_batches "$((@{nodes} / NODES * @{accumulate}))"
    status=$?
    ((status == 0)) && break
    # Slurm notices a lost node later than the ranks do.
    for ((waited = 0; waited < patience && $(left) >= NODES; waited += 5)); do sleep 5; done
    (($(left) < NODES)) || break
done
