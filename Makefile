# Everything lives in .venv; `make demo` and `make test` set it up on first use and reinstall only if its inputs change.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test lint bench stress dist docs clean

demo: $(VENV)/.demo
	$(BIN)/tmx demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not stress" -n $(JOBS) --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/merge.py --methods --files
	$(BIN)/python benchmarks/memory.py

stress: $(VENV)/.dev
	$(BIN)/python -m pytest -m stress

dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

docs: $(VENV)/.docs
	$(BIN)/python docs/commands.py
	$(BIN)/zensical build --clean --strict

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tunable-magmax needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	$(PIP) --editable ".[report,train]"
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --editable ".[dev]"
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) --editable ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) demo-out build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
