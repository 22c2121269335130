#!/usr/bin/env bash
# Installs what the tests need, then runs them.
#   scripts/test.sh [pytest arguments]     default: all of tests/
# PYTHON, VENV    as in scripts/install.sh: PYTHON=python3.12 scripts/test.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/install.sh"
install dev
cd "$repo"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$VENV/bin/python" -m pytest "$@"
