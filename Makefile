# make setup | demo | test | test-full | test-nightly | test-oldest | test-newest | check | docs | format | bench | clean
#
# test          a few cases of everything: minutes
# test-full     what test leaves out of all pairs of rows, meshes, ...; faults, processes, oracles, documentation, the
#               small matrix: five times as long
# test-nightly  every test there is, full products and the full matrix among them: hours
# test-oldest   what test runs, in .venv-oldest, with the oldest torch that pyproject.toml allows
# test-newest   what test runs, in .venv-newest, with the newest torch that there is. Each of the two environments
#               takes 6 GB where torch comes with CUDA; all other packages are those of requirements.lock
# bench         all of plait against its peers on this machine: two hours, ARGS=--quick half an hour; the results go
#               to benchmarks/results and docs/benchmarks.md
# docs          README, guide and the reference of the calls as one site, in build/docs; a warning is an error
#
# PYTHON=...       the interpreter that .venv is made from (3.11 or newer; the first one found)
# TORCH_INDEX=URL  a package index to look for torch in as well. On Linux, PyPI's torch brings several GB of
#                  CUDA packages; TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the CPU build.
# WORKERS=...      how many processes run tests (one for each core, at most 8)
# ARGS=...         further arguments for demo, bench and the tests: ARGS=tests/comm runs one folder's of the layer

.DEFAULT_GOAL := setup
.PHONY: setup demo test test-full test-nightly test-oldest test-newest newest check docs format bench clean
SHELL := /bin/bash
# Images often forbid it; each of the tests' processes would then compile torch's sources again.
unexport PYTHONDONTWRITEBYTECODE

CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3)
TORCH_INDEX ?=
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$(($(CORES) < 8 ? $(CORES) : 8)))
READY := .venv/.ready
BIN := .venv/bin
CODE := $(wildcard src tests lessons benchmarks docs/*.py)
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
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@# A folder called plait beside a script would hide the package without this path.
	@$(BIN)/python -c 'import os, sysconfig as s; print(os.path.abspath("src"), file=open(s.get_path("purelib") + "/plait-source.pth", "w"))'
	@cd .. && "$(CURDIR)/$(BIN)/python" -c 'import plait, torch; plait.Engine; print(f"plait: ready, torch {torch.__version__}")'
	@touch $@

demo: setup
	@$(BIN)/plait train --mesh shard=4 --strategy zero3 --verify --out runs/demo --overwrite $(ARGS)

# Tests of a file share what they have computed, so a file stays with one worker; long files come first.
PYTEST = -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup
	$(BIN)/python $(PYTEST) -m fast $(ARGS)

test-full: setup
	$(BIN)/python $(PYTEST) -m full $(ARGS)

test-nightly: setup
	$(BIN)/python $(PYTEST) $(ARGS)

# The lock's torch is left out, and its setuptools, which some releases of torch are too old for.
.venv-%/.ready: requirements.lock pyproject.toml | setup
	@[ -x .venv-$*/bin/python ] || $(BIN)/python -m venv .venv-$*
	@grep -vE '^(torch|setuptools)==' requirements.lock > .venv-$*/others.txt
	@echo "plait: installing $(TORCH) and the other packages of requirements.lock into .venv-$*"
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)' 'setuptools>=77.0.3' -r .venv-$*/others.txt
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

BOUNDS := $(shell sed -n 's/^ *"\(torch>=.*\)",.*/\1/p' pyproject.toml)
.venv-oldest/.ready: TORCH = $(firstword $(subst $(comma), ,$(subst >=,==,$(BOUNDS)))).*
.venv-newest/.ready: TORCH = $(BOUNDS)
.venv-newest/.ready: newest   # asks each time: newer ones appear
newest:
comma := ,

test-oldest test-newest: test-%: .venv-%/.ready
	@.venv-$*/bin/python -c 'import torch; print(f"plait: torch {torch.__version__}")'
	.venv-$*/bin/python $(PYTEST) -m fast $(ARGS)

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
	rm -rf .venv .venv-oldest .venv-newest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
