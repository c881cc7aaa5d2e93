#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of pages; they are skipped if there is no browser or no node.
# run.sh ELASTICDL PAGE-FIXTURE FOLDER-OF-THE-DRIVER [FOLDER-FOR-SCREENSHOTS]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
binary=$(realpath "$1")
fixture=$(realpath "$2")
driver=$3
skip() {
  printf 'skip\tpage: %s\n' "$1" | tee -a "${ELASTICDL_SKIPS:-/dev/null}"
  exit 0
}
for program in /usr/bin/chromium node npm; do
  command -v "$program" >/dev/null || skip "$program is not installed"
done
if [ ! -e "$driver/ready" ]; then
  rm -rf "$driver"
  mkdir -p "$driver"
  cp "$here/package.json" "$here/package-lock.json" "$here/.npmrc" "$driver"
  (cd "$driver" && npm ci --silent >/dev/null 2>&1) || skip "npm cannot install the browser's driver"
  touch "$driver/ready"
fi
export NODE_MODULES="$driver"
timeout 300 node "$here/cluster.mjs" "$fixture" "${@:4}"
timeout 300 node "$here/page.mjs" "$binary" "$here/../../data/fashion_mnist" "${@:4}"
