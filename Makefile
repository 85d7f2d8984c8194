# Every target sets up what it needs in .venv; Rust (stable) and Python 3.10 or later are all that must be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A checkpoint to report on in `make demo`; without one, a small model's is written and used.
CKPT ?=

# Of `make prove`: the seed, by default a new one, or that of the run that was interrupted; a part of the cases, of 1.0;
# after how many seconds it is to end, by default when all cases are done.
SEED ?=
SCALE ?= 1.0
LIMIT ?=
JOBS ?= 2

# Of the Python tests marked `slow`: how many seconds they may take together, and the seed of their order; what there is
# no time for is skipped, and the next seed begins with others.
SLOW_SECONDS ?= 20
SLOW_SEED ?= 20261121

# Where Python may not keep what it has compiled, each process that a test starts compiles all it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help help-all build dev demo tools test test-fast test-rust test-release test-python test-oracle test-clusters \
  test-slow prove frameworks check format bench fuzz valgrind coverage mutants mutants-python docs look wheel licences clean
.DEFAULT_GOAL := help

# What every contributor needs is marked with two number signs, the rest with three.
help: ## list these targets; make help-all lists the others too
	@awk -F ':.*## ' '/^[a-z-]+:.*[^\#]## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

help-all: ### list all targets
	@awk -F ':.*##+ ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# For each fuzzer, in `make fuzz`.
SECONDS ?= 60

# Says what it does; what the command prints is of interest only if it fails.
QUIETLY = @mkdir -p target; run() { echo "$$1 …"; shift; "$$@" > target/make.log 2>&1 \
  || { cat target/make.log; exit 1; }; }; run

$(BIN)/maturin:
	$(QUIETLY) "Making $(VENV)" $(PYTHON) -m venv $(VENV)
	$(QUIETLY) "Installing maturin" $(BIN)/python -m pip install --upgrade pip 'maturin>=1.9.4,<2'

# The package is installed, with what it imports and what its first user wants, when pyproject.toml changes; its module is
# built on each call, which takes a second when nothing has changed. What a target needs is built as the target is.
PROFILE := --release
HOW_LONG = $(if $(PROFILE), (a minute or three the first time))
$(VENV)/.extras: pyproject.toml $(BIN)/maturin
	$(QUIETLY) "Building and installing shardwise$(HOW_LONG)" \
	  env VIRTUAL_ENV=$(VENV) $(BIN)/maturin develop $(PROFILE) --extras cli,dtypes
	@touch $@

build: $(VENV)/.extras ## build the package into .venv: optimised, a minute or three
	$(QUIETLY) "Building shardwise" env VIRTUAL_ENV=$(VENV) $(BIN)/maturin develop --release --skip-install

dev test-fast: PROFILE :=
dev: $(VENV)/.extras ## build it unoptimised: an edit in Rust is seen from Python in seconds
	$(QUIETLY) "Building shardwise, unoptimised" env VIRTUAL_ENV=$(VENV) $(BIN)/maturin develop --skip-install

# What tests and checks are run with.
$(VENV)/.tools: pyproject.toml $(BIN)/maturin
	$(QUIETLY) "Installing what tests and checks need" $(BIN)/python -m pip install 'pip>=25.1' --group test --group check
	@touch $@

tools: $(VENV)/.tools

demo: build ## report on a checkpoint, cut it for 4 devices and for 8, merge it and compare; CKPT=… uses yours
	@$(BIN)/python examples/demo.py $(if $(CKPT),"$(CKPT)")

test: test-rust test-python ## run the tests, in minutes: Rust, Python, doctests, pages; slow ones for SLOW_SECONDS (20) in all

test-fast: dev tools ## in a minute: few cases and examples of each test, none that takes long, the unit tests of Rust
	PROPTEST_CASES=16 cargo test --quiet --lib
	$(BIN)/python -m pytest -q --slow-seconds 0 --cases 2 --hypothesis-profile fast

test-rust:
	cargo test --quiet --workspace

# Without debug assertions, as users have it.
test-release:
	cargo test --quiet --profile release-test --lib

test-python: build tools
	$(BIN)/python -m pytest --slow-seconds $(SLOW_SECONDS) --slow-seed $(SLOW_SEED)

frameworks: build tools
	$(QUIETLY) "Installing the frameworks (minutes; some 2 GB)" $(BIN)/python -m pip install --group frameworks

test-oracle: frameworks ### install the frameworks and compare with them
	$(BIN)/python -m pytest tests/oracle tests/interop tests/docs/test_documents.py -rs --slow-seconds $(SLOW_SECONDS) --slow-seed $(SLOW_SEED)

