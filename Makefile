# SPDX-License-Identifier: Apache-2.0
# Everything that a developer or CI runs. `make help` lists it.

CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/elasticdl
VENV = $(CACHE)/venv-$(shell sha256sum tests/python/requirements.txt | cut -c1-12)
# Large: Keras, TensorFlow and PyTorch, for tests of Python models and as peers in benchmarks.
FRAMEWORKS = $(CACHE)/venv-$(shell sha256sum tests/python/requirements-python.txt | cut -c1-12)
# Recreated for every run: the wheel as a user installs it.
FRESH = $(CACHE)/venv-wheel
# What the wheel depends on, so that installing it needs no network.
NUMPY = $(CACHE)/numpy-$(shell sed -n 's/^numpy==//p' tests/python/requirements-python.in)
# The browser's driver, for the test of the page.
DRIVER = $(CACHE)/page-$(shell sha256sum tests/page/package-lock.json | cut -c1-12)
TARGET = $(or $(CARGO_TARGET_DIR),target)
WHEELS = $(TARGET)/wheels
CARGO ?= cargo
# One profile for the binary and for the tests that start it: nothing is compiled twice.
PROFILE = --release

.DEFAULT_GOAL := build
.PHONY: build static dist images wheel test compile suites test-cluster lint unit page python docs try-install reference fresh bench soak fuzz sim mutate verify proto requirements doc deny setup clean help
# What a check misses on this machine: shown at the end of `make test`, and a failure with CI=true.
skip = printf 'skip\t%s\n' $(1) >> $${ELASTICDL_SKIPS:-/dev/stderr}

build: ## Build the elasticdl command (target/release/elasticdl)
	$(CARGO) build $(PROFILE)

# Only the last step differs, so nothing is compiled again; the next `make build` puts the usual one back.
static: ## Build the command without shared libraries (target/static/elasticdl)
	$(CARGO) rustc $(PROFILE) --locked -p elasticdl --bin elasticdl -- -C target-feature=+crt-static
	mkdir -p $(TARGET)/static
	cp $(TARGET)/release/elasticdl $(TARGET)/static/elasticdl

