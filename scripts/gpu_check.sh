#!/usr/bin/env bash
# Is a GPU right, and how fast: norms, training step and decoding of 374m and 1b, in one table and one line of JSON.
# Needs Python with torch, safetensors and PyYAML, nothing installed; PYTHON chooses it. Options: gpu_check.sh --help
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m llmstack.bench.device_check "$@"
