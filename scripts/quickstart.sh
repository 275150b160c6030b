#!/usr/bin/env bash
# From nothing to a trained model: installs, pretrains a small BHyT model on the embedded corpus, measures it, samples.
# Run again, it finds the finished run and only measures and samples. QUICKSTART_DIR chooses another folder for the run.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
RUN=${QUICKSTART_DIR:-$ROOT/runs/quickstart}
llmstack() { "$PYTHON" -m llmstack "$@"; }

echo "== pretraining a small BHyT model on the Python language reference (about three minutes on two quiet cores)"
llmstack fit -c "$ROOT/configs/quickstart.yaml" --run.dir "$RUN"

echo "== held-out text, beside n-gram models of the same tokens"
llmstack validate -c "$RUN/config.yaml" --ckpt_path "$RUN" --baselines --output "$RUN/validation.json" >/dev/null
"$PYTHON" - "$RUN/validation.json" <<'PY'
import json, sys

result = json.load(open(sys.argv[1]))
rows = [("this model", result["loss"], result["perplexity"], result["bits_per_byte"])]
for name in ("unigram", "bigram"):
    score = result["baselines"][name]
    rows.append((name, score["nats_per_token"], score["perplexity"], score["bits_per_byte"]))
print(f"{'':12} {'loss':>8} {'perplexity':>11} {'bits/byte':>10}   ({result['tokens']:,} held-out tokens)")
for name, loss, perplexity, bits in rows:
    print(f"{name:12} {loss:8.4f} {perplexity:11.2f} {bits:10.4f}")
PY

echo "== a task of lm-eval: which of four held-out texts goes on? (chance: 0.25)"
llmstack evaluate "$RUN" --tasks python_reference 2>/dev/null

echo "== a sample, continuing \"The following\""
llmstack generate "$RUN" --prompt "The following" --max-new-tokens 60 --temperature 0.8 --top-p 0.95 --seed 1
cat <<EOT

== where everything lies
run folder   $RUN   (config.yaml, metrics.csv, checkpoints/, tensorboard/, environment.json)
next         source $VENV/bin/activate
             llmstack inspect $RUN
             llmstack fit -c model/30m.yaml -c norm/bhyt.yaml -c data/text.yaml -c trainer/cpu.yaml \\
                 --data.files YOUR.jsonl --data.tokenizer YOUR/tokenizer --trainer.max_steps 200
EOT
