#!/usr/bin/env bash
# Ask an advisory service whether the pinned releases (hashes.txt, hashes-adapters.txt) have known vulnerabilities.
#   scripts/audit.sh [ARGUMENTS OF pip-audit]
# It installs pip-audit into a temporary environment, and needs the network of the advisory service. It exits with 1 if
# there are vulnerabilities, and with 2 if they cannot be looked up.
# PYTHON   the interpreter (default python3): releases for other Pythons are not looked up
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1 || {
  echo "error: pip-audit cannot be installed from the package index" >&2
  exit 2
}
status=0
for file in hashes.txt hashes-adapters.txt; do
  echo "== $file"
  "$scratch/venv/bin/python" - "$repo/$file" >"$scratch/$file" <<'PYTHON'
import re
import sys

from packaging.requirements import Requirement

for text in re.findall(r"^[a-z0-9][^\\\n]*", open(sys.argv[1]).read(), re.MULTILINE):
    requirement = Requirement(text)
    if "+" not in str(requirement.specifier) and (requirement.marker is None or requirement.marker.evaluate()):
        print(f"{requirement.name}{requirement.specifier}")
PYTHON
  found=0
  "$scratch/venv/bin/python" -m pip_audit --progress-spinner off --strict --disable-pip --no-deps --timeout 15 \
    --requirement "$scratch/$file" "$@" 2>"$scratch/errors" || found=$?
  if [ "$found" != 0 ] && grep -qE 'could not be audited|Connection|Service|Max retries|HTTPError|timed out' "$scratch/errors"; then
    tail -n 1 "$scratch/errors" | cut -c 1-300 >&2
    echo "error: the advisory service cannot be reached, so $file is not checked; run this where it can be" >&2
    exit 2
  fi
  cat "$scratch/errors" >&2
  [ "$found" = 0 ] || status=1
done
exit "$status"
