"""The cluster simulation agrees with the closed form, and both with sums by hand and measured rates."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import cluster_simulation, scaling
from benchmarks.cluster_limits import (
    Cluster,
    bottleneck,
    home_period,
    limits,
    measured,
    supported_actors,
    version_seconds,
)
from benchmarks.cluster_simulation import Fault, Simulation
from benchmarks.training import RESULTS

# Two learners, batches of 100, half a sample per step: an update of both needs 400 agent steps.
ROUND = Cluster(
    learners=2,
    actors=8,
    network=1_000.0,
    update_seconds=1.0,
    actor_rate=10.0,
    step_bytes=2.0,
    ingest_rate=70.0,
    parameter_bytes=300.0,
    gradient_bytes=500.0,
    batch=100,
    samples_per_insert=0.5,
    actors_per_node=2,
    publish_period=5,
    parameters_period=0.0001,
    latency=0.25,
)


def test_limits_are_those_computed_by_hand():
    # All-reduce: 2 * 1/2 * 500 = 500 bytes each way, 0.5 s, and 2 messages of 0.25 s.
    assert ROUND.all_reduce_seconds == 1.0 and ROUND.steps_per_update == 400 and ROUND.nodes == 2
    # Per agent step of the cluster, 1 byte arrives at each learner, and 500 / 400 of gradients.
    assert limits(ROUND) == {"actors": 80.0, "ingest": 140.0, "network in": 1_000 / (1 + 1.25), "learners": 200.0}
    assert bottleneck(ROUND) == ("actors", 80.0)


def test_one_learner_has_no_all_reduce_and_many_exchange_twice_the_gradient():
    assert replace(ROUND, learners=1).all_reduce_seconds == 0
    assert replace(ROUND, learners=1_000).all_reduce_bytes == pytest.approx(2 * 500, rel=2e-3)


def test_supported_actors_are_the_most_below_every_other_limit():
    count = supported_actors(ROUND)
    others = limits(replace(ROUND, actors=count))
    assert count == 14 and min(others.values()) == others["actors"] == 140  # the ingest's limit


def test_versions_come_as_often_as_they_are_published_and_fit_beside_gradients():
    assert version_seconds(ROUND) == 5 / 0.2  # 80 steps per second are 0.2 updates
    assert version_seconds(replace(ROUND, parameters_period=30.0)) == 30
    # 0.2 updates send 100 bytes per second. The other 900 carry two versions of 30,000.
    assert version_seconds(replace(ROUND, parameter_bytes=30_000.0)) == pytest.approx(60_000 / 900)


def test_home_answers_one_call_after_another():
    assert home_period(replace(ROUND, home_rate=1_000.0)) == 0.05
    assert home_period(replace(ROUND, home_rate=10.0)) == 0.2


CASES = {
    "actors": measured(2, 20, "10 Gbit/s", 1e-4, parameters_period=1.0),
    "ingest": measured(2, 200, "10 Gbit/s", 0.002, parameters_period=1.0),
    "learners": measured(4, 200, "10 Gbit/s", 0.1),
    "all-reduce": measured(4, 160, "10 Gbit/s", 0.01, parameters_period=1.0),
    "network in": replace(
        measured(2, 200, "1 Gbit/s", 1e-3, samples_per_insert=0.02), step_bytes=8_000.0, publish_period=1_000
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_simulation_reaches_the_closed_form_limit(name, monkeypatch):
    monkeypatch.setattr(cluster_simulation, "VARIATION", 0.0)
    assert bottleneck(CASES[name])[0] == name
    trace = Simulation(CASES[name], seed=1).run(24)
    assert trace.throughput(8, 24) == pytest.approx(bottleneck(CASES[name])[1], rel=0.03)


def test_the_slowest_of_the_learners_ends_an_update():
    cluster = measured(8, 400, "10 Gbit/s", 0.1)
    trace = Simulation(cluster, seed=1).run(60)
    slowest = np.random.default_rng(0).standard_normal((100_000, 8)).max(1).mean()  # 1.42 standard deviations
    expected = 1 / (0.1 * (1 + cluster_simulation.VARIATION * slowest) + cluster.all_reduce_seconds)
    assert np.mean(trace.updates[10:]) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", json.loads((RESULTS / "ray.json").read_text())["way"])
def test_one_actor_and_one_ingest_have_their_measured_rates(name):
    way = json.loads((RESULTS / "ray.json").read_text())["way"][name]
    rates = {
        "actor_rate": way["actor, agent steps per second"],
        "step_bytes": way["bytes per agent step"],
        "ingest_rate": way["ingest, agent steps per second"],
    }
    few, many = (
        replace(measured(1, actors, "10 Gbit/s", 1e-6), **rates, samples_per_insert=1e-3) for actors in (1, 200)
    )
    assert Simulation(few, seed=1).run(40).throughput(5, 40) == pytest.approx(rates["actor_rate"], rel=0.03)
    assert Simulation(many, seed=1).run(20).throughput(5, 20) == pytest.approx(rates["ingest_rate"], rel=0.03)


def test_no_measured_run_is_faster_than_the_simulation_of_its_parts():
    ray, arithmetic = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("ray", "arithmetic"))
    way, update = ray["way"]["MinAtar Breakout"], np.median(arithmetic["DQN, MinAtar 10x10, 32"]["float32"]) / 1e3
    cluster = replace(
        measured(1, 2, "10 Gbit/s", update, batch=32, samples_per_insert=8.0),
        actor_rate=way["actor, agent steps per second"],
    )
    simulated = Simulation(cluster, seed=1).run(20).throughput(5, 20)
    assert bottleneck(cluster)[0] == "learners"
    assert max(ray["speed"]["dqn-minatar-breakout"]["local"]) < simulated


def test_a_seed_gives_the_same_run_and_another_seed_another():
    first, again, other = (Simulation(CASES["learners"], seed).run(10).steps for seed in (1, 1, 2))
    assert first == again != other


def test_lags_are_as_old_as_versions_and_chunks_can_be():
    cluster = CASES["learners"]
    trace = Simulation(cluster, seed=1).run(40)
    median, high = trace.lag(10, 40)
    rate = float(np.mean(trace.updates[10:]))
    waiting = cluster_simulation.BUFFERED_UPDATES + rate * 2 * cluster.chunk_steps / cluster.actor_rate
    # Between two versions the lag grows to publish_period. A chunk may wait for the limiter.
    assert 0 < median <= high <= 2 * cluster.publish_period + waiting
    fresh = Simulation(replace(cluster, publish_period=1), seed=1).run(40).lag(10, 40)
    assert fresh[0] + 1 <= median <= fresh[0] + cluster.publish_period


def test_lost_actors_are_missed_until_they_restart(monkeypatch):
    monkeypatch.setattr(cluster_simulation, "VARIATION", 0.0)
    cluster = CASES["actors"]  # two nodes a learner: of 10 actors, none in reserve
    lost = Fault(20.0, "actors", 2)
    trace = Simulation(cluster, 1, [lost]).run(70)
    before, during, after = trace.throughput(5, 20), trace.throughput(22, 38), trace.throughput(45, 70)
    assert during == pytest.approx(0.0, abs=1) and after == pytest.approx(before, rel=0.02) and trace.lost_updates == 0
    assert cluster_simulation.RESTART_SECONDS <= trace.recovery(20.0) + 2 <= cluster_simulation.RESTART_SECONDS + 5


def test_a_lost_learner_costs_what_came_after_the_checkpoint():
    trace = Simulation(CASES["learners"], 1, [Fault(80.0, "learner")]).run(180)
    since = sum(trace.updates[60:80])  # checkpoints are at 60, 120, ...
    assert abs(trace.lost_updates - since) <= 1 and sum(trace.updates[81:140]) == 0
    assert trace.recovery(80.0) == pytest.approx(cluster_simulation.RESUME_SECONDS, abs=3)


def test_an_elastic_run_goes_on_with_the_learners_left():
    fault = Fault(50.0, "learner")
    trace = Simulation(CASES["learners"], 1, [fault], elastic=True).run(200)
    regrouped = 50 + math.ceil(cluster_simulation.REGROUP_SECONDS)
    returned = 50 + math.ceil(cluster_simulation.RETURN_SECONDS)
    assert sum(trace.updates[51:regrouped]) == 0 and trace.lost_updates == 0
    before = trace.throughput(20, 50)
    # Three learners of four take three quarters of the samples; the all-reduce and the slowest learner are faster.
    assert trace.throughput(regrouped + 5, returned) == pytest.approx(0.75 * before, rel=0.06)
    assert trace.throughput(returned + 20, 200) == pytest.approx(before, rel=0.03)


def test_the_page_of_scaling_is_what_its_program_writes():
    assert scaling.page() == (RESULTS.parent / "scaling.md").read_text()
