#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks that every source file names its licence; `--fix` adds missing lines.
set -euo pipefail
cd "$(dirname "$0")/.."
status=0
while IFS= read -r file; do
  [ -f "$file" ] || continue
  head -n 3 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' && continue
  if [ "${1:-}" != --fix ]; then
    echo "no licence header: $file"
    status=1
    continue
  fi
  case $file in
    *.rs | *.proto | *.go) header='// SPDX-License-Identifier: Apache-2.0' ;;
    *) header='# SPDX-License-Identifier: Apache-2.0' ;;
  esac
  if head -n 1 "$file" | grep -q '^#!'; then
    sed -i "1a $header" "$file"
  else
    sed -i "1i $header" "$file"
  fi
done < <(git ls-files -co --exclude-standard '*.rs' '*.proto' '*.go' '*.py' '*.sh' '.ci/run' Makefile)
exit $status
