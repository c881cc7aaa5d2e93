#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build_cost.sh [TREE [TREE]]: measures `cargo build --release` from scratch.
# A tree is a folder or a commit; the default is this tree. With two trees, compares the second
# with the first, on the same machine. Nothing else should run at the same time.
# build_cost.sh --report HTML: only prints the table of a report of `cargo build --timings`.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
scratch=$(mktemp -d)
trap 'git -C "$here" worktree prune; rm -rf "$scratch"' EXIT

# Prints the number of crates and the ten slowest units.
report() {
  python3 - "$1" <<'PYTHON'
import json, pathlib, re, sys

text = pathlib.Path(sys.argv[1]).read_text()
units = json.loads(re.search(r"const UNIT_DATA = (\[.*?\]);\n", text, re.S)[1])
crates = {(unit["name"], unit["version"]) for unit in units}
total = sum(unit["duration"] for unit in units)
print(f"  crates       {len(crates)} ({len(units)} units, {total:.0f} unit-seconds)")
for unit in sorted(units, key=lambda unit: -unit["duration"])[:10]:
    print(f"  {unit['duration']:8.1f} s   {unit['name']} {unit['version']}{unit['target']}")
PYTHON
}

if [ "${1:-}" = --report ]; then
  report "$2"
  exit
fi
exec 3>&2
users=()
for tree in "${@:-$here}"; do
  folder=$tree
  if [ ! -d "$tree" ]; then
    folder=$scratch/tree-${#users[@]}
    git -C "$here" worktree add --quiet --detach "$folder" "$tree"
  fi
  target=$scratch/target-${#users[@]}
  (cd "$folder" && cargo fetch --quiet --locked)
  TIMEFORMAT='%U %R'
  times=$( { time (cd "$folder" && CARGO_TARGET_DIR=$target cargo build --quiet --release --locked --timings 2>&3); } 2>&1)
  read -r user wall <<<"$times"
  users+=("$user")
  echo "$tree"
  echo "  user time    $user s"
  echo "  wall time    $wall s"
  echo "  binary       $(($(stat --format=%s "$target/release/elasticdl") / 1000000)) MB"
  report "$target/cargo-timings/cargo-timing.html"
  [ "$folder" = "$tree" ] || git -C "$here" worktree remove --force "$folder"
  rm -rf "$target"
done
if [ ${#users[@]} -eq 2 ]; then
  awk -v before="${users[0]}" -v after="${users[1]}" 'BEGIN { printf "user time of the second: %.0f %% of the first\n", 100 * after / before }'
fi
