# One door. CI runs these same recipes through .ci/run, so a green `make ci` here means a green CI.
#
# Another environment:   make VENV=path/to/venv check
# One test file:         make test-fast FAST=tests/unit/test_layers.py

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
TORCHFT_VERSION ?= 2026.10.26

BIN := $(VENV)/bin
PY := $(BIN)/python
SWAP := src/keepstep/training/swap
LOGS := build/ci

# Everything ends: each command has a bound in seconds, and is killed 30 s after it.
BOUND := timeout --kill-after=30
BOUND_TTY := timeout --foreground --kill-after=30

FAST ?= $(wildcard tests/unit tests/transcripts tests/contracts tests/simulation)
PROCESS ?= tests/process
CODE := $(wildcard src tests bench examples)

# One thread per rank: ranks share the machine's cores, and reductions stay comparable.
export OMP_NUM_THREADS ?= 1

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- setup ---------------------------------------------------------------------------------------

.PHONY: setup
setup: $(VENV)/.keepstep-dev swap ## make the environment: venv, torch, Keepstep with its dev extra, the swap backend

$(VENV)/bin/python:
	$(BOUND) 120 $(PYTHON) -m venv $(VENV)

# torch first and alone, at one version: any other package that wants torch then finds it there.
# Compiled when it is first imported: most of it never is, and that takes half a minute.
$(VENV)/.torch-$(TORCH_VERSION): | $(VENV)/bin/python
	$(BOUND) 1800 $(PY) -m pip install --quiet --no-compile torch==$(TORCH_VERSION)
	touch $@

$(VENV)/.keepstep-dev: pyproject.toml $(VENV)/.torch-$(TORCH_VERSION)
	$(BOUND) 900 $(PY) -m pip install --quiet -e '.[dev]'
	touch $@

# Built in a step of its own against the installed torch, never at job start. Skipped when the
# backend for this torch is there and newer than its sources.
.PHONY: swap
swap: $(VENV)/.keepstep-dev ## build the C++ swap backend, if it is not built for this torch
	@version=$$($(PY) -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])'); \
	built=$$(find $(SWAP) -name "_swap_torch$${version}_*.so" -print -quit 2>/dev/null || true); \
	if [ ! -f $(SWAP)/build.py ]; then \
		echo 'swap: no sources here, the Python fallback serves'; \
	elif [ -n "$$built" ] && [ ! $(SWAP)/swap.cpp -nt "$$built" ]; then \
		echo "swap: already built for torch $$version"; \
	else \
		PATH="$(abspath $(BIN)):$$PATH" $(BOUND) 900 $(PY) -m keepstep.training.swap.build; \
	fi

# --- checks --------------------------------------------------------------------------------------

.PHONY: check
check: lint types ## format, lint and types

.PHONY: lint
lint: ## ruff: format and rules
	$(BOUND) 120 $(PY) -m ruff format --check $(CODE)
	$(BOUND) 120 $(PY) -m ruff check $(CODE)

.PHONY: types
types: ## mypy, strict, on src and bench
	$(BOUND) 600 $(PY) -m mypy

.PHONY: format
format: ## rewrite the code in the house format
	$(BOUND) 120 $(PY) -m ruff format $(CODE)
	$(BOUND) 120 $(PY) -m ruff check --fix $(CODE)

# --- tests ---------------------------------------------------------------------------------------

.PHONY: test
test: test-fast test-process ## the fast lane, then the process tests

.PHONY: test-fast
test-fast: ## unit, transcripts, contracts, simulation; prints how long it took
	@mkdir -p $(LOGS)
	@start=$$SECONDS; \
	$(BOUND) 600 $(PY) -m pytest -n 2 --dist loadfile --durations=5 $(FAST) 2>&1 | tee $(LOGS)/fast.log; \
	echo "fast lane: $$((SECONDS - start)) s"

# One after another: these tests measure time and kill processes, and neither bears company.
.PHONY: test-process
test-process: ## real processes, sockets and, as root, network namespaces
	@mkdir -p $(LOGS)
	@if [ -z "$(wildcard $(PROCESS)/test_*.py $(filter %.py,$(PROCESS)))" ]; then \
		echo 'process tests: none'; exit 0; fi; \
	start=$$SECONDS; \
	$(BOUND) 3600 $(PY) -m pytest --durations=15 $(PROCESS) 2>&1 | tee $(LOGS)/process.log; \
	echo "process tests: $$((SECONDS - start)) s"

