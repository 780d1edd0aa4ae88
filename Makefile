# make setup | demo | test | test-full | test-nightly | check | docs | format | bench | clean
#
# test          a few cases of everything: minutes
# test-full     what test leaves out of all pairs of rows, meshes, ...; faults, processes, oracles, documentation, the
#               small matrix: five times as long
# test-nightly  every test there is, full products and the full matrix among them: hours
# bench         all of plait against its peers on this machine: two hours, ARGS=--quick half an hour; the results go
#               to benchmarks/results and docs/benchmarks.md
# docs          README, guide and the reference of the calls as one site, in build/docs; a warning is an error
#
# PYTHON=...       the interpreter that .venv is made from (3.11 or newer; the first one found)
# TORCH_INDEX=URL  a package index to look for torch in as well. On Linux, PyPI's torch brings several GB of
#                  CUDA packages; TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the CPU build.
# WORKERS=...      how many processes run tests (one for each core, at most 8)
# ARGS=...         further arguments for demo, bench and the tests: ARGS=tests/oracle runs one folder's of the layer

.DEFAULT_GOAL := setup
.PHONY: setup demo test test-full test-nightly check docs format bench clean
SHELL := /bin/bash

CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3)
TORCH_INDEX ?=
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$(($(CORES) < 8 ? $(CORES) : 8)))
READY := .venv/.ready
BIN := .venv/bin
CODE := $(wildcard src tests lessons benchmarks)
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

setup: $(READY)
	@:

$(READY): requirements.lock pyproject.toml
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  for python in $(CANDIDATES); do \
	    if "$$python" -c '$(SUITABLE)' >/dev/null 2>&1; then found="$$python"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "plait: no Python 3.11 or newer with the venv module among: $(CANDIDATES)" >&2; \
	    echo "plait: install one (Debian: apt install python3 python3-venv) or set PYTHON=/path/to/python" >&2; \
	    exit 1; \
	  fi; \
	  echo "plait: making .venv with $$("$$found" --version) ($$found)"; \
	  "$$found" -m venv --clear .venv || exit 1; \
	fi
	@echo "plait: installing the packages of requirements.lock into .venv (minutes, where torch must be fetched)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import plait, torch; print(f"plait: ready, torch {torch.__version__}")'
	@touch $@

demo: setup
	@$(BIN)/plait train --mesh shard=4 --strategy zero3 --verify --out runs/demo --overwrite $(ARGS)

# Tests of a file share what they have computed, so a file stays with one worker; long files come first.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) -m fast $(ARGS)

test-full: setup
	$(PYTEST) -m full $(ARGS)

test-nightly: setup
	$(PYTEST) $(ARGS)

check: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_house.py tests/test_maps.py tests/test_layers.py

docs: setup
	$(BIN)/sphinx-build --fail-on-warning --keep-going --fresh-env --quiet --builder html docs build/docs
	@echo "plait: build/docs/index.html"

format: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# Without matplotlib everything is measured, and the pictures stay as they are.
bench: setup
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[bench]' || true
	@$(BIN)/python benchmarks/main.py $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
