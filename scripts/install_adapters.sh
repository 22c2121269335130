#!/usr/bin/env bash
# Make or update the virtual environment of the libraries verifiers and openenv-core, apart from the project's own.
#   scripts/install_adapters.sh
# rollout.environment.python=.venv-adapters/bin/python lets environments run in it. This package is not installed there.
# PYTHON          the interpreter of the environment (default python3; 3.11 or newer)
# ADAPTERS_VENV   its directory (default .venv-adapters)
# ADAPTERS        what pip installs (default: the releases of hashes-adapters.txt, which were tried together; pip refuses
#                 what has another hash)
# HASHES          off: install the default releases without comparing hashes, and what they need in any version
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"

VENV=${ADAPTERS_VENV:-$repo/.venv-adapters}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
read -ra packages <<<"${ADAPTERS:-verifiers==0.3.1 openenv-core==0.3.0}"
started=$SECONDS stamp=$VENV/.installed
wanted="${packages[*]} $(cksum <"$repo/hashes-adapters.txt")"
if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit; fi

make_venv
echo "installing ${packages[*]} into $VENV"
: >"$VENV/install.log"
# Bytecode is compiled here: a run imports the libraries several times, and each time takes seconds without it.
if [ -n "${ADAPTERS:-}" ] || [ "${HASHES:-on}" = off ]; then
  echo "these downloads are not compared with hashes"
  install_with_pip "${packages[@]}"
else
  install_hashed "$repo/hashes-adapters.txt"
fi
echo "$wanted" >"$stamp"
echo "installed in $((SECONDS - started)) s"
