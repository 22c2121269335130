#!/usr/bin/env bash
# Install the package, then train a model of arithmetic from scratch: configs/experiment/quickstart.yaml on two
# tensor-parallel ranks. The results are in outputs/quickstart (summary.json, curves.png, metrics.jsonl).
#   scripts/quickstart.sh [Hydra overrides]
# NPROC    the number of ranks (default 2)
# PYTHON, VENV    as in scripts/install.sh
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"
install_package
cd "$repo"

NPROC=${NPROC:-2}
defaults=(experiment=quickstart "parallel.tensor=$((NPROC % 2 ? 1 : 2))")
if command -v nvidia-smi >/dev/null && [ "$("$VENV/bin/python" -c 'import torch; print(torch.cuda.device_count())')" -lt "$NPROC" ]; then
  echo "fewer GPUs than $NPROC ranks: running on the CPU (NPROC=1 uses one GPU)"
  defaults+=(device=cpu)
fi

if [[ " $*" != *" output_dir="* ]]; then
  defaults+=(resume=false) # begin anew; an earlier run is moved to outputs/quickstart.previous and is not deleted
fi
VENV=$VENV NPROC_PER_NODE=$NPROC exec scripts/train.sh train "${defaults[@]}" "$@"
