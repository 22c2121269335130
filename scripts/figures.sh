#!/usr/bin/env bash
# Install the package, measure the README's figures on this machine, and write a page with pictures.
#   scripts/figures.sh [--gsm8k DIR] [--publish]     see docs/generate_figures.py
# PYTHON, VENV    as in scripts/install.sh
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"
install_package dev
cd "$repo"
exec "$VENV/bin/python" docs/generate_figures.py "$@"
