#!/usr/bin/env bash
# The project's virtual environment with the pinned dependencies, made or brought up to date.
#   scripts/install.sh [EXTRA]     EXTRA: one of setup.py's extras (dev, te, triton)
# PYTHON   the interpreter to make it with (default python3; 3.11 or newer)
# VENV     its directory (default: .venv; .venv-3.12 and so on where .venv has another version than the PYTHON you name)
# Sourced by the other scripts, it defines `install` and `find_venv`, which set VENV.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

find_venv() {
  if [ -n "${VENV:-}" ]; then return; fi
  VENV=$repo/.venv
  if [ -n "${PYTHON:-}" ] && [ -x "$VENV/bin/python" ]; then
    local wanted; wanted=$(version_of "$PYTHON")
    [ "$(version_of "$VENV/bin/python")" = "$wanted" ] || VENV=$repo/.venv-$wanted
  fi
}

check_python() {
  command -v "$1" >/dev/null || { echo "error: there is no '$1'; set PYTHON to a Python 3.11 or newer" >&2; return 1; }
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: '$1' is Python $(version_of "$1"); set PYTHON to a Python 3.11 or newer (PYTHON=python3.12 $0)" >&2
    return 1
  }
}

install() {
  local extra=${1:-} target wanted stamp started=$SECONDS
  check_python "${PYTHON:-python3}" || return
  find_venv
  target=$repo${extra:+[$extra]}
  wanted=$(cat "$repo/constraints.txt" "$repo/setup.py" "$repo/pyproject.toml" | cksum)" $target"
  stamp=$VENV/.installed${extra:+-$extra}
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi

  if [ ! -x "$VENV/bin/python" ]; then
    echo "making $VENV with ${PYTHON:-python3} ($(version_of "${PYTHON:-python3}"))"
    "${PYTHON:-python3}" -m venv "$VENV" || return
    echo '*' >"$VENV/.gitignore"
  fi
  echo "installing rl_megatron${extra:+ with its $extra extra} and the versions in constraints.txt (minutes the first time)"
  if ! PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip install --disable-pip-version-check --prefer-binary --no-compile --progress-bar off \
    --constraint "$repo/constraints.txt" --editable "$target" 2>&1 | tee "$VENV/install.log" | show_progress; then
    grep -v '^WARNING' "$VENV/install.log" | tail -n 30 >&2
    echo "error: the installation failed; all of pip's output is in $VENV/install.log" >&2
    return 1
  fi
  echo "$wanted" >"$stamp"
  echo "installed in $((SECONDS - started)) s"
}

# Of pip's output: the large downloads, and the last step.
show_progress() {
  awk '/^ *Downloading .*[0-9] GB\)|^ *Downloading .*[0-9][0-9](\.[0-9]+)? MB\)/ { print "  " $1, $2, $3, $4; fflush() }
       /^Installing collected packages/ { print "  unpacking", NF - 3, "packages"; fflush() }'
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  install "$@"
fi