.PHONY: sim
sim: ## the seeded simulator alone
	$(BOUND) 600 $(PY) -m pytest --durations=5 tests/simulation

# 14 faults and 10 moves from fixed seeds, to compare with yesterday, a few against each way to
# shard, and 10 against leaders and their database; 5 faults from a fresh one, to find what is new.
# In one of them each node imports torch by itself, as nodes do (docs/decisions/0045).
.PHONY: chaos-ci
chaos-ci: ## a real job under 14 fixed faults, 10 moves and 5 fresh faults, compared bit for bit
	$(BOUND) 1800 $(BIN)/keepstep lab chaos --world 4 --nodes 4 --spares 2 --faults 14 --seed 1
	$(BOUND) 900 $(BIN)/keepstep lab chaos --world 4 --nodes 4 --spares 2 --mix planned --faults 10 --seed 2
	KEEPSTEP_PRELOAD_FROM= $(BOUND) 600 $(BIN)/keepstep lab chaos --world 4 --nodes 4 --spares 2 --parallel hsdp --faults 4 --seed 3
	$(BOUND) 600 $(BIN)/keepstep lab chaos --world 4 --nodes 4 --spares 2 --parallel tp --faults 3 --seed 4
	$(BOUND) 600 $(BIN)/keepstep lab chaos --world 4 --nodes 4 --spares 2 --parallel fsdp --faults 4 --seed 5
	$(BOUND) 600 $(BIN)/keepstep lab chaos --world 4 --nodes 4 --spares 2 --parallel zero1 --faults 4 --seed 6 --kinds sigkill,rank0,second_in_sync,two_ranks
	$(BOUND) 600 $(BIN)/keepstep lab failover --faults 10 --seed 7
	@seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); \
	echo "chaos-ci: fresh seed $$seed"; \
	$(BOUND) 900 $(BIN)/keepstep lab chaos --world 4 --nodes 4 --spares 2 --faults 5 --seed "$$seed"

# --- the rest ------------------------------------------------------------------------------------

.PHONY: bench
bench: ## every benchmark; raw results go to bench/results
	$(BOUND) 1800 $(PY) -m bench.brain
	$(BOUND) 7200 $(PY) -m bench.pause
	$(BOUND) 14400 $(PY) -m bench.overhead

.PHONY: bench-systems
bench-systems: torchft-venv ## Keepstep, TorchFT and checkpoint-restart side by side; a few hours
	$(BOUND) 43200 $(PY) -m bench matrix

# TorchFT in an environment of its own, for `python -m bench`: what it brings with it must not meet
# ours. torch first and at our version, which its own requirement (2.7 or newer) then accepts.
.PHONY: torchft-venv
torchft-venv: build/torchft-venv/.torchft-$(TORCHFT_VERSION) ## TorchFT for the comparison, in build/torchft-venv

build/torchft-venv/.torchft-$(TORCHFT_VERSION):
	mkdir -p build
	$(BOUND) 120 $(PYTHON) -m venv build/torchft-venv
	$(BOUND) 1800 build/torchft-venv/bin/python -m pip install --quiet torch==$(TORCH_VERSION) numpy
	echo 'torch==$(TORCH_VERSION)' > build/torchft-venv/held.txt
	$(BOUND) 900 build/torchft-venv/bin/python -m pip install --quiet \
		-c build/torchft-venv/held.txt torchft-nightly==$(TORCHFT_VERSION)
	touch $@

.PHONY: docs
docs: ## check the documents: links resolve, decisions have all their parts
	$(BOUND) 120 $(PY) -m pytest -q tests/unit/test_style.py -k 'document or decision or link'

.PHONY: openapi
openapi: ## write docs/openapi.json from the orchestrator's routes
	$(BOUND) 60 $(PY) -m keepstep.orchestrator.openapi > docs/openapi.json.new
	mv docs/openapi.json.new docs/openapi.json

.PHONY: demo
demo: ## a rank is killed before your eyes; about a minute, no GPU
	$(BOUND_TTY) 600 $(BIN)/keepstep demo

.PHONY: ci
ci: ## all that CI does
	.ci/run

.PHONY: clean
clean: ## remove caches and build output; keeps the environment
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
