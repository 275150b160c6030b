set -e
@{select}mkdir -p "$RUN/evaluation"
@{evaluations}
"$PYTHON" -m llmstack report "$RUN" --out "$RUN/report"
