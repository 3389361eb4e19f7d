# Every target installs what it needs into $(VENV) first; nothing outside the checkout is touched.
#     make quickstart                               the shortest way to a federated run
#     make test PYTEST_ARGS="-k fedavg -x"          arguments for pytest (or BENCH_ARGS, QUICKSTART_ARGS, PIP_ARGS)
#     make test PYTHON=python3.12 VENV=.venv312     another interpreter
#     make test-versions VERSIONS=newest            other versions of the packages than those of constraints.txt

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PIP_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
QUICKSTART_ARGS ?=

EXTRAS := test,vision,huggingface,lora,privacy,report,sweep,ray

BIN := $(VENV)/bin
BASE := $(VENV)/.installed-base
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
DIST_STAMP := $(VENV)/.installed-dist
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt

# One thread a process: more of them on contended cores make small models many times slower.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Without bytecode each worker, and each program that a test starts, would compile tests and package anew: a minute.
BYTECODE := PYTHONDONTWRITEBYTECODE=
PYTEST = $(ONE_THREAD) $(BYTECODE) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
NOT_SLOW := -m "not slow"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install quickstart test test-long measure-tests test-all test-slow test-anywhere test-versions test-flower test-flower-all test-flower-catalogue coverage lint format types registry docs test-docs dist hashes bench clean distclean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# torch goes in first and alone: with the pin in place nothing installed afterwards replaces the build that is there.
$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "FedLightning needs Python 3.11 or newer; try make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e .
	@touch $@

# What only tests, other runners and some models need. Where the wheel of torchvision does not load beside this build of
# torch, fedlightning's repair of it is there before anybody's first import.
SITE_PACKAGES = $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
$(STAMP): $(BASE)
	$(PIP_INSTALL) -e ".[$(EXTRAS)]"
	$(BIN)/python -c "import torchvision" 2>/dev/null || echo "import fedlightning" > $(SITE_PACKAGES)/repair_torchvision.pth
	@touch $@

install: $(STAMP) ## create the environment and install FedLightning in it, editable

quickstart: $(BASE) ## run examples/quickstart.py: a small federated training from end to end
	$(ONE_THREAD) $(BIN)/python examples/quickstart.py $(QUICKSTART_ARGS)

test: $(STAMP) ## run the tests, without those that take long (four minutes on 2 cores)
	$(PYTEST) $(PYTEST_ARGS)

test-long: $(STAMP) ## run those that take longer (tests/long.txt)
	$(PYTEST) -m long $(PYTEST_ARGS)

measure-tests: $(STAMP) ## write tests/long.txt anew, on an idle machine
	$(PYTEST) $(NOT_SLOW) -p tests.durations $(PYTEST_ARGS)

test-all: $(STAMP) ## run the tests, the slow ones too
	$(PYTEST) -m "slow or not slow" $(PYTEST_ARGS)

SLICE ?= 1/1
MINUTES ?=

# In the order that they were collected in: one is handed out after another.
test-slow: $(STAMP) ## run the slow tests: SLICE=1/4 a share of them, MINUTES=30 what fits, changed areas first
	$(ONE_THREAD) $(BYTECODE) $(BIN)/python -m pytest -q -n $(JOBS) --dist load --maxschedchunk 1 -p tests.slices -m slow \
		--slice $(SLICE) $(if $(MINUTES),--minutes $(MINUTES)) $(PYTEST_ARGS)

PLACE ?= kathmandu

test-anywhere: $(STAMP) ## run the tests as another machine would: processor, clock, place, terminal, order (PLACE=newfoundland)
	$(ONE_THREAD) $(BYTECODE) $(BIN)/python -m tools.anywhere $(PLACE) -n $(JOBS) --dist worksteal $(NOT_SLOW) $(PYTEST_ARGS)

VERSIONS ?= lowest
VERSIONS_VENV = .venv-$(VERSIONS)
VERSIONS_STAMP = $(VERSIONS_VENV)/.installed
VERSIONS_INSTALL = $(VERSIONS_VENV)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints-$(VERSIONS).txt

$(VERSIONS_STAMP): pyproject.toml constraints-$(VERSIONS).txt
	test -x $(VERSIONS_VENV)/bin/python || $(PYTHON) -m venv $(VERSIONS_VENV)
	$(VERSIONS_INSTALL) torch
	$(VERSIONS_INSTALL) -e ".[$(EXTRAS),clinical]"
	@touch $@

