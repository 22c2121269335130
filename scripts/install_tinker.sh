#!/usr/bin/env bash
# Make or update the virtual environment of the Tinker SDK, a client of the training service (docs/training_service.md).
#   scripts/install_tinker.sh
# This package is not installed there: a client needs only the SDK.
# PYTHON         the interpreter of the environment (default python3; 3.11 or newer)
# TINKER_VENV    its directory (default .venv-tinker)
# TINKER         what pip installs (default: the release that was tried)
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"

VENV=${TINKER_VENV:-$repo/.venv-tinker}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
read -ra packages <<<"${TINKER:-tinker==0.38.0}"
started=$SECONDS stamp=$VENV/.installed
if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "${packages[*]}" ]; then exit; fi

make_venv
echo "installing ${packages[*]} into $VENV"
: >"$VENV/install.log"
install_with_pip "${packages[@]}"
echo "${packages[*]}" >"$stamp"
echo "installed in $((SECONDS - started)) s"
