#!/usr/bin/env bash
# Build the wheel and the source distribution of the last commit, check them, and train with the wheel alone.
#   scripts/release.sh [DIRECTORY]     where the two files are put (default: dist)
# PYTHON   the interpreter (default python3; 3.11 or newer)
# It uploads nothing. What it builds with is installed in an environment of its own.
set -euo pipefail
TOOLS=(build==1.6.1 twine==7.0.0)
OVERRIDES=(experiment=quickstart device=cpu stages.pretrain.train.steps=2 stages.sft.train.steps=1 stages.grpo.train.steps=1
  data.num_documents=500 data.num_eval_examples=4 stages.grpo.algorithm.prompts_per_step=4 stages.grpo.train.global_batch_size=32)

target=$(realpath -m "${1:-dist}")
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH

if [ -n "$(git -C "$repo" status --porcelain)" ]; then
  echo "note: changes that are not committed are not in the release"
fi
mkdir "$scratch/source" "$scratch/built" "$scratch/run"
git -C "$repo" archive HEAD | tar -x -C "$scratch/source"

VENV=$scratch/tools
make_venv
install_with_pip "${TOOLS[@]}"
"$VENV/bin/python" -m build --outdir "$scratch/built" "$scratch/source" >"$scratch/build.log" 2>&1 || {
  tail -n 30 "$scratch/build.log" >&2
  echo "error: the build failed" >&2
  exit 1
}
"$VENV/bin/python" -m twine check --strict "$scratch/built"/*

VENV=$scratch/venv
make_venv
wheel=$(echo "$scratch/built"/*.whl)
echo "installing ${wheel##*/} with the versions of constraints.txt (minutes)"
select_releases CPU CPU >"$scratch/cpu.txt" # a machine without a GPU needs no other build of torch, if pip finds this one
run_pip install --require-hashes --no-deps --requirement "$scratch/cpu.txt" || true
install_with_pip --constraint "$repo/constraints.txt" "$wheel"
"$VENV/bin/python" -m pip check

cd "$scratch/run"
"$VENV/bin/rl-megatron" train "${OVERRIDES[@]}" >train.log 2>&1 || {
  tail -n 30 train.log >&2
  echo "error: the training with the wheel failed" >&2
  exit 1
}
echo "rl-megatron $("$VENV/bin/rl-megatron" --version), Python $(version_of "$VENV/bin/python"), trained with the wheel:"
"$VENV/bin/rl-megatron" inspect outputs/quickstart

mkdir -p "$target"
cp "$scratch/built"/* "$target"
cd "$target"
echo "made of commit $(git -C "$repo" rev-parse --short HEAD) in $target:"
for file in "$scratch/built"/*; do sha256sum "${file##*/}"; done
