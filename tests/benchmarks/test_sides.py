"""The processes of a benchmark end with it."""

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.training import ROOT

# Stands in for benchmarks/control_study.py in the child.
WAITS = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid()) + '.'); time.sleep(60)"
PROGRAM = """
import pathlib, sys
from benchmarks import control_study, sides
control_study.ROOT = sides.ROOT = pathlib.Path(sys.argv[1])
control_study.other("stable-baselines3-ddpg", "pendulum", 1, 100, 1)
"""


def alive(number):
    return psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_killed_study_ends_its_child(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "control_study.py").write_text(WAITS)
    study = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT)
    try:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("."):
            assert study.poll() is None
            time.sleep(0.05)
    finally:
        study.kill()
        study.wait()
    number, deadline = int((tmp_path / "pid").read_text().rstrip(".")), time.monotonic() + 20
    while alive(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    if alive(number):
        psutil.Process(number).kill()
        pytest.fail("the child outlives the study")
