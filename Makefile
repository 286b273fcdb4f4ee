# Every target creates .venv, and updates .venv when its requirements change. Another interpreter: make train PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --require-hashes -r
TORCH := $(shell grep -o 'torch==[0-9.]*' pyproject.toml | head -1)
TORCH_NEEDS := filelock fsspec jinja2 networkx setuptools sympy typing-extensions

# Files in the order of tests/conftest.py, each by one of two processes.
PYTEST := $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 10
ALL := "not learn and not faults and not cluster"
SLOW := "slow and not learn and not faults and not cluster"

# Where it is set, every process of a test would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test test-all coverage learn test-faults test-ray soak lint results results-quick bench bench-ppo bench-ray history sampling control gpu tensorboard lock clean

help:            ## list the targets
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

train: $(VENV)/.installed       ## train what utils/options.py says; ARGS="--config dqn-cartpole" overrides it
	$(RUN) main.py $(ARGS)

test: $(VENV)/.installed-test   ## run the tests that a change needs, two files at a time; ARGS="tests/utils -x" goes to pytest
	@echo "This takes three to six minutes on two cores."
	$(PYTEST) $(ARGS)

test-all: test                  ## run `make test`, then the tests that are marked slow
	@echo "The slow tests take eight to fifteen minutes on two cores."
	$(PYTEST) -m $(SLOW) $(ARGS) || test $$? -eq 5  # 5: ARGS selects no slow test

coverage: $(VENV)/.installed-test ## run the tests of test-all and report the lines that they do not reach
	$(PYTEST) -m $(ALL) --cov --cov-report term $(ARGS)

test-ray: $(VENV)/.installed-test ## test the Ray engine on clusters of several nodes, some of which are killed: an hour
	$(RUN) -m pytest tests/reliability -m cluster $(ARGS)

test-faults: $(VENV)/.installed-test ## test the faults of docs/reliability.md that take minutes
	$(RUN) -m pytest tests/reliability -m faults $(ARGS)

soak: $(VENV)/.installed-test   ## kill processes of two runs for half an hour each; results in docs/results
	$(RUN) -m benchmarks.soak --victim others $(ARGS)
	$(RUN) -m benchmarks.soak --victim learner $(ARGS)

learn: $(VENV)/.installed-test  ## run the tests that train or compile for minutes
	$(RUN) -m pytest -m learn $(ARGS)

lint: $(VENV)/.installed-dev    ## check style, types, spelling and docstrings
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m codespell_lib
	$(RUN) -m pytest -q tests/test_prose.py

results-quick: $(VENV)/.installed-plots ## repeat the smallest results, three seeds each, with table and curves: six minutes with ARGS="--jobs 2"
	$(RUN) -m utils.sweep --name results-quick --configs dqn-cartpole impala-cartpole impala-lstm-recall --seeds 1 2 3 $(ARGS)
	$(RUN) -m utils.plot logs/results-quick_*-cartpole-* --x steps time --output logs/results-quick/cartpole
	$(RUN) -m utils.plot logs/results-quick_*-recall-* --x steps time --output logs/results-quick/recall

results: $(VENV)/.installed-plots ## repeat all learning results of docs/results, in days; ARGS="--list" shows the parts and their hours
	$(PIP) --editable '.[minatar,dm-control]'  # whose mujoco runs the MuJoCo configs too
	$(RUN) -m benchmarks.results $(ARGS)

bench: $(VENV)/.installed-bench ## compare speed with stable-baselines3 and with this machine's ceiling: half an hour
	$(RUN) -m benchmarks.speed $(ARGS)
	$(RUN) -m benchmarks.onpolicy $(ONPOLICY)

bench-ppo: $(VENV)/.installed-bench ## compare PPO's speed with stable-baselines3 and, from folders in ARGS, CleanRL and Sample Factory
	$(PIP) --editable '.[mujoco]'
	$(RUN) -m benchmarks.ppo_speed $(ARGS)

bench-ray: $(VENV)/.installed-test ## compare the Ray engine with the local one and measure traffic between nodes: docs/scaling.md
	$(RUN) -m benchmarks.ray_engine $(ARGS)
	$(RUN) -m benchmarks.scaling > docs/scaling.md

history: $(VENV)/.installed     ## measure the memory of a million Atari steps, compressed and raw; ARGS="--steps 20000" is a quick try
	$(RUN) -m benchmarks.history $(ARGS)

sampling: $(VENV)/.installed-bench ## compare the memories' batches per second with those of stable-baselines3 and torchrl
	$(RUN) -m benchmarks.sampling $(ARGS)

gpu: $(VENV)/.installed         ## measure the rows *-pong-gpu and their slowest part on a GPU machine; ARGS="--toy" runs anywhere
	$(RUN) -m benchmarks.gpu $(ARGS)

control: $(VENV)/.installed-bench ## compare continuous control with stable-baselines3; ARGS="--seconds 20 --pairs 1" is a quick try
	$(PIP) --editable '.[mujoco]'
	$(RUN) -m benchmarks.control_speed $(ARGS)

tensorboard: $(VENV)/.installed ## show the curves of every run, on this machine only: http://127.0.0.1:6006
	$(RUN) -m tensorboard.main --logdir logs --host 127.0.0.1 --port 6006 $(ARGS)

lock: SHELL := /bin/bash
lock: $(VENV)/.torch            ## renew the lock files, after a change of versions in pyproject.toml or to update their dependencies
	$(PIP) --editable '.[lock]'
	for lock in requirements "requirements-test --extra test" "requirements-dev --extra dev"; do \
		set -- $$lock; \
		$(RUN) -m uv pip compile pyproject.toml "$${@:2}" <(printf '%s\n' $(TORCH_NEEDS)) --excludes <(echo torch) --output-file $$1.lock \
			--upgrade --universal --python-version 3.11 --generate-hashes --no-annotate --no-strip-extras --custom-compile-command "make lock" --quiet || exit 1; \
	done

clean:           ## remove .venv and caches, but no models and logs
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .coverage build *.egg-info

# A stamp file is newer than the file it was installed from. torch is installed first and by version: its file differs between machines (CPU,
# CUDA), so the lock files, which hold the hashes of everything else, leave torch out.
$(VENV)/.torch: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version) if sys.version_info < (3, 11) else 0'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch requirements.lock
	$(LOCKED) requirements.lock
	@touch $@

$(VENV)/.installed-test: $(VENV)/.torch requirements-test.lock
	$(LOCKED) requirements-test.lock
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(VENV)/.torch requirements-dev.lock
	$(LOCKED) requirements-dev.lock
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

$(VENV)/.installed-plots: $(VENV)/.installed
	$(PIP) --editable '.[plots]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.torch
	$(PIP) --editable '.[bench]'
	@touch $@ $(VENV)/.installed
