#!/usr/bin/env bash
# Make or update the project's virtual environment, with the pinned dependencies. pip refuses what has not the hash that
# hashes.txt has for it.
#   scripts/install.sh [EXTRA]     EXTRA: one of setup.py's extras (data, dev, docs, rewards, te, triton)
# PYTHON   the interpreter of the environment (default python3; 3.11 or newer)
# VENV     its directory (default: .venv, or for example .venv-3.12 if .venv has another version than the given PYTHON)
# HASHES   off: install the versions of constraints.txt without comparing hashes, for example if the registry has built a
#          file again
# Other scripts source this one for `install_package`, which sets VENV, and for `install_hashed` and `install_with_pip`.

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
  local extra=${1:-} target wanted stamp missing started=$SECONDS
  find_venv || return
  target=$repo${extra:+[$extra]}
  wanted="$(cat "$repo/constraints.txt" "$repo/hashes.txt" "$repo/setup.py" "$repo/pyproject.toml" | cksum) $repo"
  stamp=$VENV/.installed${extra:+-$extra}
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    missing=$(list_missing "$extra" 2>/dev/null) || missing=
    if [ -z "$missing" ]; then
      if [ "${BASH_SOURCE[0]}" = "$0" ]; then echo "up to date: $VENV"; fi
      return
    fi
    echo "these packages were removed since the installation, and are installed again: $missing"
  fi

  make_venv || return
  echo "installing rl_megatron${extra:+ with its $extra extra}, versions as in constraints.txt (minutes the first time)"
  : >"$VENV/install.log"
  if [ "${HASHES:-on}" = off ]; then
    echo "HASHES=off: only the versions of downloads are checked, not their hashes"
    install_with_pip --no-compile --constraint "$repo/constraints.txt" --editable "$target" || return
  else
    install_with_hashes "$extra" "$target" || return
  fi
  echo "$wanted" | tee "$stamp" >"$VENV/.installed" # an environment with an extra also has the package itself
  echo "installed in $((SECONDS - started)) s"
}

# Print the names of the packages that the package and the extra $1 need and that are not in the environment.
list_missing() {
  "$VENV/bin/python" -I - "rl_megatron${1:+[$1]}" <<'END'
import sys
from importlib.metadata import PackageNotFoundError, requires

from pip._vendor.packaging.requirements import Requirement

missing, seen, waiting = set(), set(), [Requirement(sys.argv[1])]
while waiting:
    package = waiting.pop()
    extras = ("", *sorted(package.extras))
    if (package.name, extras) in seen:
        continue
    seen.add((package.name, extras))
    try:
        needed = [Requirement(text) for text in requires(package.name) or ()]
    except PackageNotFoundError:
        missing.add(package.name)
        continue
    waiting += [other for other in needed if not other.marker or any(other.marker.evaluate({"extra": e}) for e in extras)]
print(*sorted(missing))
END
}

# Install what the package and an extra need if it has the hashes of hashes.txt, and then the package.
install_with_hashes() {
  local extra=$1 target=$2
  select_releases CPU CPU >"$VENV/pins.txt"
  if ! run_pip install --no-compile --require-hashes --no-deps --requirement "$VENV/pins.txt" &&
    ! grep -q '^ERROR: No matching distribution found for torch' "$VENV/install.log"; then
    report_failure
    return 1
  fi
  if ! compgen -G "$VENV/lib/python*/site-packages/torch-*+cpu.dist-info" >/dev/null; then
    echo "pip finds no CPU build of torch that hashes.txt has: the usual build is installed"
  fi
  select_releases package "${extra:-package}" >"$VENV/pins.txt"
  install_hashed "$VENV/pins.txt" --no-compile || return
  if grep -qsE '^Requires-Dist: (nvidia|cuda|triton)' "$VENV"/lib/python*/site-packages/torch-*.dist-info/METADATA; then
    select_releases CUDA CUDA >"$VENV/pins.txt"
    install_hashed "$VENV/pins.txt" --no-compile || return
  fi
  if [ -n "$extra" ] && [ -z "$(select_releases "$extra" "$extra")" ]; then
    echo "hashes.txt has no releases of the extra $extra: only their versions are checked, not their hashes"
    install_with_pip --no-compile --constraint "$repo/constraints.txt" --editable "$target"
    return
  fi
  install_with_pip --no-deps --no-build-isolation --no-compile --editable "$target" || return
  if ! "$VENV/bin/python" -I -m pip check >>"$VENV/install.log" 2>&1; then
    tail -n 10 "$VENV/install.log" >&2
    echo "error: the packages in $VENV do not fit together: remove it, or set VENV to another directory" >&2
    return 1
  fi
}

# Print the releases of hashes.txt that the groups $1 and $2 need: the package, an extra, or a build of torch for CPU or CUDA.
select_releases() {
  awk -v first=", $1," -v second=", $2," '
    /^# / { groups = ", " substr($0, 3) ","; wanted = index(groups, first) || index(groups, second) }
    !/^#/ && wanted' "$repo/hashes.txt"
}

# Install all releases of a file of hashes: install_hashed FILE [OPTION…]. setuptools comes first, because it builds those
# that have no wheel, and pip would download one for that without comparing it.
install_hashed() {
  local file=$1
  shift
  awk '/^[a-z]/ { wanted = /^setuptools==/ } wanted' "$file" >"$VENV/setuptools.txt"
  if [ -s "$VENV/setuptools.txt" ]; then
    install_with_pip "$@" --require-hashes --no-deps --requirement "$VENV/setuptools.txt" || return
  fi
  install_with_pip "$@" --require-hashes --no-deps --no-build-isolation --requirement "$file"
}

# Run `pip install` and show its progress; show the end of its output and fail if it fails.
install_with_pip() {
  run_pip install --prefer-binary "$@" && return
  report_failure
  return 1
}

run_pip() {
  PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip "$@" --disable-pip-version-check --progress-bar off 2>&1 |
    tee -a "$VENV/install.log" | show_progress
}

report_failure() {
  sed '/^WARNING/d' "$VENV/install.log" | tail -n 30 >&2
  if grep -q 'DO NOT MATCH THE HASHES' "$VENV/install.log"; then
    echo "error: a download is not what was tried (its name and hashes are above); HASHES=off installs without comparing" >&2
  fi
  echo "error: the installation failed; all of pip's output is in $VENV/install.log" >&2
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
