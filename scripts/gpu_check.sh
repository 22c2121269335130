#!/usr/bin/env bash
# Run everything that needs a GPU. It needs a machine with one GPU, a CUDA build of torch, and Triton, but not
# Transformer Engine. It installs nothing and uses the packages of the given Python.
#   scripts/gpu_check.sh [DIRECTORY]     default: outputs/gpu_check of this repository
# PYTHON          the interpreter (default python3), which must have rl_megatron's dependencies and pytest
# KERNEL_SECONDS  the kernels' benchmark starts no new case after this time (default 180)
# Each step writes NAME.log to the directory, and its result to summary.txt. The benchmarks also write JSON and a
# picture. Exit status: 0 if all steps passed, 1 if one failed, 3 if there is no usable GPU.
set -uo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out=${1:-$repo/outputs/gpu_check}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if ! found=$("$python" -c 'import torch; print(torch.cuda.device_count(), torch.version.cuda)' 2>&1); then
  echo "error: '$python' has no torch that can be imported; name another one: PYTHON=/path/to/python $0" >&2
  tail -n 1 <<<"$found" >&2
  exit 1
fi
if [ "${found%% *}" = 0 ]; then
  echo "no GPU: torch sees none here (its CUDA version: ${found##* }); nothing was checked" >&2
  exit 3
fi

mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$repo" || exit 1
: >"$out/summary.txt"
status=0

step() { # step NAME COMMAND…: run the command, show and save its output, and record whether it passed
  local name=$1 started=$SECONDS result=passed
  shift
  printf '\n== %s\n' "$name"
  "$@" 2>&1 | tee "$out/$name.log" || { result=FAILED status=1; }
  printf '%-12s %-8s %4d s\n' "$name" "$result" $((SECONDS - started)) >>"$out/summary.txt"
}

environment() {
  if command -v nvidia-smi >/dev/null; then nvidia-smi; fi
  "$python" - <<'PYTHON'
import importlib.metadata as metadata
import platform

import torch

import rl_megatron

print(f"Python {platform.python_version()}, rl_megatron {rl_megatron.__version__}")
for name in ("torch", "triton", "megatron-core", "transformer-engine", "liger-kernel", "cut-cross-entropy", "trl"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not installed")
gpu = torch.cuda.get_device_properties(0)
print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}")
print(f"torch for CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
PYTHON
}

grpo() { # run the quickstart's three stages with fewer steps, in bf16; check that every metric is finite
  rm -rf "$out/grpo_run"
  "$python" -m rl_megatron train experiment=quickstart precision=bf16 device=cuda "output_dir=$out/grpo_run" \
    stages.pretrain.train.steps=100 stages.pretrain.train.eval_every=0 stages.pretrain.train.save_every=0 \
    stages.sft.train.steps=8 stages.grpo.train.steps=8 stages.grpo.train.save_every=0 \
    stages.grpo.train.fused_head=true &&
    "$python" - "$out/grpo_run/metrics.jsonl" <<'PYTHON'
import json
import math
import sys

lines = [json.loads(line) for line in open(sys.argv[1])]
wrong = [(line.get("step"), name) for line in lines for name, value in line.items()
         if isinstance(value, float) and not math.isfinite(value)]
steps = {line.get("stage") for line in lines if line.get("kind") == "train"}
if wrong or "grpo" not in steps:
    sys.exit(f"not finite (step, metric): {wrong}; stages that trained: {sorted(map(str, steps))}")
print(f"{len(lines)} lines of metrics, all finite")
PYTHON
}

step environment environment
if [ -d tests/gpu ]; then step tests "$python" -m pytest tests/gpu; fi
step kernels "$python" -m benchmarks.logprobs --device cuda --time-limit "${KERNEL_SECONDS:-180}" --output "$out"
step train_step "$python" benchmarks/train_step.py --device cuda --precision bf16 --model qwen2_5_0_5b \
  --vocab-size 151936 --tokens 16384 --length 1024 --micro-batch-tokens 8192 --output "$out/train_step.json"
step train_step_fused "$python" benchmarks/train_step.py --device cuda --precision bf16 --model qwen2_5_0_5b \
  --vocab-size 151936 --tokens 16384 --length 1024 --micro-batch-tokens 8192 --fused-head \
  --output "$out/train_step_fused.json"
step grpo grpo

printf '\n'
cat "$out/summary.txt"
echo "logs and figures: $out"
exit "$status"
