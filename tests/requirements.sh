#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes every requirements.txt from the .in file next to it: the versions of all dependencies, for
# all platforms and Python 3.11 or later, with the hashes of all their files in the package index.
# Versions in a .txt file are kept, unless its .in file requires others; `requirements.sh --upgrade`
# selects the newest versions.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r tests/python/requirements-uv.txt
for file in tests/python/requirements*.in docker/requirements.in crates/edl-tensor/tests/reference/requirements.in; do
  dependencies=()
  # This one lists all packages that it needs on top of those in requirements-python.in.
  [ "$file" != tests/python/requirements-soak.in ] || dependencies=(--no-deps)
  "$folder/bin/uv" pip compile --quiet --universal --python-version=3.11 --generate-hashes --emit-build-options \
    --only-binary=:all: --custom-compile-command="make requirements" "${dependencies[@]}" "$@" \
    --output-file="${file%.in}.txt" "$file"
done
