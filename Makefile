# Every target sets up what it needs in .venv, from an empty clone too; `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HARD_STOP_MINUTES ?= 40
TEST_PROCESSES ?= auto

PACKAGES := cluster worker scheduler configs helm tests
# Bytecode comes with the first import, and only for what is imported: a quarter less to do.
# Without it each of the many processes would compile torch and Ray again.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt
HARD_STOP = $(if $(shell command -v timeout),timeout --kill-after=30 $(HARD_STOP_MINUTES)m)
PYTEST = $(HARD_STOP) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve setup setup-test setup-serve lint check unit test test-full clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

serve: setup-serve ## serve a small chat model on this machine; ARGS="…" goes to `palimpsest serve`
	@$(BIN)/palimpsest serve $(ARGS)

check: setup ## lint, types, import contracts, unit and architecture tests: no ray, no torch
	@$(MAKE) --no-print-directory --jobs=2 lint unit

unit: setup
	$(PYTEST) tests/unit tests/architecture -m "not full and not gpu"

test: setup-test lint ## what a change has to pass: `check`, and every test not marked `full`
	$(PYTEST) tests -m "not full"

test-full: HARD_STOP_MINUTES := 70
test-full: setup-test lint ## every test, the long ones too
	$(PYTEST) tests

lint: setup
	$(BIN)/ruff check --quiet $(PACKAGES)
	$(BIN)/ruff format --quiet --check $(PACKAGES)
	$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }

setup-serve: $(VENV)/.stamp-serve ## install all that serving a model takes into .venv

setup: $(VENV)/.stamp-dev ## install palimpsest and the development tools into .venv

setup-test: $(VENV)/.stamp-test ## both together, which is what all of the tests need

# A stamp is the last thing a set-up writes, so an interrupted one is done again.
define MAKE_VENV
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Palimpsest needs Python 3.11 or newer, and \`$(PYTHON)\` is not: make PYTHON=/path/to/python3.11 …" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
endef

$(VENV)/.stamp-dev: pyproject.toml constraints.txt
	$(MAKE_VENV)
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.stamp-serve: pyproject.toml constraints.txt
	$(MAKE_VENV)
	$(INSTALL) --editable '.[serve,worker]'
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-dev
	$(INSTALL) --editable '.[dev,serve,worker]'
	@touch $@

clean: ## remove .venv and everything that tools and tests have left
	rm -rf $(VENV) *.egg-info build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find $(PACKAGES) -name __pycache__ -type d -prune -exec rm -rf {} +
