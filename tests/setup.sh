#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs Debian packages that some tests need, and the packages given as arguments, if possible.
# Tests without their packages are skipped.
set -euo pipefail
packages=(docker-registry shellcheck tmux chromium fonts-dejavu-core "$@")
missing=()
if ! command -v dpkg >/dev/null || ! command -v apt-get >/dev/null; then
  echo "setup: not a Debian system; tests that need ${packages[*]} are skipped"
  exit 0
fi
for package in "${packages[@]}"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ]; then
  echo "setup: not root; install ${missing[*]} to run every test"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1 ||
  echo "setup: ${missing[*]} cannot be installed; tests that need them are skipped"
