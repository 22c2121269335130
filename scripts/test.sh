#!/usr/bin/env bash
# Installs what the tests need, then runs them.
#   scripts/test.sh                      the fast tier: all tests but those marked slow
#   scripts/test.sh --all [ARGUMENTS]    every test
#   scripts/test.sh ARGUMENTS            pytest with these arguments; paths from the repository's root
# PYTHON, VENV    as in scripts/install.sh: PYTHON=python3.12 scripts/test.sh
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"
install_package dev
cd "$repo"

# Two workers that share out the tests: half of the tests use one core, the others are ranks that wait for each other.
workers=(-n 2 --dist worksteal)
case ${1:-} in
  "") set -- "${workers[@]}" -m "not slow" ;;
  --all) shift; set -- "${workers[@]}" "$@" ;;
esac

# Tests start dozens of processes that import torch. Reading its bytecode takes a third of the time that compiling it
# takes, so it is kept, even where Python is told to write none; and apart from the sources.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$VENV/bytecode}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$VENV/bin/python" -m pytest "$@"
