#!/usr/bin/env bash
# RMSNorm against TaperNorm on TinyStories: 5 arms x 3 seeds, then the report. Runs are continued if they are there.
# Usage: tinystories_tapers.sh STORIES.jsonl OUT [further options of every fit]; the last tenth of the stories is held out.
set -euo pipefail
STORIES=$1 OUT=$2
shift 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT"
held_out=$(($(wc -l < "$STORIES") / 10))
TRAIN=$(realpath "$OUT")/train.jsonl HELD_OUT=$(realpath "$OUT")/heldout.jsonl
[ -e "$TRAIN" ] || head -n -$held_out "$STORIES" > "$TRAIN"
[ -e "$HELD_OUT" ] || tail -n $held_out "$STORIES" > "$HELD_OUT"
[ -e "$OUT/tokenizer" ] || llmstack tokenizer train --files "$TRAIN" --vocab-size 1024 --out "$OUT/tokenizer"
SCALE=--model.config.norm.scale_loss
# 5 % of so short a run, the default start, is too early to fit anything to: the stream still grows from step to step.
TAPER="--model.config.norm.taper_start 0.2 --model.config.norm.taper_end 0.5"
arms=(
    "rmsnorm|-c norm/rmsnorm.yaml"
    "internal|-c norm/tapernorm_internal.yaml $TAPER"
    "internal-aux|-c norm/tapernorm_internal.yaml $TAPER $SCALE 0.1"
    "all-aux|-c norm/tapernorm_all.yaml $TAPER $SCALE 0.1"
    "all|-c norm/tapernorm_all.yaml $TAPER $SCALE 0"
)
runs=()
for seed in 0 1 2; do
    for arm in "${arms[@]}"; do
        run=$OUT/${arm%%|*}-$seed
        runs+=("$run")
        # shellcheck disable=SC2086
        llmstack fit -c recipe/tapernorm_tinystories.yaml ${arm#*|} -c trainer/cpu.yaml --seed_everything $seed \
            --data.files "$TRAIN" --data.heldout_files "$HELD_OUT" --data.tokenizer "$OUT/tokenizer" --run.dir "$run" "$@"
    done
done
llmstack report "${runs[@]}" --out "$OUT/report"
