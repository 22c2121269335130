#!/usr/bin/env bash
# Installs what the tests need, then runs them.
#   scripts/test.sh [pytest arguments]     default: all of tests/; paths from the repository's root
# PYTHON, VENV    as in scripts/install.sh: PYTHON=python3.12 scripts/test.sh
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"
install_package dev
cd "$repo"
[[ $# -gt 0 ]] || set -- -n 2 --dist loadfile  # all tests: half of them use one core, the others are ranks that wait
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$VENV/bin/python" -m pytest "$@"
