#!/usr/bin/env bash
# RMSNorm against TaperNorm on TinyStories: 5 arms x 3 seeds, then the report. Runs are continued if they are there.
# Usage: tinystories_tapers.sh TEXT_FILE OUT [further options of every fit]
set -euo pipefail
TEXT=$(realpath "$1") OUT=$2
shift 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT"
[ -e "$OUT/tokenizer" ] || llmstack tokenizer train --files "$TEXT" --vocab-size 1024 --out "$OUT/tokenizer"
SCALE=--model.config.norm.scale_loss
arms=(
    "rmsnorm|-c norm/rmsnorm.yaml"
    "internal|-c norm/tapernorm_internal.yaml"
    "internal-aux|-c norm/tapernorm_internal.yaml $SCALE 0.1"
    "all-aux|-c norm/tapernorm_all.yaml $SCALE 0.1"
    "all|-c norm/tapernorm_all.yaml $SCALE 0"
)
runs=()
for seed in 0 1 2; do
    for arm in "${arms[@]}"; do
        run=$OUT/${arm%%|*}-$seed
        runs+=("$run")
        # shellcheck disable=SC2086
        llmstack fit -c recipe/tapernorm_tinystories.yaml ${arm#*|} -c trainer/cpu.yaml --seed_everything $seed \
            --data.files "$TEXT" --data.tokenizer "$OUT/tokenizer" --run.dir "$run" "$@"
    done
done
llmstack report "${runs[@]}" --out "$OUT/report"