# The S3 server and the MPI come from PyPI as well.
test-clusters: build tools ### install Dask, an MPI and an S3 server, and run the tests of clusters and object stores
	$(QUIETLY) "Installing Dask, an MPI and an S3 server" $(BIN)/python -m pip install --group clusters
	$(BIN)/python -m pytest tests/store/write/test_clusters.py tests/store/data/test_objects.py tests/store/write/test_object_tasks.py \
	  tests/store/write/test_object_plans.py tests/store/write/places/test_shared_objects.py tests/store/write/test_trips.py tests/store/write/request/test_companion_files.py \
	  tests/execute tests/docs/test_page_blocks.py -rs

prove: frameworks ### compare millions of cases with oracles; Ctrl-C stops, the same command continues; SEED=… repeats
	$(BIN)/python -m tests.prove --resume --jobs $(JOBS) --scale $(SCALE) $(if $(SEED),--seed $(SEED)) \
	  $(if $(LIMIT),--limit $(LIMIT))

test-slow: frameworks ### run all tests that are marked slow, however long they take
	$(BIN)/python -m pytest -m slow -rs

check: build tools ## formats, lints, types and the tests, as continuous integration does: some 10 minutes
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest shardwise._core
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet .github
	$(MAKE) test test-release

format: tools ## format the Rust and Python code
	cargo fmt --all
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# PyTorch may be missing, as in the group `frameworks`; where it is installed, it is compared with.
bench: frameworks ## time the kernels, and the same work in other libraries, for an hour: writes docs/benchmarks.md
	$(QUIETLY) "Installing what draws charts and builds wheels" $(BIN)/python -m pip install --group bench --group release
	cargo bench --bench kernels --bench reshard
	$(BIN)/python benches/peers/run.py --allow-missing torch,mooncake

fuzz: build tools ### run every fuzzer for SECONDS each (60), from a new seed each time
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

valgrind: build tools ### run views and copies under valgrind, which must be installed
	PYTHONMALLOC=malloc valgrind --log-file=target/valgrind.log $(BIN)/python -m tests.process.test_guard_pages heap
	@if grep -B5 -A20 '_core\.' target/valgrind.log; then exit 1; else echo "no report in which the compiled module has a part"; fi

coverage: frameworks ### what the tests reach: lines and branches of the Python package, lines of the core
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -q; status=$$?; \
	  $(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report && exit $$status
	$(BIN)/python -m tests.rust.coverage

# Takes hours; FILE chooses one.
FILE ?= rust/core/**/*.rs
mutants: ### change the core's arithmetic line by line and see whether its unit tests notice
	cargo install --quiet --locked cargo-mutants
	PROPTEST_CASES=64 cargo mutants --package shardwise-core --file '$(FILE)' --output target -- --lib

# A second for each change, of which COUNT are drawn by SEED from each file; FILE is one or several.
COUNT ?=
mutants-python: build tools ### the same for the Python package: FILE=python/shardwise/layout.py, COUNT=50 per file or EVERY=4 for a quarter
	$(BIN)/python -m tests.mutants $(if $(COUNT),--count $(COUNT)) $(if $(EVERY),--every $(EVERY)) $(if $(SEED),--seed $(SEED)) $(FILE)

# Needs no network once its tools are there: what the pages link to is theirs, or is not followed.
docs: build ## build the site into target/site, with every link and name looked up: a minute
	$(QUIETLY) "Installing what builds the site" $(BIN)/python -m pip install --group docs
	$(BIN)/python docs/pictures/make.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict --clean
	$(BIN)/python -m release.site.check target/site

# Of the package only the script of axe-core is wanted, not the driver of browsers that it would bring.
look: docs ### check every page, a report and all pictures in Chromium: contrast, texts, keyboard, search (axe-core)
	$(BIN)/python -m pip install --quiet --no-deps 'axe-playwright-python>=0.1.7,<1'
	$(BIN)/python -m release.site.look target/site

wheel: $(BIN)/maturin ## build the sdist and the wheel from it into dist/, check and use them: some 5 minutes
	$(QUIETLY) "Upgrading pip, which must know dependency groups" $(BIN)/python -m pip install 'pip>=25.1'
	$(QUIETLY) "Installing what builds wheels" $(BIN)/python -m pip install --group release
	@$(BIN)/python -m release.wheel

licences: ### list the licences of what is linked in
	$(PYTHON) -m release.licences

clean: ## remove what was built
	rm -rf target $(VENV) dist
