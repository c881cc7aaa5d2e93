#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# parts.sh TARGET…: makes the targets one after the other, even if one fails.
# The last lines list the skipped tests with the reasons, and the wall time of each part.
# With CI=true, a skipped test is a failure: a CI machine must have everything.
#
# Tests append to the file in ELASTICDL_SKIPS: `skip<TAB>what: why` if the machine lacks something,
# `note<TAB>what: why` if another target runs the test.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${ELASTICDL_SKIPS:-}" ]; then
  ELASTICDL_SKIPS=$(mktemp)
  export ELASTICDL_SKIPS
  # shellcheck disable=SC2064  # Expanded now on purpose.
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
