# chanlab: `make demo` shows the whole story in minutes, `make test` checks it, `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
# Another index for PyTorch wheels (a CUDA build, or the CPU build alone; pytorch.org lists them); empty: pip's own.
TORCH_INDEX_URL ?=
PYTEST_ARGS ?= -n 2 --dist loadfile
DEMO_ARGS ?=
BACKBONE ?= smollm2-135m

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILD_FILES := pyproject.toml setup.py constraints.txt

.PHONY: help demo test lint format install dev llvm compiler backbone cards wheel notebook clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(VENV)/.installed llvm ## trace a street, fine-tune the shipped predictor on it, judge it on a link: out/demo/
	$(BIN)/chanlab demo $(DEMO_ARGS)

test: $(VENV)/.installed-dev llvm compiler backbone ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## style, types and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev ## apply the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed ## what the demo needs, in .venv
dev: $(VENV)/.installed-dev ## what the tests need, in .venv

llvm: $(VENV)/.installed ## a libLLVM for ray tracing on the CPU, unless one is here
	@sh .ci/libllvm $(BIN)/python

compiler: ## a C++ compiler for the kernels of chanlab.rf, unless one is here
	@sh .ci/compiler

backbone: $(VENV)/.installed ## the pre-trained language model, once
	$(BIN)/chanlab backbone fetch $(BACKBONE)

cards: $(VENV)/.installed ## the tables and plots of the cards, from their results.json
	$(BIN)/python -m chanlab.cli.cards

wheel: $(VENV)/.installed-dev ## dist/*.whl
	$(BIN)/python -m build --wheel

clean: ## build products and caches; not .venv, not out/
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "chanlab needs Python 3.11+: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV) || { echo "On Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/.torch: $(BIN)/python constraints.txt
	$(if $(TORCH_INDEX_URL),$(PIP) install -c constraints.txt --index-url $(TORCH_INDEX_URL) torch)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(BUILD_FILES)
	$(PIP) install -c constraints.txt -e '.[llm]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed $(BUILD_FILES)
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
