"""A benchmark's run leaves nothing, also if the benchmark is killed."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.training import ROOT, rate, train

CARTPOLE = "--config dqn-cartpole --engine inline"


def leftovers():
    return [path for folder in ("logs", "models") for path in (ROOT / folder).glob("bench_*")]


@pytest.mark.slow
@pytest.mark.timeout(300)  # a run starts within a minute on a busy machine
def test_a_run_is_measured_and_its_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = leftovers()
    lines = train(60, CARTPOLE, "--steps 3000 --logger.steps 100")
    assert rate([line for line in lines if line["step"] > 1_500]) > 0
    assert not list(tmp_path.iterdir()) and leftovers() == before


@pytest.mark.slow
@pytest.mark.timeout(300)  # a run starts within a minute on a busy machine
def test_a_killed_benchmark_ends_its_run(tmp_path):
    before = leftovers()
    program = f"from benchmarks.training import train; train(600, '{CARTPOLE}')"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment)
    while not list(tmp_path.glob("*/logs/bench_run/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.1)
    processes = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert processes and not alive and leftovers() == before
