#!/usr/bin/env bash
# The eight tasks of the BHyT paper and two perplexities of a checkpoint, as its tables have them: 3-shot, five draws of
# the examples. Data sets lie under $LLMSTACK_DATA (`llmstack fetch --what benchmarks`). Options go to `llmstack evaluate`.
# Usage: eval_downstream.sh CKPT OUTPUT_FOLDER [options]
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: eval_downstream.sh CKPT OUTPUT_FOLDER [options of llmstack evaluate]" >&2
    exit 2
fi
CKPT=$1 OUT=$2
shift 2
LLMSTACK=${LLMSTACK:-"${PYTHON:-python3} -m llmstack"}
mkdir -p "$OUT"
$LLMSTACK evaluate "$CKPT" --tasks paper --num-fewshot 3 --fewshot-seeds 1,2,3,4,5 --output "$OUT/tasks.json" "$@"
for dataset in c4 wikitext2; do
    $LLMSTACK perplexity "$CKPT" --dataset "$dataset" --output "$OUT/perplexity-$dataset.json"
done
