#!/usr/bin/env bash
# The table of the BHyT paper at a size that two cores train in half an hour: seven norms, two seeds, the same tokens, all
# eight tasks with 3 examples and the first 100 documents. At this size models are near chance: it shows that the pieces
# fit together, not which norm is best. For the published size: -c model/374m.yaml -c data/c4.yaml and no --limit.
# Usage: downstream_table.sh TEXT DATA_ROOT OUT   (texts to train on; benchmarks in the hub's layout; a folder)
set -euo pipefail
TEXT=$1 DATA_ROOT=$2 OUT=$3
STEPS=${STEPS:-600} JOBS=${JOBS:-2}
NORMS="rmsnorm peri_ln lns dyt bhyt_star bhyt tapernorm_all"
export OMP_NUM_THREADS=1
mkdir -p "$OUT"
[ -d "$OUT/tokenizer" ] || llmstack tokenizer train --files "$TEXT" --vocab-size 4096 --out "$OUT/tokenizer"

one() {
    local norm=$1 seed=$2 run=$3/$1-$2
    llmstack fit -c model/tiny.yaml -c "norm/$norm.yaml" -c data/text.yaml -c trainer/cpu.yaml --data.files "$TEXT" \
        --data.tokenizer "$OUT/tokenizer" --trainer.max_steps "$STEPS" --seed_everything "$seed" --run.dir "$run" \
        >"$run.log" 2>&1
    llmstack evaluate "$run" --tasks paper --num-fewshot 3 --limit 100 --data-root "$DATA_ROOT" \
        --cache "$OUT/answers" >>"$run.log" 2>&1
    tail -n 20 "$run.log"
}
export -f one
export TEXT DATA_ROOT OUT STEPS
for seed in 0 1; do
    for norm in $NORMS; do echo "$norm $seed $OUT"; done
done | xargs -P "$JOBS" -L 1 bash -c 'one "$@"' _
llmstack report "$OUT"/*-[01] --out "$OUT/report"
