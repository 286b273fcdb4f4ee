"""A script that trains by utils.api is interrupted (F51)."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.reliability.program import PROJECT

INTERRUPTED = """
from utils.api import train
try:
    settings = {"rate_limiter.min_replay_size": 100, "agent.batch_size": 16}
    train("dqn-cartpole", settings, steps=10**9, root="runs", engine="inline", timestamp="one")
except KeyboardInterrupt as stopped:
    print(stopped)
"""


@pytest.mark.slow
def test_f51_an_interrupted_script_saves_as_ctrl_c_does(tmp_path):
    (tmp_path / "script.py").write_text(INTERRUPTED)
    script = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        metrics, deadline = tmp_path / "runs" / "logs" / "local_one" / "metrics.jsonl", time.monotonic() + 90
        while not (metrics.exists() and '"global/agent_steps"' in metrics.read_text()):
            assert script.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        family = psutil.Process(script.pid).children(recursive=True)
        script.send_signal(signal.SIGINT)
        said = script.communicate(timeout=30)[0]
        assert script.returncode == 0 and 'train("dqn-cartpole", resume="local_one", root="' in said, said
        assert list((tmp_path / "runs" / "models" / "local_one_checkpoints").glob("step_*")) and family
        assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    finally:
        script.kill()
        script.wait()
