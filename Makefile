# Two commands need nothing before them but Python 3.11 or newer: `make verify` and `make test`.
PYTHON ?= python3
WORKERS ?= 2
# Of a test function's parameters `make test` runs so many, on the newest JAX of the functions over all ops and of every third
# other one, with every facet, and on the other JAX of every fourth (tests/sample.py; CONTRIBUTING.md has what that takes); 0
# runs all, nearly 20,000.
SAMPLE ?= 1
RUN := .venv/bin/python -m
# Bytecode is kept, whatever the environment says: each worker of the tests, and each process that a test starts, would
# compile the package and rewrite the tests' assertions anew.
export PYTHONDONTWRITEBYTECODE :=

# On Python 3.11 pip stops at JAX 0.10, so the tests also run where a newer Python gets the newest JAX. The first that
# works is taken; a pyenv shim that is on PATH but points nowhere is not one. Empty where PYTHON itself is new enough.
NEWER_PYTHON ?= $(shell \
  is_newer='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))'; \
  $(PYTHON) -c "$$is_newer" 2>/dev/null || \
  for python in python3.12 python3.13 python3.14 "$$HOME"/.pyenv/versions/3.1[2-9].*/bin/python3; do \
    "$$python" -c "$$is_newer" 2>/dev/null && { echo "$$python"; break; }; \
  done)

.PHONY: help verify test test-all test-default test-newest lint format types bench notebooks docs dist clean

help:
	@echo 'make verify     set up, compare every op with its definition on the CPU, write the report'
	@echo 'make test       set up, run a sample of the tests (also on the newest JAX where a Python >= 3.12 is found)'
	@echo 'make test-all   the tests with every parameter, and how long they took'
	@echo 'make lint       ruff: rules and format       make format     let ruff mend what it can'
	@echo 'make types      pyright                      make bench      measure the engines and their peers'
	@echo 'make notebooks  execute the notebooks again, in place'
	@echo 'make docs       build the site into build/docs, without a network'
	@echo 'make dist       build the wheel and the source archive, and test them'
	@echo 'make clean      remove the environments and the caches'

verify: .venv/.installed
	$(RUN) jaxdnn verify --platform cpu

test: test-default test-newest

# Goes on with the newer Python where the other one's tests failed.
test-all:
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory --keep-going SAMPLE=0 test; status=$$?; \
	echo "test-all: $$((($$(date +%s) - start) / 60)) minutes with $(WORKERS) workers"; \
	exit $$status

test-default: .venv/.dev
	@newer='$(NEWER_PYTHON)'; set -x; $(RUN) pytest -n $(WORKERS) --sample $(SAMPLE) $${newer:+--beside}

# Expanded in the recipe, so that only the targets that need the newer Python look for it.
test-newest:
	@newer='$(NEWER_PYTHON)'; \
	if [ -n "$$newer" ]; then $(MAKE) --no-print-directory test-with NEWER_PYTHON="$$newer"; \
	else echo 'test-newest: nothing to run, no Python >= 3.12 found besides $(PYTHON)'; fi

.PHONY: test-with
test-with: .venv-newest/.test
	.venv-newest/bin/python -m pytest -n $(WORKERS) --sample $(SAMPLE)

lint: .venv/.dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .

format: .venv/.dev
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

types: .venv/.dev
	$(RUN) pyright --pythonpath .venv/bin/python

bench: .venv/.installed
	$(RUN) jaxdnn bench conv

notebooks: .venv/.dev
	.venv/bin/jupyter execute --inplace notebooks/*.ipynb

# A warning is an error: a link that leads nowhere, a page that no table of contents has.
docs: .venv/.dev
	rm -rf build/docs
	$(RUN) sphinx -W --keep-going --quiet -b html docs build/docs

dist: .venv/.dev
	rm -rf dist
	$(RUN) pytest --sample 0 tests/test_package.py
	$(RUN) build --no-isolation --outdir dist

clean:
	rm -rf .venv .venv-newest .pytest_cache .ruff_cache .hypothesis build dist docs/generated docs/ops docs/around

# The stamps: an environment is made again when pyproject.toml changes, and only then. Python 3.11's own pip knows
# no dependency groups, hence the upgrade.
.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(RUN) pip install --quiet --upgrade 'pip>=25.1'
	$(RUN) pip install --quiet --editable .
	@touch $@

.venv/.dev: .venv/.installed
	$(RUN) pip install --quiet --editable . --group dev
	@touch $@

.venv-newest/.test: pyproject.toml
	$(NEWER_PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-newest/bin/python -m pip install --quiet --editable . --group test
	@touch $@
