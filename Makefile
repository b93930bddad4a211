# Everything runs in .venv, which is made on first use and again when pyproject.toml changes.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
TORCH_INDEX ?=
OUT    ?= runs/first
JOBS   ?= 3
TESTS  ?=
VENV   ?= .venv
SITE   ?= build/docs

# The extras with the frameworks that have an adapter: where pip cannot get them, their tests skip.
FRAMEWORKS := hf,lightning

# To compile all that it installs is half of pip's time: Python compiles what is used.
PIP       = -m pip install --quiet --no-compile
PIP_TORCH = $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"

BIN   := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: help setup train test test-all test-torch test-frameworks test-wheel test-triton test-gpu check format bench docs clean

help:
	@echo "make train     train a small language model on two ranks of this machine,"
	@echo "               into $(OUT)"
	@echo "make test      run the tests, $(JOBS) at a time (JOBS=1: one after the other)"
	@echo "make test-all  each case everywhere, where make test deals cases out: before"
	@echo "               a release"
	@echo "make test-torch TORCH=torch==2.11.0   run the tests of what touches torch's"
	@echo "               inside on another torch, in an environment of its own"
	@echo "               (TESTS=tests: all of them)"
	@echo "make test-frameworks   all tests of Hugging Face and Lightning, of which make"
	@echo "               test has a part, and those of torchtitan, TRL, torchft, Ray,"
	@echo "               lm-evaluation-harness and Kubernetes' schemas, in an"
	@echo "               environment of its own"
	@echo "make test-wheel   install the wheel in an empty environment, and see what"
	@echo "               works with the core alone"
	@echo "make test-triton   what GPUs would run, without one: kernels interpreted, and"
	@echo "               compiled for four generations by two Tritons (2 GB)"
	@echo "make test-gpu  on a machine with GPUs: what needs one, and a report to attach"
	@echo "               to an issue"
	@echo "make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu   take torch's"
	@echo "               wheels for CPUs: the default brings gigabytes of CUDA"
	@echo "make check     ruff, mypy, and the limits of the design (tests/house.py)"
	@echo "make format    let ruff repair what it can"
	@echo "make bench     run the benchmarks"
	@echo "make docs      build the documentation site, into $(SITE)"
	@echo "make clean     remove .venv, caches and $(OUT)"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "thinwire needs Python 3.11 or newer: apt-get install python3," \
			"or make PYTHON=/path/to/python3.11" | fold -sw 79 >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "python3 cannot make a virtual environment: apt-get install python3-venv" >&2; exit 1; }
	@echo "setting up $(VENV), once: pip is silent while it loads torch, which takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_TORCH)
	$(BIN)/python $(PIP) --editable ".[dev]" "$(TORCH)"
	@$(BIN)/python $(PIP) --editable ".[$(FRAMEWORKS)]" "$(TORCH)" 2>$(VENV)/frameworks.log \
		|| echo "the tests of accelerate, transformers, peft and lightning will skip, since pip could not install them:" \
			"$$(grep -m 1 ^ERROR $(VENV)/frameworks.log) (make -B setup tries again)" | fold -sw 79 >&2
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import torch._dynamo, thinwire.train.cli'  # compiled once
	@touch $@

train: $(STAMP)
	$(BIN)/thinwire train --out $(OUT) --overwrite

# Every rank imports the module of its test: compiled once, it is kept.
test: $(STAMP)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

test-all:
	THINWIRE_TESTS=all $(MAKE) test

CORE := tests/project/test_packaging.py tests/engines/test_engines.py tests/engines/test_engines_linear.py \
	tests/engines/test_weights.py tests/core/test_edges_passes.py tests/saved/test_saved.py tests/plan/test_dry_run.py

test-torch:
	$(MAKE) test VENV=".venv-$(subst =,,$(TORCH))" TESTS="$(or $(TESTS),$(CORE))"

EMPTY := build/wheel/venv

test-wheel: $(STAMP)
	rm -rf build/wheel build/lib
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python $(PIP_TORCH)
	$(EMPTY)/bin/python -m pip install --quiet build/wheel/*.whl
	$(EMPTY)/bin/python tests/support/wheel.py

test-frameworks: export OMP_NUM_THREADS ?= 1
test-frameworks: VENV := .venv-frameworks
test-frameworks:
	$(MAKE) setup VENV=$(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev,gpu,$(FRAMEWORKS),eval,elastic]" "torchtitan<0.3" trl \
		"ray[train]" kubeflow-trainer-api "$(TORCH)"
	THINWIRE_TESTS=all $(VENV)/bin/python -m pytest tests/adapters $(addprefix tests/project/test_,examples.py clusters.py) \
		$(addprefix tests/train/test_,export.py finetune.py evaluation.py)

# Triton of the oldest torch that is supported, and of the newest; 3.6.0 interprets kernels with NumPy before 2.4 alone.
TRITONS := build/triton-3.6.0 build/triton-3.9.0

build/triton-%: | $(STAMP)
	rm -rf build/part-$*
	$(BIN)/python -m pip install --quiet --no-deps --target build/part-$* "triton==$*" "numpy<2.4"
	mv build/part-$* $@

test-triton: $(STAMP) $(TRITONS)
	PYTHONPATH=$(CURDIR)/$(lastword $(TRITONS)) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/ops

test-gpu: $(STAMP)
	$(BIN)/python tests/support/gpu_report.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	THINWIRE_TESTS=all $(BIN)/python -m pytest -q tests/project/test_programs.py  # mypy of what is beside the package
	$(BIN)/python tests/house.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: export OMP_NUM_THREADS ?= 1
bench: $(STAMP)
	@set -e; for file in benchmarks/*/*.py; do echo "$$file"; $(BIN)/python "$$file"; done

# The pages of the methods are made anew where something has changed of which they are made.
METHODS := docs/methods/index.md

docs: $(METHODS)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --doctree-dir build/doctrees docs $(SITE)
	$(BIN)/python docs/links.py $(SITE)
	@echo "open $(SITE)/index.html"

$(METHODS): $(VENV)/.docs README.md $(wildcard docs/*.* docs/data/*) $(shell find src/thinwire -name '*.py')
	$(BIN)/python docs/pages.py $(@D)
	@touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[docs]" "$(TORCH)"
	@touch $@

clean:
	rm -rf docs/methods .venv .venv-3* .venv-torch* .venv-frameworks .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf build dist src/*.egg-info $(OUT)
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
