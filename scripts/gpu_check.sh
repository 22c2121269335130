#!/usr/bin/env bash
# Check everything that needs a GPU, in parts. docs/performance.md says what they are.
#   scripts/gpu_check.sh [--wheels DIR] [--output DIR] [--tiny] [--device cpu] [PART…]     default: all parts
# --wheels DIR    install what is missing of benchmarks/gpu_check/wheels.txt, or has another version than
#                 constraints.txt says, from the wheels in DIR, without a network, into an environment in the output
#                 directory that sees the packages of the given Python
# --output DIR    results, logs and files (default: outputs/gpu_check of the repository)
# PYTHON          the interpreter (default python3), which must have a CUDA build of torch
# Each part adds its result to results.json in the output directory; report.md there has all of them as tables.
# Exit status: 0 if all parts passed, 1 if one failed, 2 for a wrong argument, 3 if there is no usable GPU.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3} output=$repo/outputs/gpu_check wheels='' arguments=()

absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }

while [ $# -gt 0 ]; do
  case $1 in
    --wheels | --output)
      [ $# -ge 2 ] || { echo "error: $1 needs a directory" >&2 && exit 2; }
      if [ "$1" = --wheels ]; then wheels=$(absolute "$2"); else output=$(absolute "$2"); fi
      shift
      ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

if [ -n "$wheels" ]; then
  [ -d "$wheels" ] || { echo "error: --wheels $wheels: there is no such directory" >&2 && exit 2; }
  environment=$output/venv
  "$python" -m venv --clear --system-site-packages --without-pip "$environment"
  # If the given Python is of an environment itself, the new one would not see that environment's packages.
  "$python" -c 'import os, sys; print(*filter(os.path.isdir, sys.path[1:]), sep="\n")' \
    >"$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/given_python.pth"
  "$python" -m pip --python "$environment/bin/python" install --quiet --disable-pip-version-check --no-index --no-deps \
    --find-links "$wheels" --constraint "$repo/constraints.txt" --requirement "$repo/benchmarks/gpu_check/wheels.txt"
  python=$environment/bin/python
fi

cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))} PYTHONUNBUFFERED=1
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
cd "$repo"
exec "$python" -m benchmarks.gpu_check --output "$output" ${arguments[@]+"${arguments[@]}"}
