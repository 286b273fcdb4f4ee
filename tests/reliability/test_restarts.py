"""Restarts count within a time window: occasional faults are tolerated, many in a row are not (F66)."""

import json
import os
import shlex
import signal

import pytest

from tests.reliability.program import Program

CONFIG = shlex.split(
    "--config dqn-cartpole --env_type gym --game tests.reliability.faults:Faulty-v0 "
    "--num_envs_per_actor 2 --logger.period 0.3 --timestamp one --steps 100000000 "
    "--supervisor.max_restarts 1"
)
EACH_LIFE = {"FAULTS": json.dumps([{"kind": "raise", "where": "actor", "at": 500}])}


@pytest.mark.faults
def test_f66_restarts_before_the_window_do_not_count(tmp_path):
    with Program(tmp_path / "short", *CONFIG, "--supervisor.restart_window", "0.5", environment=EACH_LIFE) as program:
        program.until(lambda: program.output.count("actor 0 restarted (1 of 1)") >= 3, 60, "three restarts")
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(30) == 130
    with Program(tmp_path / "long", *CONFIG, environment=EACH_LIFE) as program:
        assert program.until_ended(60) == 4
        assert "actor 0 was restarted 1 times within 3600 s (supervisor.restart_window)" in program.output
