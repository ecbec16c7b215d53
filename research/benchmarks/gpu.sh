#!/usr/bin/env bash
# Measures on one NVIDIA GPU, within nine minutes and without a network: see gpu.py, which gets all options.
#
#   research/benchmarks/gpu.sh
#   WHEELS=folder research/benchmarks/gpu.sh   # packages that this Python lacks are in `folder`, as wheels: beside
#                                              # PyTorch, transformers, accelerate, peft, pandas, pyarrow and matplotlib
#                                              # trl, datasets, dill, multiprocess, xxhash and rich
#                                              # (pip download --no-deps)
#   PYTHON=.venv/bin/python research/benchmarks/gpu.sh --dry   # sizes cut, also on a CPU
#
# First of all it measures what has never run on a GPU: updates with shared prompts as a tree. The method before, packed
# rows under a mask, is that of commit 528c6e7, where the same command measures it.
set -euo pipefail
LIMIT=540  # seconds, installation of wheels included
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TRL_EXPERIMENTAL_SILENCE=1 TOKENIZERS_PARALLELISM=false
export JAX_PLATFORMS=cpu # where JAX is installed, bm25s imports it, and it would take most of the GPU's memory
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*} # one GPU: with several, the trainer would split its batches
if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH="$root:$site${PYTHONPATH#"$root"}"
fi
# Its own limit is sooner, so that it ends by itself; what it has measured by then is written in any case.
timeout -k 5 $((LIMIT - SECONDS)) "$python" -m research.benchmarks.gpu --seconds $((LIMIT - 60 - SECONDS)) "$@"
