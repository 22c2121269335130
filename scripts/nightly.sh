#!/usr/bin/env bash
# Run every test, in shards that are not run again for the same commit once they have passed, and report on all.
#   scripts/nightly.sh                 every shard that has not passed yet
#   scripts/nightly.sh --shard I/N     the Ith of N shards, as on the Ith of N machines
# A shard is every Nth file of tests. Its log, and what its tests cost, are in .nightly/COMMIT-of-N/, and report.md there
# says what all shards found so far.
# PYTHON, VENV    as in scripts/install.sh
# SHARDS          how many there are without --shard (default 8)
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
number=${SHARDS:-8} chosen=$(seq "${SHARDS:-8}")
if [ $# -gt 0 ]; then
  if [ $# -ne 2 ] || [ "$1" != --shard ] || ! [[ $2 =~ ^([1-9][0-9]*)/([1-9][0-9]*)$ ]] ||
    ((BASH_REMATCH[1] > BASH_REMATCH[2])); then
    echo "error: '$*' is not --shard I/N with 1 <= I <= N, as in --shard 2/8" >&2
    exit 2
  fi
  chosen=${BASH_REMATCH[1]} number=${BASH_REMATCH[2]}
fi
if [ -n "$(git status --porcelain)" ]; then
  echo "error: the tree has changes that no commit has, so that a result would be of no commit; commit or stash them:" >&2
  git status --short >&2
  exit 2
fi

source scripts/install.sh
install_package dev
scripts/install_vllm.sh
scripts/install_adapters.sh
scripts/install_tinker.sh
results=$repo/.nightly/$(git rev-parse --short=12 HEAD)-of-$number
mkdir -p "$results"
# Only Transformer Engine's Python, without its libraries: tests/transformer_engine compares its record with it.
te=$VENV/transformer-engine
[ -d "$te" ] || "$VENV/bin/python" -m pip install --quiet --no-deps --target "$te" transformer-engine==2.20.2
export RL_MEGATRON_TRANSFORMER_ENGINE=$te

failed=0
for shard in $chosen; do
  name=$results/shard-$shard
  if [ "$(cat "$name.status" 2>/dev/null)" = 0 ]; then
    echo "shard $shard of $number has passed already"
    continue
  fi
  echo "shard $shard of $number: $name.log"
  status=0
  VENV=$VENV scripts/test.sh --all --shard "$shard/$number" -p no:cacheprovider --durations-to "$name.jsonl" \
    >"$name.log" 2>&1 || status=$?
  echo "$status" >"$name.status"
  tail -n 1 "$name.log"
  [ "$status" = 0 ] || failed=1
done
"$VENV/bin/python" -m tests.costs "$results"/shard-*.jsonl >"$results/report.md"
sed '/^$/,$d' "$results/report.md"
echo "report: $results/report.md"
exit "$failed"
