# Every target sets up .venv by itself and again when its requirements change. Another interpreter: make train PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' requirements.txt)

.DEFAULT_GOAL := help
.PHONY: help train test learn test-faults test-ray soak lint results-quick bench bench-ray history sampling control gpu tensorboard clean

help:            ## this list
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

train: $(VENV)/.installed       ## train what the lines of utils/options.py say; ARGS="--config dqn-cartpole" overrides them
	$(RUN) main.py $(ARGS)

test: $(VENV)/.installed-dev    ## all tests, two files at a time; ARGS="tests/utils -x" goes to pytest
	$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

test-ray: $(VENV)/.installed-dev ## the Ray engine on clusters of several nodes, losing some of them: ten minutes
	$(RUN) -m pytest tests/reliability/test_ray.py -m cluster $(ARGS)

test-faults: $(VENV)/.installed-dev ## the rows of docs/reliability.md that take minutes
	$(RUN) -m pytest tests/reliability -m faults $(ARGS)

soak: $(VENV)/.installed-dev    ## two runs of half an hour in which processes are killed; results in docs/results
	$(RUN) -m benchmarks.soak --victim others $(ARGS)
	$(RUN) -m benchmarks.soak --victim learner $(ARGS)

learn: $(VENV)/.installed-dev   ## tests that train for minutes
	$(RUN) -m pytest -m learn $(ARGS)

lint: $(VENV)/.installed-dev    ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m mypy

results-quick: $(VENV)/.installed-plots ## the smallest results again, three seeds each, with table and curves: six minutes with ARGS="--jobs 2"
	$(RUN) -m utils.sweep --name results-quick --configs dqn-cartpole impala-cartpole impala-lstm-recall --seeds 1 2 3 $(ARGS)
	$(RUN) -m utils.plot logs/results-quick_*-cartpole-* --x steps time --output logs/results-quick/cartpole
	$(RUN) -m utils.plot logs/results-quick_*-recall-* --x steps time --output logs/results-quick/recall

bench: $(VENV)/.installed-bench ## speed against stable-baselines3 and against this machine's ceiling, side by side: half an hour
	$(RUN) -m benchmarks.speed $(ARGS)
	$(RUN) -m benchmarks.onpolicy $(ONPOLICY)

bench-ray: $(VENV)/.installed-dev ## the Ray engine against the local one, and the way from node to node: docs/scaling.md
	$(RUN) -m benchmarks.ray_engine $(ARGS)
	$(RUN) -m benchmarks.scaling > docs/scaling.md

history: $(VENV)/.installed     ## memory that a million steps of Atari take, packed and raw; ARGS="--steps 20000" is a quick try
	$(RUN) -m benchmarks.history $(ARGS)

sampling: $(VENV)/.installed-bench ## batches a second of the memories, against those of stable-baselines3 and torchrl
	$(RUN) -m benchmarks.sampling $(ARGS)

gpu: $(VENV)/.installed         ## what a GPU machine makes of the rows *-pong-gpu and where it is held up; ARGS="--toy" tries it anywhere
	$(RUN) -m benchmarks.gpu $(ARGS)

control: $(VENV)/.installed-bench ## speed of continuous control against stable-baselines3; ARGS="--seconds 20 --pairs 1" is a quick try
	$(PIP) -r requirements-mujoco.txt
	$(RUN) -m benchmarks.control_speed $(ARGS)

tensorboard: $(VENV)/.installed ## curves of every run, on this machine only: http://127.0.0.1:6006
	$(RUN) -m tensorboard.main --logdir logs --host 127.0.0.1 --port 6006 $(ARGS)

clean:           ## remove .venv and caches; models and logs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info

# A stamp is newer than the requirements it was made from. torch goes first, by itself and exactly.
$(VENV)/.torch: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version) if sys.version_info < (3, 11) else 0'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch
	$(PIP) -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch requirements-dev.txt requirements-minatar.txt requirements-mujoco.txt requirements-ray.txt \
		requirements-video.txt requirements-plots.txt requirements-tune.txt requirements-onnx.txt
	$(PIP) -r requirements-dev.txt
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-plots: $(VENV)/.installed requirements-plots.txt
	$(PIP) -r requirements-plots.txt
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.torch requirements-bench.txt
	$(PIP) -r requirements-bench.txt
	@touch $@ $(VENV)/.installed
