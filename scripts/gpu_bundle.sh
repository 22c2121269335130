#!/usr/bin/env bash
# Check a GPU on a machine without a network, in three steps. docs/performance.md describes them.
#   scripts/gpu_bundle.sh prepare [--te DIR]   make .gpu_bundle: the wheels that the machine lacks (also those in DIR, of
#                                              Transformer Engine), and values that need no GPU; print the command that
#                                              runs on the machine
#   scripts/gpu_bundle.sh stand-in             run that command here on the CPU, with the machine's versions
#   scripts/gpu_bundle.sh collect DIR          keep the results that the command wrote into DIR, and fill the table of
#                                              docs/performance.md
# PYTHON            the interpreter (default python3), which has the package's dependencies
# STAND_IN_PYTHON   a Python 3.12 with the machine's versions; without it, stand-in installs one (5 GB)
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

absolute() { case $1 in /* | -* | '') echo "$1" ;; *) echo "$PWD/$1" ;; esac; }

action=${1:-}
case $action in
  collect) set -- "$1" "$(absolute "${2:?collect needs a directory}")" ;;
  prepare) [ "${2:-}" != --te ] || set -- "$1" --te "$(absolute "${3:?--te needs a directory}")" ;;
esac
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
if [ "$action" = stand-in ] && [ -z "${STAND_IN_PYTHON:-}" ]; then
  environment=$repo/outputs/stand_in
  if [ ! -x "$environment/bin/python" ]; then
    python3.12 -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --requirement "$repo/benchmarks/gpu_check/stand_in.txt"
  fi
  export STAND_IN_PYTHON=$environment/bin/python
fi
cd "$repo"
exec "${PYTHON:-python3}" -m benchmarks.gpu_check.bundle "$@"
