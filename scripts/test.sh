#!/usr/bin/env bash
# Install what the tests need, then run them.
#   scripts/test.sh                          the fast tier
#   scripts/test.sh --tier change            the fast tier and what else .ci/run runs
#   scripts/test.sh --all                    every test, as scripts/nightly.sh, which goes on where it stopped
#   scripts/test.sh --changed [REVISION]     what the difference from REVISION (HEAD) can reach, without nightly tests
#   scripts/test.sh ARGUMENTS                pytest with these arguments; paths are relative to the repository's root
# The first four take arguments of pytest as well; --durations-to FILE writes what every test costs, which
# `python -m tests.costs FILE` prints.
# PYTHON, VENV    as in scripts/install.sh: PYTHON=python3.12 scripts/test.sh
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"
install_package dev
cd "$repo"

# Two workers share the tests: half of the tests use one core, and the others are ranks that wait for each other.
workers=(-n 2 --dist worksteal)
case ${1:-} in
  "") set -- "${workers[@]}" --tier fast ;;
  --tier) set -- "${workers[@]}" "$@" ;;
  --all) shift; set -- "${workers[@]}" --tier nightly "$@" ;;
  --changed)
    shift
    revision=HEAD
    if [ -n "${1:-}" ] && [[ $1 != -* ]]; then revision=$1; shift; fi
    found=$("$VENV/bin/python" -m tests.changed "$revision")
    if [ -z "$found" ]; then echo "nothing differs from $revision"; exit; fi
    mapfile -t files <<<"$found"
    echo "${#files[@]} files of tests reach what differs from $revision"
    set -- "${workers[@]}" "$@" "${files[@]}"
    ;;
esac

arguments=()
while [ $# -gt 0 ]; do # pytest takes an existing file after an option of tests/costs.py for tests
  if [ "$1" = --durations-to ] && [ $# -gt 1 ]; then arguments+=("$1=$2"); shift 2; else arguments+=("$1"); shift; fi
done

# Tests start dozens of processes that import torch, and reading its bytecode takes a third of the time of compiling it.
# So the bytecode is kept, in a directory apart from the sources, even if the environment tells Python not to write it.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$VENV/bytecode}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$VENV/bin/python" -m pytest "${arguments[@]}"
