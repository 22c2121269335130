#!/usr/bin/env bash
# Make or update the project's virtual environment, with the pinned dependencies.
#   scripts/install.sh [EXTRA]     EXTRA: one of setup.py's extras (data, dev, docs, rewards, te, triton)
# PYTHON   the interpreter of the environment (default python3; 3.11 or newer)
# VENV     its directory (default: .venv, or for example .venv-3.12 if .venv has another version than the given PYTHON)
# Other scripts source this one for `install_package`, which sets VENV.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

check_python() {
  local found
  found=$(version_of "$1" 2>/dev/null) || found="nothing that runs"
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "error: Python 3.11 or newer is needed and '$1' is $found; name another one: PYTHON=python3.12 $0" >&2
    return 1
  }
}

find_venv() {
  if [ -n "${PYTHON:-}" ]; then check_python "$PYTHON" || return; fi
  if [ -n "${VENV:-}" ]; then
    case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
    return
  fi
  VENV=$repo/.venv
  if [ -n "${PYTHON:-}" ] && [ -x "$VENV/bin/python" ]; then
    local wanted; wanted=$(version_of "$PYTHON")
    [ "$(version_of "$VENV/bin/python")" = "$wanted" ] || VENV=$repo/.venv-$wanted
  fi
}

# Make the environment if it has no working pip. A call that was interrupted may have left none, or a part of it.
make_venv() {
  if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
  local python=${PYTHON:-python3}
  check_python "$python" || return
  echo "making $VENV with $python ($(version_of "$python"))"
  rm -rf "$VENV"/lib/python*/site-packages/pip{,-*}
  "$python" -m venv "$VENV" || return
  echo '*' >"$VENV/.gitignore"
}

install_package() {
  local extra=${1:-} target wanted stamp started=$SECONDS
  find_venv || return
  target=$repo${extra:+[$extra]}
  wanted="$(cat "$repo/constraints.txt" "$repo/setup.py" "$repo/pyproject.toml" | cksum) $repo"
  stamp=$VENV/.installed${extra:+-$extra}
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi

  make_venv || return
  echo "installing rl_megatron${extra:+ with its $extra extra}, versions as in constraints.txt (minutes the first time)"
  if ! PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip install --disable-pip-version-check --prefer-binary --no-compile \
    --progress-bar off --constraint "$repo/constraints.txt" --editable "$target" 2>&1 |
    tee "$VENV/install.log" | show_progress; then
    sed '/^WARNING/d' "$VENV/install.log" | tail -n 30 >&2
    echo "error: the installation failed; all of pip's output is in $VENV/install.log" >&2
    return 1
  fi
  echo "$wanted" | tee "$stamp" >"$VENV/.installed" # an environment with an extra also has the package itself
  echo "installed in $((SECONDS - started)) s"
}

# Show the large downloads and the last step of pip's output.
show_progress() {
  awk '/^ *Downloading .*[0-9] GB\)|^ *Downloading .*[0-9][0-9](\.[0-9]+)? MB\)/ { print "  " $1, $2, $3, $4; fflush() }
       /^Installing collected packages/ { print "  unpacking", NF - 3, "packages"; fflush() }'
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  install_package "$@"
fi