test-versions: $(VERSIONS_STAMP) ## run the tests with the oldest versions of all packages, in an environment of its own (VERSIONS=newest)
	$(ONE_THREAD) $(BYTECODE) $(VERSIONS_VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal $(NOT_SLOW) $(PYTEST_ARGS)

FLOWER_VENV ?= .venv-flower
FLOWER_INSTALL = $(FLOWER_VENV)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints-flower.txt
FLOWER_STAMP := $(FLOWER_VENV)/.installed

$(FLOWER_STAMP): pyproject.toml constraints-flower.txt
	test -x $(FLOWER_VENV)/bin/python || $(PYTHON) -m venv $(FLOWER_VENV)
	$(FLOWER_INSTALL) torch
	$(FLOWER_INSTALL) -e ".[flower]" pytest pytest-timeout hypothesis
	@touch $@

# Without Flower the tests would be skipped: that is an error here.
FLOWER_PYTEST = $(FLOWER_VENV)/bin/python -c "import flwr" && $(ONE_THREAD) $(FLOWER_VENV)/bin/python -m pytest -q

test-flower: $(FLOWER_STAMP) ## run the tests of sites over a real SuperLink, in an environment of its own
	$(FLOWER_PYTEST) tests/sites/flower $(PYTEST_ARGS)

test-flower-all: $(FLOWER_STAMP) ## run these, the slow ones too: lost sites and programs, large messages
	$(FLOWER_PYTEST) -m "slow or not slow" tests/sites/flower $(PYTEST_ARGS)

CATALOGUE ?= .flower-catalogue
CATALOGUE_SERVERS ?= 4

test-flower-catalogue: $(FLOWER_STAMP) ## every method over a real SuperLink: some 40 minutes; goes on where it was stopped
	FEDLIGHTNING_CATALOGUE=$(CATALOGUE) FEDLIGHTNING_CATALOGUE_SERVERS=$(CATALOGUE_SERVERS) $(ONE_THREAD) \
		$(FLOWER_VENV)/bin/python -m pytest -q -m slow tests/sites/flower/test_catalogue.py $(PYTEST_ARGS)

$(DOCS_STAMP): $(STAMP)
	$(PIP_INSTALL) -e ".[docs]"
	@touch $@

docs: $(DOCS_STAMP) ## build the site in docs/_build/html: warnings are errors, tutorials run
	$(ONE_THREAD) MPLBACKEND=agg $(BIN)/python -m sphinx -b html -W --keep-going -q $(SPHINX_ARGS) docs docs/_build/html
	@echo "docs/_build/html/index.html"

test-docs: docs ## open pages of the site in headless Chromium, if there is one: widths, colours, search
	$(PYTEST) -n 0 -m slow tests/docs $(PYTEST_ARGS)

$(DIST_STAMP): $(BASE)
	$(PIP_INSTALL) -e ".[dist]" setuptools
	@touch $@

dist: $(DIST_STAMP) ## build the last commit in dist/: source, wheel, bill of materials, checksums; the same bytes every time
	$(BIN)/python -m tools.dist

# Every file of a version on the index, for all systems: the wheels of torch there are those with CUDA.
hashes: $(DIST_STAMP) ## write constraints-hashes.txt from constraints.txt, by the package index
	UV_CUSTOM_COMPILE_COMMAND="make hashes" $(BIN)/uv pip compile -q --universal --python-version 3.11.5 --generate-hashes \
		--annotation-style line constraints.txt -o constraints-hashes.txt

coverage: $(STAMP) ## run the tests and report the lines and branches they miss
	$(PYTEST) $(NOT_SLOW) --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

lint: $(STAMP) ## check style and formatting (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## mend style and formatting where ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## check types (mypy)
	$(BIN)/mypy

registry: $(STAMP) ## write the names of callbacks/ and the README's table of methods from the catalogue
	$(BIN)/python -m tools.registry

bench: $(STAMP) ## measure speed and memory against a bare PyTorch loop (an idle machine, please)
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.visit
	$(BIN)/python -m benchmarks.aggregation
	$(BIN)/python -m benchmarks.memory

clean: ## remove build products and caches (not the environment, not the results of runs)
	rm -rf docs/_build docs/tutorials docs/reference/api docs/reference/methods
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -not -path './.venv*' -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environments
	rm -rf $(VENV) $(FLOWER_VENV) .venv-lowest .venv-newest