# The same files give the same archive: names are sorted, times, owners and the umask are left out.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
RELEASE = elasticdl-$(VERSION)-$(shell uname -m)-linux
dist: static wheel ## Make a release: archive of the command, wheel, checksums (target/dist)
	rm -rf $(TARGET)/dist && mkdir -p $(TARGET)/dist/$(RELEASE)
	strip --strip-all -o $(TARGET)/dist/$(RELEASE)/elasticdl $(TARGET)/static/elasticdl
	cp -r README.md CHANGELOG.md LICENSE docs manifests examples model_zoo $(TARGET)/dist/$(RELEASE)
	find $(TARGET)/dist -name __pycache__ -prune -exec rm -rf {} +
	tar --create --file=$(TARGET)/dist/$(RELEASE).tar.gz --use-compress-program="gzip --no-name" --directory=$(TARGET)/dist \
		--sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX $(RELEASE)
	rm -rf $(TARGET)/dist/$(RELEASE)
	cp $(WHEELS)/*.whl $(TARGET)/dist
	cd $(TARGET)/dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

images: static ## Build images: elasticdl:native (target/images/native.tar); with docker also :python and :data
	mkdir -p $(TARGET)/images
	$(TARGET)/static/elasticdl zoo build --builder=own --image=elasticdl:native --output=$(TARGET)/images/native.tar docker/native
	@if docker version >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory wheel && docker load --input $(TARGET)/images/native.tar && \
		docker build --file docker/Dockerfile --tag elasticdl:python . && \
		docker build --file docker/Dockerfile.data --tag elasticdl:data .; \
	else echo "images: no docker answers, elasticdl:python and elasticdl:data are left out"; fi

wheel: $(FRAMEWORKS)/ready ## Build the Python package (target/wheels/elasticdl-….whl)
	rm -rf $(WHEELS)
	$(FRAMEWORKS)/bin/maturin build --release --locked --out $(WHEELS)

test: ## Everything that needs no cluster; lists what was skipped, and how long each part took
	@bash tests/parts.sh setup suites try-install

# The command with all tests, so that all cores are busy. Maturin builds the Python extension.
compile: ## Build the command and everything that tests run
	$(CARGO) test $(PROFILE) --locked --workspace --exclude=edl-python --exclude=edl-commit --lib --bins --tests --no-run
	$(CARGO) build $(PROFILE) --locked --workspace --example page_fixture

# Together these tests keep all cores busy, which none of them does alone.
suites: setup compile fresh ## The tests of unit, page, python and docs, side by side
	CARGO=$(CARGO) ELASTICDL_TEST_PYTHON=$(VENV)/bin/python $(VENV)/bin/python tests/run_all.py \
		$(TARGET)/release/elasticdl $(FRESH)/bin/python $(TEST_PAGES)

setup: $(VENV)/ready ## Install test dependencies (virtual environment; Debian packages if root)
	@bash tests/setup.sh

# Their names contain the hash of their requirements, so they are never out of date.
$(VENV)/ready: REQUIREMENTS = tests/python/requirements.txt
$(FRAMEWORKS)/ready: REQUIREMENTS = tests/python/requirements-python.txt
$(VENV)/ready $(FRAMEWORKS)/ready:
	rm -rf $(@D)
	python3 -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $(REQUIREMENTS)
	touch $@

$(NUMPY)/ready: $(FRAMEWORKS)/ready
	mkdir -p $(@D)
	awk '/^[^ #]/ { is_numpy = /^numpy==/ } is_numpy' tests/python/requirements-python.txt > $(@D)/requirements.txt
	$(FRAMEWORKS)/bin/pip download --quiet --disable-pip-version-check --require-hashes --no-deps --dest $(@D) -r $(@D)/requirements.txt
	touch $@

# They keep the versions that they have; UPGRADE=1 takes the newest ones that the .in files allow.
requirements: ## Write requirements*.txt from the .in files: all versions, and the hashes of all files
	@bash tests/requirements.sh $(if $(UPGRADE),--upgrade)

# In the release profile: build scripts and procedural macros are those of the build.
lint: setup ## Formatting, lints, scripts
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(PROFILE) --workspace --all-targets --locked -- -D warnings
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/python tests/features.py
	$(VENV)/bin/python tests/mutate.py --check
	@if command -v shellcheck >/dev/null; then shellcheck .ci/run tests/*.sh tests/page/*.sh tests/cluster/harness/*.sh; \
	else $(call skip,"lint of scripts: shellcheck is not installed"); fi
	@if command -v gofmt >/dev/null; then test -z "$$(gofmt -l tests/cluster/components | tee -a /dev/stderr)"; \
	else $(call skip,"lint of Go: gofmt is not installed"); fi

unit: setup ## Unit, property, simulation and end-to-end tests; TEST=NAME selects tests by name
	CARGO=$(CARGO) ELASTICDL_TEST_PYTHON=$(VENV)/bin/python $(VENV)/bin/python tests/run_rust.py $(TEST)

# With the whole workspace's features, as `make unit` has built it: nothing is compiled twice.
TEST_PAGES = bash tests/page/run.sh $(TARGET)/release/elasticdl $(TARGET)/release/examples/page_fixture $(DRIVER)
page: build ## The pages of a real job and of the operator in a real browser; SHOTS=DIR keeps screenshots
	$(CARGO) build $(PROFILE) --locked --workspace --example page_fixture
	@$(TEST_PAGES) $(SHOTS)

# A path file makes the frameworks available there, so that only the wheel is installed.
# TensorFlow and PyTorch cannot live in one process, so every file of tests gets its own.
python: setup fresh ## Tests of the Python package, as installed from its wheel
	$(FRESH)/bin/python tests/run_python.py $(TEST)

# Pages wait for their jobs: three at a time; what was checked and not run is listed at the end.
docs: setup build fresh ## Test every command in the documentation, its links and its reference
	ELASTICDL=$(TARGET)/release/elasticdl ELASTICDL_PYTHON=$(FRESH)/bin/python \
		$(VENV)/bin/python -m pytest -q -n 3 --dist=worksteal tests/docs tests/scripts

reference: setup build ## Regenerate docs/reference from the command and its source
	$(VENV)/bin/python tests/docs/reference.py $(TARGET)/release/elasticdl

try-install: setup dist $(NUMPY)/ready ## Test each way to install from the README, in an empty environment
	TARGET=$(abspath $(TARGET)) PACKAGES=$(NUMPY) $(VENV)/bin/python -m pytest -q tests/install

# Where there is no KUBECONFIG, clusters are started on this machine (tests/cluster/README.md). Tests
# mostly wait for pods, so four run at a time.
NODE_PACKAGES = containerd runc containernetworking-plugins iproute2 iptables conntrack ethtool socat openssl
test-cluster: setup static build fresh ## Tests on real Kubernetes clusters (K8S_TESTS=True: fail where they cannot run)
	@bash tests/setup.sh $(NODE_PACKAGES)
	$(VENV)/bin/python -m pytest -q -n 4 --durations=10 tests/cluster

# TensorFlow imports JAX where there is one; without it, each of its processes starts 0.4 s earlier.
NO_JAX = import os, sys; os.environ.get("KERAS_BACKEND") == "tensorflow" and sys.modules.update(jax=None)
# A third of the time to import a framework and to exit is spent searching its objects for garbage.
# Triton prints warnings about what remains when a process exits.
LITTLE_GC = import atexit, gc, sys; gc.set_threshold(100_000, 20, 100); atexit.register(lambda gc=gc, sys=sys: "triton" in sys.modules or gc.freeze())
fresh: wheel
	rm -rf $(FRESH)
	python3 -m venv --without-pip $(FRESH)
	$(FRAMEWORKS)/bin/pip --python $(FRESH)/bin/python install --quiet --disable-pip-version-check --no-deps $(WHEELS)/*.whl
	{ $(FRAMEWORKS)/bin/python -c "import site; print(site.getsitepackages()[0])"; printf '%s\n' '$(NO_JAX)' '$(LITTLE_GC)'; } \
		> $$($(FRESH)/bin/python -c "import site; print(site.getsitepackages()[0])")/frameworks.pth

sim: ## Simulate whole jobs: make sim SEED=17 replays one, make sim SEEDS=2000 runs many
	$(if $(SEED),SIM_SEED=$(SEED),SIM_SEEDS=$(or $(SEEDS),2000)) $(CARGO) test $(PROFILE) --locked -p edl-sim --test sim every_job -- --nocapture

mutate: ## Plant bugs one by one, and count the seeds until the simulation finds each
	python3 tests/mutate.py

# Needed only after a .proto file changes; a test of edl-net fails if it was forgotten.
proto: ## Write the Rust code of the protos (crates/edl-net/src/generated)
	cd crates/edl-net/generate && $(CARGO) run --locked

# Miri comes with a nightly compiler only: rustup component add --toolchain nightly miri
verify: ## Check shared memory between workers: every order of events (loom), unsafe reads (Miri)
	cd crates/edl-net/verify && $(CARGO) test $(PROFILE) --locked
	@if $(CARGO) +nightly miri --version >/dev/null 2>&1; then \
		cd crates/edl-net/verify && $(CARGO) +nightly miri test --locked --lib; \
	else echo "verify: Miri is not installed; unsafe reads are not checked"; fi

# With libFuzzer where cargo-fuzz is installed or can be, else with our own mutator.
fuzz: ## Fuzz every parser for FUZZ_SECS=600 seconds, or one of them: TEST=parquet
	@bash tests/fuzz.sh $(or $(FUZZ_SECS),600) $(TEST)

soak: setup build ## Long runs: thousands of simulated seeds, a thousand faults in real jobs, many chaos seeds, full Fashion-MNIST, scripts of many libraries, all fuzz targets
	@bash tests/setup.sh dataset-fashion-mnist
	SIM_SEEDS=100000 $(CARGO) test $(PROFILE) --locked -p edl-sim --test sim every_job
	$(VENV)/bin/python tests/chaos.py $(TARGET)/release/elasticdl --faults=1000
	CHAOS_SEEDS=20 $(CARGO) test $(PROFILE) --locked -p elasticdl --test e2e chaos -- --test-threads=2
	$(CARGO) test $(PROFILE) --locked -p elasticdl --test e2e accuracy -- --ignored --nocapture
	$(VENV)/bin/python -m pytest -q -s tests/cluster/test_makespan.py
	$(VENV)/bin/python tests/cluster/edl_case.py $(TARGET)/release/elasticdl
	$(MAKE) --no-print-directory fresh
	$(FRAMEWORKS)/bin/pip --python $(FRESH)/bin/python install --quiet --disable-pip-version-check --no-deps --require-hashes \
		-r tests/python/requirements-soak.txt
	$(FRESH)/bin/python -m pytest -q -p no:cacheprovider tests/python/soak_trainers.py tests/python/soak_matrix.py
	$(MAKE) --no-print-directory fuzz

# The peers are large: where they cannot be installed, the benchmarks say so and print the rest.
bench: build ## Run benchmarks: speeds relative to peers and to the limits of the machine
	-$(MAKE) --no-print-directory $(FRAMEWORKS)/ready
	$(CARGO) run $(PROFILE) --locked -p edl-core --example ledger_bench
	$(CARGO) run $(PROFILE) --locked -p edl-master --example world_bench
	$(CARGO) run $(PROFILE) --locked -p edl-sched --example plan_bench
	$(CARGO) run $(PROFILE) --locked -p edl-data --example recordio_bench
	$(CARGO) run $(PROFILE) --locked -p edl-tensor --example tensor_bench
	$(CARGO) run $(PROFILE) --locked -p edl-ps --example ps_bench
	ELASTICDL_TEST_PYTHON=$(FRAMEWORKS)/bin/python $(CARGO) run $(PROFILE) --locked -p edl-zoo --example engine_bench
	$(CARGO) run $(PROFILE) --locked -p elasticdl --example step_bench
	$(CARGO) run $(PROFILE) --locked -p elasticdl --example page_bench
	ELASTICDL_TEST_PYTHON=$(FRAMEWORKS)/bin/python $(CARGO) run $(PROFILE) --locked -p edl-net --example allreduce_bench
	ELASTICDL_TEST_PYTHON=$(FRAMEWORKS)/bin/python $(CARGO) run $(PROFILE) --locked -p elasticdl --example recovery_bench
	-$(MAKE) --no-print-directory fresh && $(FRESH)/bin/python tests/python/python_bench.py
	$(VENV)/bin/python tests/cluster/kwok_bench.py $(TARGET)/release/elasticdl

doc: ## Build the API documentation
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

# A database fetched earlier is used, up to the age that cargo-deny accepts.
ADVISORIES = $(or $(CARGO_HOME),$(HOME)/.cargo)/advisory-dbs
deny: ## Check licences, sources and known vulnerabilities of dependencies (needs cargo-deny)
	cargo deny --offline check licenses bans sources
	-cargo deny fetch db
	@if [ -n "$$(ls -A $(ADVISORIES) 2>/dev/null)" ]; then cargo deny --offline check advisories; \
	else $(call skip,"advisories: no database could be fetched"); fi

clean: ## Remove build artifacts
	$(CARGO) clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14
