#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# parts.sh TARGET…: makes the targets one after the other; one that fails does not hide the others.
# The last lines list what was skipped and why, and how long each part took.
# With CI=true a skipped test is a failure: that machine must have everything.
#
# Tests append to the file named by ELASTICDL_SKIPS: `skip<TAB>what: why` where the machine lacks
# something, `note<TAB>what: why` where a test is left to another target on purpose.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${ELASTICDL_SKIPS:-}" ]; then
  ELASTICDL_SKIPS=$(mktemp)
  export ELASTICDL_SKIPS
  # shellcheck disable=SC2064  # The name of now is meant.
  trap "rm -f '$ELASTICDL_SKIPS'" EXIT
fi
times=() failed=()
for part in "$@"; do
  begin=$SECONDS
  "${MAKE:-make}" --no-print-directory "$part" || failed+=("$part")
  times+=("$(printf '%5d s  %s' $((SECONDS - begin)) "$part")")
done

lines() {
  sort -u "$ELASTICDL_SKIPS" | sed -n "s/^$1\t/  /p"
}
notes=$(lines note) skips=$(lines skip)
echo
[ -z "$notes" ] || printf 'not part of this run:\n%s\n' "$notes"
printf 'skipped:\n%s\n' "${skips:-  none}"
printf 'wall time:\n'
printf '  %s\n' "${times[@]}"
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
if [ -n "$skips" ] && [ "${CI:-}" = true ]; then
  echo "FAILED: CI=true, and tests were skipped"
  exit 1
fi
echo "passed: $*"
