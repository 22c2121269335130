#!/usr/bin/env bash
# Make or update the virtual environment of the libraries verifiers and openenv-core, apart from the project's own.
#   scripts/install_adapters.sh
# rollout.environment.python=.venv-adapters/bin/python lets environments run in it. This package is not installed there.
# PYTHON          the interpreter of the environment (default python3; 3.11 or newer)
# ADAPTERS_VENV   its directory (default .venv-adapters)
# ADAPTERS        what pip installs (default: the releases below, which were tried together)
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"

VENV=${ADAPTERS_VENV:-$repo/.venv-adapters}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
read -ra wanted <<<"${ADAPTERS:-verifiers==0.3.1 openenv-core==0.3.0}"
started=$SECONDS stamp=$VENV/.installed
if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "${wanted[*]}" ]; then exit; fi

make_venv
echo "installing ${wanted[*]} into $VENV"
# Bytecode is compiled here: a run imports the libraries several times, and each time takes seconds without it.
if ! PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip install --disable-pip-version-check --prefer-binary \
  --progress-bar off "${wanted[@]}" 2>&1 | tee "$VENV/install.log" | show_progress; then
  sed '/^WARNING/d' "$VENV/install.log" | tail -n 30 >&2
  echo "error: the installation failed; all of pip's output is in $VENV/install.log" >&2
  exit 1
fi
echo "${wanted[*]}" >"$stamp"
echo "installed in $((SECONDS - started)) s"
