"""The soak computes speeds, recovery times and faults from its measurements."""

import argparse
import random

import numpy as np
import pytest

from benchmarks.soak import VICTIMS, Soak


@pytest.fixture
def soak():
    """Return ten minutes of measurements at 100 agent steps/s and 200 MB, with a kill after 300 s."""
    made = Soak.__new__(Soak)
    made.options, made.random = argparse.Namespace(every=30.0, victim="others"), random.Random(1)
    made.run, made.began, made.faults = (
        argparse.Namespace(signature="soak_1", progress=np.array([60_000.0, 6_000.0])),
        1_000.0,
        [],
    )
    made.points = [(1_000.0 + second, np.array([100.0, 10.0]) * second) for second in range(600)]
    made.rows = [
        {"seconds": second, "agent_steps": 1, "memory_mb": 200.0, "descriptors": 28, "event": ""}
        for second in range(600)
    ]
    made.kills = [{"victim": "actor 0", "time": 1_300.0}]
    return made


def slowed(soak, begin, end, what=slice(None)):
    """Stop agent steps, updates or both between these seconds."""
    for second in range(600):
        soak.points[second][1][what] -= np.array([100, 10])[what] * max(0, min(second, end) - begin)


def test_speed_is_steps_per_second(soak):
    assert soak.speeds(1_100.5, 1_200.5) == pytest.approx([100, 10])
    slowed(soak, 100, 150)
    assert soak.speeds(1_100, 1_200) == pytest.approx([50, 5])


def test_an_unaffected_run_recovers_at_once(soak):
    assert soak.report()["faults"] == [] and soak.kills[0]["recovered_seconds"] == 0
    assert (soak.kills[0]["steps_per_second_before"], soak.kills[0]["updates_per_second_before"]) == (100, 10)


@pytest.mark.parametrize("what", [slice(None), 0, 1])
def test_a_pause_after_a_kill_is_the_recovery_time(soak, what):
    slowed(soak, 300, 320, what)
    assert soak.report()["faults"] == [] and soak.kills[0]["recovered_seconds"] == pytest.approx(19, abs=0.5)


def test_a_lasting_slowdown_is_a_fault(soak):
    for second, (_, done) in enumerate(soak.points):
        done[0] = 100 * min(second, 300) + 80 * max(second - 300, 0)
    assert "came back to 0.80 before the next kill" in soak.report()["faults"][0]


def test_a_recovery_after_the_next_kill_is_a_fault(soak):
    soak.kills.append({"victim": "actor 1", "time": 1_330.0})
    slowed(soak, 300, 325)
    assert "actor 0, killed at 300 s" in soak.report()["faults"][0] and soak.kills[0]["recovered_seconds"] is None


def test_growing_memory_is_a_fault(soak):
    for row in soak.rows:
        row["memory_mb"] += row["seconds"] / 10
    assert "memory grew from" in soak.report()["faults"][0]


def test_every_process_but_main_can_be_a_victim():
    assert {role for roles in VICTIMS.values() for role in roles} == {"actor", "evaluator", "logger", "learner"}
