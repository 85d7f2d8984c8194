# Every target sets up what it needs in .venv; Rust (stable) and Python 3.10 or later are all that must be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A checkpoint to report on in `make demo`; without one, a small model's is written and used.
CKPT ?=

# How many processes run the Python tests, or the cases of `make prove`, side by side.
JOBS ?= 2

# Of `make prove`: the seed, by default a new one, or that of the run that was interrupted; a part of the cases, of 1.0;
# after how many seconds it is to end, by default when all cases are done.
SEED ?=
SCALE ?= 1.0
LIMIT ?=

# Of the Python tests marked `slow`: how many seconds they may take together in each process, and the seed of their order;
# what there is no time for is skipped, and the next seed begins with others.
SLOW_SECONDS ?= 20
SLOW_SEED ?= 20261121

# Where Python may not keep what it has compiled, each process that a test starts compiles all it imports anew.
unexport PYTHONDONTWRITEBYTECODE

# Those of one file or folder are run by one process, whose output is simpler to read.
SIDE_BY_SIDE = $(if $(WHAT),,-n $(JOBS) --dist worksteal)

# Of the tests: files or folders instead of all, further groups of pyproject.toml to install first (frameworks, clusters),
# and further options of pytest.
WHAT ?=
WITH ?=
ARGS ?=

.PHONY: help help-all build dev demo test test-fast prove check format bench fuzz valgrind coverage mutants docs look wheel clean
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

# A dependency group of pyproject.toml, when that changes.
$(VENV)/.group-%: pyproject.toml $(BIN)/maturin
	$(QUIETLY) "Installing the group $*$(if $(filter frameworks,$*), (minutes; some 2 GB))" \
	  $(BIN)/python -m pip install 'pip>=25.1' --group $*
	@touch $@

# What tests and checks are run with.
TOOLS := $(VENV)/.group-test $(VENV)/.group-check
FRAMEWORKS := $(TOOLS) $(VENV)/.group-frameworks

demo: build ## report on a checkpoint, cut it for 4 devices and for 8, merge it and compare; CKPT=… uses yours
	@$(BIN)/python examples/demo.py $(if $(CKPT),"$(CKPT)")

test: build $(TOOLS) $(addprefix $(VENV)/.group-,$(WITH)) ## run the tests, in minutes: Rust, Python, doctests, pages; WHAT=tests/store runs one folder
	$(if $(WHAT),,cargo test --quiet --workspace)
	$(BIN)/python -m pytest $(WHAT) $(SIDE_BY_SIDE) --slow-seconds $(SLOW_SECONDS) --slow-seed $(SLOW_SEED) $(ARGS)

test-fast: dev $(TOOLS) ## in a minute: few cases and examples of each test, none that takes long, the unit tests of Rust; WHAT=… too
	$(if $(WHAT),,PROPTEST_CASES=16 cargo test --quiet --lib)
	$(BIN)/python -m pytest $(WHAT) -q --slow-seconds 0 --cases 2 --hypothesis-profile fast $(ARGS)

prove: build $(FRAMEWORKS) ### compare millions of cases with oracles; Ctrl-C stops, the same command continues; SEED=… repeats
	$(BIN)/python -m tests.prove --resume --jobs $(JOBS) --scale $(SCALE) $(if $(SEED),--seed $(SEED)) \
	  $(if $(LIMIT),--limit $(LIMIT))

check: build $(TOOLS) ## formats, lints, types and the tests, as continuous integration does: some 10 minutes
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
	$(MAKE) test
	# Without debug assertions, as users have it.
	cargo test --quiet --profile release-test --lib

format: $(TOOLS) ## format the Rust and Python code
	cargo fmt --all
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# PyTorch may be missing, as in the group `frameworks`; where it is installed, it is compared with.
bench: build $(FRAMEWORKS) $(VENV)/.group-bench $(VENV)/.group-release ## time the kernels, and the same work in other libraries, for an hour: writes the pages of benchmarks
	cargo bench --bench kernels --bench reshard
	$(BIN)/python benches/peers/run.py --allow-missing torch,mooncake

fuzz: build $(TOOLS) ### run every fuzzer for SECONDS each (60), from a new seed each time
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

valgrind: build $(TOOLS) ### run views and copies under valgrind, which must be installed
	PYTHONMALLOC=malloc valgrind --log-file=target/valgrind.log $(BIN)/python -m tests.process.test_guard_pages heap
	@if grep -B5 -A20 '_core\.' target/valgrind.log; then exit 1; else echo "no report in which the compiled module has a part"; fi

coverage: build $(FRAMEWORKS) ### what the tests reach: lines and branches of the Python package, lines of the core
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -q; status=$$?; \
	  $(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report && exit $$status
	$(BIN)/python -m tests.rust.coverage

# Of Rust, hours; of Python a second for each change, of which COUNT are drawn by SEED from each file, or one in EVERY is made.
FILE ?= rust/core/**/*.rs
COUNT ?=
EVERY ?=
mutants: build $(TOOLS) ### change arithmetic line by line and see whether tests notice: FILE=rust/core/uneven.rs, or Python with COUNT=50 or EVERY=4
ifeq ($(filter %.py,$(FILE)),)
	cargo install --quiet --locked cargo-mutants
	PROPTEST_CASES=64 cargo mutants --package shardwise-core --file '$(FILE)' --output target -- --lib
else
	$(BIN)/python -m tests.mutants $(if $(COUNT),--count $(COUNT)) $(if $(EVERY),--every $(EVERY)) $(if $(SEED),--seed $(SEED)) $(FILE)
endif

# Needs no network once its tools are there: what the pages link to is theirs, or is not followed.
docs: build $(VENV)/.group-docs ## build the site into target/site, with every link and name looked up: a minute
	$(BIN)/python docs/pictures/make.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict --clean
	$(BIN)/python -m release.site.check target/site

# Of the package only the script of axe-core is wanted, not the driver of browsers that it would bring.
look: docs ### check every page, a report and all pictures in Chromium: contrast, texts, keyboard, search (axe-core)
	$(BIN)/python -m pip install --quiet --no-deps 'axe-playwright-python>=0.1.7,<1'
	$(BIN)/python -m release.site.look target/site

wheel: $(VENV)/.group-release ## build the sdist and the wheel from it into dist/, check and use them: some 5 minutes
	@$(BIN)/python -m release.wheel

clean: ## remove what was built
	rm -rf target $(VENV) dist
