#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh SECONDS [TARGET…]: fuzzes each target for SECONDS, one per core at a time. Uses libFuzzer
# if cargo-fuzz and a nightly compiler are installed, otherwise the mutator of crates/edl-fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO=${CARGO:-cargo}
export SECS=$1
shift
if [ $# = 0 ]; then mapfile -t targets < <(ls crates/edl-fuzz/corpus); else targets=("$@"); fi
if "$CARGO" +nightly fuzz --version >/dev/null 2>&1; then
  "$CARGO" +nightly fuzz build
  # New inputs go to fuzz/corpus, which is not in the repository; failing ones to fuzz/artifacts.
  run_target() {
    mkdir -p "fuzz/corpus/$1"
    FUZZ_TARGET=$1 "$CARGO" +nightly fuzz run any "fuzz/corpus/$1" "crates/edl-fuzz/corpus/$1" -- \
      -max_total_time="$SECS" -timeout=60 -malloc_limit_mb=1024 -max_len=65536
  }
else
  echo "fuzz: no cargo-fuzz with a nightly compiler; mutating without coverage"
  "$CARGO" test --release --locked -p edl-fuzz --test corpora --no-run
  run_target() {
    FUZZ_SECS=$SECS "$CARGO" test --quiet --release --locked -p edl-fuzz --test corpora -- \
      --exact "$1" --nocapture
  }
fi
export -f run_target
# shellcheck disable=SC2016 # the inner shell expands it
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -c 'run_target "$1"' run {}
