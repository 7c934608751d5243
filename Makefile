# What a newcomer, a developer and CI run. Everything works on a fresh machine with Python 3.11 and make.
#
#     make demo     sets up .venv, then trains a GPT with four workers and kills three of them
#     make test     the whole test suite (`make lint` beside it: style, types, import rules)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.set-up

# torch is named exactly and on its own: a range would take the newest build, several GB with CUDA in it.
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# pip says so, once for each package, of every local index in its configuration that lacks it.
NO_NOISE := 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2)

# A test that hangs shows every thread's stack and ends the run.
PYTEST := $(BIN)/python -m pytest -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

CODE := src tests examples benchmarks
RESULTS := benchmarks/results

.PHONY: help setup demo test lint soak bench reproduction device-check docs-check

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(SETUP)  ## make .venv with what constraints.txt pins

$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "perdure needs Python 3.11; set PYTHON=…")'
	@echo "setting up $(VENV): a minute or two, once"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt setuptools $(TORCH) $(NO_NOISE)
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]' $(NO_NOISE)
	@touch $@

demo: $(SETUP)  ## train the example GPT, kill three of four workers, compare with the undisturbed run
	@$(BIN)/perdure demo

test: $(SETUP)  ## every test except the slow ones
	$(PYTEST) -m 'not slow'

lint: $(SETUP)  ## style, types, import rules
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

soak: $(SETUP)  ## the slow tests: hundreds of kills, a long search of the protocol
	$(PYTEST) -m slow
	$(BIN)/python -m perdure.sim.protocol --seeds 0:20000

bench: $(SETUP)  ## measure; results go to benchmarks/results
	$(BIN)/python benchmarks/run.py --out $(RESULTS)
	$(BIN)/python benchmarks/mesh.py --json $(RESULTS)/mesh.json
	$(BIN)/python benchmarks/allocation.py --json $(RESULTS)/allocation.json

reproduction: $(SETUP)  ## write docs/reproduction.md anew: published figures and ours
	$(BIN)/python benchmarks/reproduction.py

device-check: $(SETUP)  ## on a machine with CUDA: two workers share the device, one is killed; overhead
	$(BIN)/python benchmarks/device_check.py

docs-check: $(SETUP)  ## links, commands and names in the documentation are true
	$(PYTEST) -q tests/unit/test_docs.py
