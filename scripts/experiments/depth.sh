#!/usr/bin/env bash
# How magnitude and variance grow with depth under each norm, on C4 text: 16 and 32 narrow layers, then the reports.
# Usage: depth.sh C4_FILES TOKENIZER OUT [further options of every fit]
set -euo pipefail
FILES=$(realpath "$1") TOKENIZER=$(realpath "$2") OUT=$3
shift 3
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
for layers in 16 32; do
    runs=()
    for norm in rmsnorm peri_ln lns dyt bhyt_star bhyt; do
        run=$OUT/$norm-$layers
        runs+=("$run")
        llmstack fit -c recipe/depth.yaml -c "norm/$norm.yaml" -c trainer/cpu.yaml --model.config.num_layers $layers \
            --data.files "$FILES" --data.tokenizer "$TOKENIZER" --run.dir "$run" "$@"
    done
    llmstack report "${runs[@]}" --out "$OUT/report-$layers"
done
