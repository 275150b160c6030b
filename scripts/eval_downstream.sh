#!/usr/bin/env bash
# The eight tasks of the BHyT paper and two perplexities of a checkpoint, as its tables have them: 3-shot, five draws of
# the examples. Data sets lie under $LLMSTACK_DATA (`llmstack fetch --what benchmarks,c4,wikitext2`).
# Usage: eval_downstream.sh CKPT [FOLDER [options of llmstack evaluate]]
# FOLDER takes the results; by default that of a run's evaluations, or one called after CKPT.
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: eval_downstream.sh CKPT [FOLDER [options of llmstack evaluate]]" >&2
    exit 2
fi
CKPT=$1
if [ -f "$CKPT/config.yaml" ]; then OUT=$CKPT/evaluation; else OUT=evaluation-$(basename "$CKPT"); fi
OUT=${2:-$OUT}
shift $(($# > 1 ? 2 : 1))
llmstack() { "${PYTHON:-python3}" -m llmstack "$@"; }
mkdir -p "$OUT"
llmstack evaluate "$CKPT" --tasks paper --num-fewshot 3 --fewshot-seeds 1,2,3,4,5 --output "$OUT/downstream.json" "$@"
for dataset in c4 wikitext2; do
    llmstack perplexity "$CKPT" --dataset "$dataset" --output "$OUT/perplexity-$dataset.json"
done
