#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh SECONDS [TARGET…]: fuzzes each target for SECONDS, one per core at a time. Uses libFuzzer
# if cargo-fuzz is installed or can be, otherwise the mutator of crates/edl-fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO=${CARGO:-cargo}
export SECS=$1
shift
if [ $# = 0 ]; then mapfile -t targets < <(ls crates/edl-fuzz/corpus); else targets=("$@"); fi

# In a folder of its own, so that installing it changes no other project's cargo-fuzz.
version=0.13.2
root=${XDG_CACHE_HOME:-$HOME/.cache}/elasticdl/cargo-fuzz-$version
if [ ! -x "$root/bin/cargo-fuzz" ]; then
  echo "fuzz: installing cargo-fuzz $version"
  "$CARGO" install cargo-fuzz --version "=$version" --locked --quiet --root "$root" || true
fi
PATH=$root/bin:$PATH
export PATH

if "$CARGO" fuzz --version >/dev/null 2>&1; then
  # The compiler that builds the project has all that libFuzzer needs, but only a nightly one takes
  # the flags without this.
  export RUSTC_BOOTSTRAP=1
  echo "fuzz: libFuzzer, by $("$CARGO" fuzz --version)"
  "$CARGO" fuzz build
  # New inputs go to fuzz/corpus, which is not in the repository; failing ones to fuzz/artifacts.
  run_target() {
    local log=fuzz/corpus/$1.log status=0
    mkdir -p "fuzz/corpus/$1"
    # A page of Parquet may claim 1 GiB, twice, so the limit is above that.
    FUZZ_TARGET=$1 "$CARGO" fuzz run any "fuzz/corpus/$1" "crates/edl-fuzz/corpus/$1" -- \
      -max_total_time="$SECS" -timeout=60 -malloc_limit_mb=2048 -rss_limit_mb=4096 \
      -max_len=65536 >"$log" 2>&1 || status=$?
    if [ $status != 0 ]; then
      grep -v '^#' "$log" | tail -n 60
      echo "fuzz: $1 FAILED; the input is in fuzz/artifacts/any, the log is $log"
      return 1
    fi
    # Edges of the program that were reached, from the first and the last line that counts them.
    echo "fuzz: $1: $(sed -n 's/^Done \([0-9]*\) runs.*/\1/p' "$log") inputs," \
      "$(grep -o 'cov: [0-9]*' "$log" | sed -n '1s/cov: //p') edges reached by the corpus," \
      "$(grep -o 'cov: [0-9]*' "$log" | tail -n 1 | sed 's/cov: //') at the end"
  }
else
  echo "fuzz: no libFuzzer (cargo-fuzz is not installed); mutating without coverage"
  "$CARGO" test --release --locked -p edl-fuzz --test corpora --no-run
  run_target() {
    FUZZ_SECS=$SECS "$CARGO" test --quiet --release --locked -p edl-fuzz --test corpora -- \
      --exact "$1" --nocapture
  }
fi
export -f run_target
# shellcheck disable=SC2016 # the inner shell expands it
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -c 'run_target "$1"' run {}
