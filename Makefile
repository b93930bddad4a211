# Everything runs in .venv, which is made on first use and again when pyproject.toml changes.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
OUT    ?= runs/first
JOBS   ?= 2
VENV   ?= .venv

BIN   := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: help setup train test test-torch test-gpu check format bench clean

help:
	@echo "make train     train a small language model on two ranks of this machine, into $(OUT)"
	@echo "make test      run the tests, $(JOBS) at a time (JOBS=1: one after the other)"
	@echo "make test-torch TORCH=torch==2.11.0   run the tests on another torch, in an environment of its own"
	@echo "make test-gpu  on a machine with GPUs: what needs one, and a report to attach to an issue"
	@echo "make check     ruff and mypy"
	@echo "make format    let ruff repair what it can"
	@echo "make bench     run the benchmarks"
	@echo "make clean     remove .venv, caches and $(OUT)"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "thinwire needs Python 3.11 or newer: apt-get install python3, or make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "python3 cannot make a virtual environment: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]" "$(TORCH)"
	@touch $@

train: $(STAMP)
	$(BIN)/thinwire train --out $(OUT) --overwrite

test: export OMP_NUM_THREADS ?= 1
test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-torch:
	$(MAKE) test VENV=".venv-$(subst =,,$(TORCH))"

test-gpu: $(STAMP)
	$(BIN)/python tests/gpu_report.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: export OMP_NUM_THREADS ?= 1
bench: $(STAMP)
	@set -e; for file in benchmarks/*.py; do echo "$$file"; $(BIN)/python "$$file"; done

clean:
	rm -rf .venv .venv-torch* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info $(OUT)
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
