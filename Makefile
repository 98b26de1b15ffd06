# Everything runs in a virtual environment of this folder; `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
STAMP := $(VENV)/.installed

# Two test workers with a thread pool each would fight over two cores; and a fork after a
# multi-threaded operator deadlocks.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-gpu lint format bench docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create the virtual environment and install everything into it

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is not Python 3.10 or later: choose one with PYTHON=..."; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "no virtual environment: Debian has 'venv' in the package python3-venv"; exit 1; }

# torch comes first: with it installed, nothing after it asks for another one. fairscale and
# deepspeed read torch while they build, so they build in this environment, which has it.
$(STAMP): pyproject.toml setup.py constraints.txt | $(BIN)/pip
	$(PIP) install -q -c constraints.txt torch==2.13.0
	$(PIP) install -q -c constraints.txt -e '.[dev,hf,viz]'
	$(PIP) install -q -c constraints.txt 'setuptools>=77.0.3' wheel
	@$(call optional,fairscale==0.4.13)
	@$(call optional,deepspeed==0.19.8)
	@touch $@

define optional
{ echo "optional backend: $(1)"; \
  $(PIP) install -q -c constraints.txt --no-build-isolation '$(1)' >$(VENV)/optional.log 2>&1 \
  || echo "$(1) could not be installed; what needs it is skipped. Reason: $$(grep -m1 -i error $(VENV)/optional.log)"; }
endef

demo: $(STAMP)  ## train a small Llama on two processes with a strategy, and save the strategy
	$(BIN)/torchrun --standalone --nproc-per-node=2 examples/auto_accelerate/demo.py

test: $(STAMP)  ## run all the tests
	$(BIN)/python -m pytest tests --durations=15 $(PYTEST_ARGS)

test-gpu: $(STAMP)  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest tests -m gpu -rs $(PYTEST_ARGS)

lint: $(STAMP)  ## style, types, and who may import whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the files in the common style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)  ## measure speed and memory, into benchmarks/results/
	$(BIN)/python -m benchmarks

docs: $(STAMP)  ## build the documentation into docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

clean:  ## remove what builds, tests and tools left behind; the virtual environment stays
	rm -rf build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
