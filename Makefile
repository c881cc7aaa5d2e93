# SPDX-License-Identifier: Apache-2.0
# Everything that a developer or CI runs. `make help` lists it.

CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/elasticdl
VENV = $(CACHE)/venv-$(shell sha256sum tests/python/requirements.txt | cut -c1-12)
CARGO ?= cargo
# One profile for the binary and for the tests that start it: nothing is compiled twice.
PROFILE = --release

.DEFAULT_GOAL := build
.PHONY: build test lint unit bench soak sim doc deny setup clean help

build: ## Build the elasticdl command (target/release/elasticdl)
	$(CARGO) build $(PROFILE)

test: setup lint unit ## Set up what tests need, then run every check and test
	@echo "make test: all passed"

setup: $(VENV)/ready ## Install what tests need (virtual environment; Debian packages where root)
	@bash tests/setup.sh

# Its name holds the hash of what it is made from, so it is never out of date.
$(VENV)/ready:
	rm -rf $(VENV)
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r tests/python/requirements.txt
	touch $@

lint: setup ## Formatting, lints, scripts
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(PROFILE) --workspace --all-targets --locked -- -D warnings
	$(VENV)/bin/ruff check --quiet .
	@if command -v shellcheck >/dev/null; then shellcheck .ci/run tests/*.sh; \
	else echo "lint: shellcheck is not installed, scripts are not checked"; fi

unit: setup ## Unit, property, simulation and end-to-end tests
	ELASTICDL_TEST_PYTHON=$(VENV)/bin/python $(CARGO) test $(PROFILE) --workspace --locked

sim: ## Simulate one seed: make sim SEED=17
	SIM_SEED=$(SEED) $(CARGO) test $(PROFILE) --locked -p edl-master --test simulation -- --nocapture

soak: ## Long runs: thousands of simulated seeds, many chaos seeds, full Fashion-MNIST
	SIM_SEEDS=5000 $(CARGO) test $(PROFILE) --locked -p edl-master --test simulation
	CHAOS_SEEDS=20 $(CARGO) test $(PROFILE) --locked -p elasticdl --test e2e chaos
	$(CARGO) test $(PROFILE) --locked -p elasticdl --test e2e accuracy -- --ignored --nocapture

bench: build ## Print speeds as ratios to what the machine can do
	$(CARGO) run $(PROFILE) --locked -p edl-core --example ledger_bench
	$(CARGO) run $(PROFILE) --locked -p edl-data --example recordio_bench
	$(CARGO) run $(PROFILE) --locked -p edl-tensor --example tensor_bench
	$(CARGO) run $(PROFILE) --locked -p edl-ps --example ps_bench
	$(CARGO) run $(PROFILE) --locked -p elasticdl --example step_bench

doc: ## Build the API documentation
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

deny: ## Check licences and sources of dependencies (needs cargo-deny)
	cargo deny --offline check licenses bans sources

clean: ## Remove what was built
	$(CARGO) clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10
