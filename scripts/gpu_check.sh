#!/usr/bin/env bash
# Check everything that needs a GPU, in parts. docs/performance.md says what they are.
#   scripts/gpu_check.sh [--output DIR] [--tiny] [--device cpu] [PART…]     default: all parts
# --output DIR    the results: a few files (default: outputs/gpu_check of the repository)
# PYTHON          the interpreter (default python3), which must have a CUDA build of torch and the package's dependencies;
#                 scripts/gpu_bundle.sh is for a machine that lacks them and has no network
# Results are in results.json of the output directory at any time; report.md there has all of them as tables.
# Exit status: 0 if all parts passed, 1 if one failed, 2 for a wrong argument, 3 if there is no usable GPU.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=$repo/outputs/gpu_check arguments=()

while [ $# -gt 0 ]; do
  case $1 in
    --output)
      [ $# -ge 2 ] || { echo "error: $1 needs a directory" >&2 && exit 2; }
      case $2 in /*) output=$2 ;; *) output=$PWD/$2 ;; esac
      shift
      ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))} PYTHONUNBUFFERED=1
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
cd "$repo"
exec "${PYTHON:-python3}" -m benchmarks.gpu_check --output "$output" ${arguments[@]+"${arguments[@]}"}
