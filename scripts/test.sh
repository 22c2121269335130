#!/usr/bin/env bash
# Install what the tests need, then run them.
#   scripts/test.sh                      the fast tier: all tests except those marked slow
#   scripts/test.sh --all [ARGUMENTS]    every test
#   scripts/test.sh ARGUMENTS            pytest with these arguments; paths are relative to the repository's root
# PYTHON, VENV    as in scripts/install.sh: PYTHON=python3.12 scripts/test.sh
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"
install_package dev
cd "$repo"

# Two workers share the tests: half of the tests use one core, and the others are ranks that wait for each other.
workers=(-n 2 --dist worksteal)
case ${1:-} in
  "") set -- "${workers[@]}" -m "not slow" ;;
  --all) shift; set -- "${workers[@]}" "$@" ;;
esac

# Tests start dozens of processes that import torch, and reading its bytecode takes a third of the time of compiling it.
# So the bytecode is kept, in a directory apart from the sources, even if the environment tells Python not to write it.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$VENV/bytecode}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$VENV/bin/python" -m pytest "$@"
