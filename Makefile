# The verbs people type. A fresh clone needs only python3 (3.11 or later, with venv) and make.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SEED := $(or $(SEED),$(shell date +%s))
SOAK_EXAMPLES ?= 500
REPEAT ?= 10
SCENARIO ?=
MODEL ?= fake

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help serve test lint bench soak chaos clean

help: ## print this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  ARGS="..." passes options on; PYTHON=... picks the interpreter, VENV=... the environment'

serve: $(STAMP) ## start the server, e.g. make serve ARGS="--port 8123 --workers 2"
	$(BIN)/decodefleet serve $(ARGS)

test: $(STAMP) ## run the tests, e.g. make test ARGS="tests/worker -k stop"
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## format, types, import rules, spelling, known vulnerabilities; what CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/bandit --quiet --severity-level medium --configfile pyproject.toml --recursive cluster worker kernels
	$(BIN)/python deploy/audit.py

bench: $(STAMP) ## load a running server, e.g. make bench ARGS="--concurrency 1,8,32"
	$(BIN)/decodefleet bench serve $(ARGS)

soak: $(STAMP) ## 100,000 random operations on engines, then three minutes of a live server; SEED=... repeats a run
	@echo 'SEED=$(SEED)'
	SOAK_EXAMPLES=$(SOAK_EXAMPLES) $(BIN)/python -m pytest tests/worker/test_stress.py -s --hypothesis-seed=$(SEED)
	$(BIN)/python tests/soak_live.py --seed $(SEED)

chaos: $(STAMP) ## kill each part of a cluster under 40 streams, 10 times; REPEAT=3 SCENARIO="worker" MODEL=real|ranks SEED=...
	@echo 'SEED=$(SEED)'
	CHAOS_SEED=$(SEED) CHAOS_REPEAT=$(REPEAT) CHAOS_SCENARIO="$(SCENARIO)" CHAOS_MODEL=$(MODEL) \
		$(BIN)/python -m pytest tests/chaos -s $(ARGS)

clean: ## remove caches and build output; the environment stays
	rm -rf build dist .pyroot/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find cluster worker kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml deploy/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "decodefleet needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	@echo 'Installing into $(VENV): a few minutes the first time.'
	@# one that was made without ensurepip has a python, but no pip
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint deploy/constraints.txt --editable '.[test,dev]'
	@touch $@
