"""Experiment trackers receive all values, never delay a run, and work offline where they are installed."""

import json
import math
import shlex
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from core.metrics.trackers import MAX_WAITING_PERIODS, MlflowTracker, TrackerThread, WandbTracker, make_tracker_threads
from core.runtime.log_buffers import Record
from core.runtime.options import LoggerParams
from utils.config.command_line import read_options
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context

PERIOD = [
    Record("learner/loss", 0.5, 200, 10.0),
    Record("evaluator/episodic_return_mean", 21.0, 150, 9.5),
    Record("global/fps", math.nan, 200, 10.25),
]


@pytest.fixture
def options(tmp_path):
    folder = tmp_path / "logs" / "box_1"
    folder.mkdir(parents=True)
    return SimpleNamespace(
        logger=LoggerParams(wandb="pong", mlflow="pong"),
        signature="box_1",
        log_folder=folder,
        to_dict=lambda: {"seed": 3, "agent": {"learning_rate": 0.5, "deep": {"x": "y" * 900}}},
    )


# stand-ins with the same calls ------------------------------------------------------------------------------------
@pytest.fixture
def wandb(monkeypatch):
    calls = []
    run = SimpleNamespace(
        define_metric=lambda *words, **settings: calls.append(("define_metric", words, settings)),
        log=lambda values: calls.append(("log", values)),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **settings: calls.append(("init", settings)) or run)
    )
    return calls


def test_wandb_receives_every_value_at_its_agent_steps(wandb, options):
    tracker = WandbTracker(options)
    tracker.write(PERIOD)
    tracker.close()
    assert [call[0] for call in wandb] == ["init", "define_metric", "log", "log", "finish"]
    settings = wandb[0][1]
    assert (settings["project"], settings["id"], settings["resume"], settings["dir"]) == (
        "pong",
        "box_1",
        "allow",
        str(options.log_folder),
    )
    assert settings["config"]["agent"]["learning_rate"] == 0.5 and wandb[1][2] == {"step_metric": "agent_steps"}
    assert wandb[2][1] == {"agent_steps": 150, "evaluator/episodic_return_mean": 21.0}
    assert wandb[3][1]["agent_steps"] == 200 and wandb[3][1]["learner/loss"] == 0.5


class Client:
    """Implement the calls of MlflowTracker to mlflow.tracking.MlflowClient on a store in memory."""

    made: list
    experiments: dict
    runs: dict

    def __init__(self, tracking_uri):
        self.made.append(tracking_uri)

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name):
        if name in self.experiments:
            raise ValueError(f"Experiment(name={name}) already exists")
        self.experiments[name] = "7"
        return "7"

    def search_runs(self, numbers, filter_string, max_results):
        assert numbers == ["7"]
        signature = filter_string.split("'")[1]
        return [SimpleNamespace(info=SimpleNamespace(run_id=signature))] if signature in self.runs else []

    def create_run(self, number, run_name, tags):
        self.runs[tags["signature"]] = {"metrics": [], "params": {}, "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def log_batch(self, run_id, metrics=(), params=()):
        self.runs[run_id]["metrics"] += metrics
        self.runs[run_id]["params"] |= dict(params)

    def update_run(self, run_id, status):
        self.runs[run_id]["status"] = status

    def set_terminated(self, run_id):
        self.runs[run_id]["status"] = "FINISHED"


@pytest.fixture
def mlflow(monkeypatch):
    for name, value in (("made", []), ("experiments", {}), ("runs", {})):
        monkeypatch.setattr(Client, name, value, raising=False)
    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    entities.Metric = lambda *values: values
    entities.Param = lambda *values: values
    tracking.MlflowClient = Client
    for name, module in (
        ("mlflow", ModuleType("mlflow")),
        ("mlflow.entities", entities),
        ("mlflow.tracking", tracking),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Client


def test_mlflow_receives_finite_values_and_the_options_once(mlflow, options):
    for _ in range(2):  # the second time as a resumed run
        tracker = MlflowTracker(options)
        assert mlflow.runs["box_1"]["status"] == "RUNNING"
        tracker.write(PERIOD)
        tracker.close()
    run = mlflow.runs["box_1"]
    assert (
        run["metrics"] == [("learner/loss", 0.5, 10_000, 200), ("evaluator/episodic_return_mean", 21.0, 9_500, 150)] * 2
    )
    assert (
        run["params"] == {"seed": "3", "agent.learning_rate": "0.5", "agent.deep.x": "y" * 500}
        and run["status"] == "FINISHED"
    )
    assert mlflow.made == [f"sqlite:///{options.log_folder.parent / 'mlflow.db'}"] * 2


def test_mlflow_uses_the_uri_of_the_environment(mlflow, options, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    MlflowTracker(options)
    assert mlflow.made == ["http://127.0.0.1:5000"]


# the thread -------------------------------------------------------------------------------------------------------
class Slow:
    def __init__(self):
        self.gate, self.periods, self.threads = threading.Event(), [], {threading.get_ident()}

    def write(self, records):
        self.gate.wait(20)
        self.threads.add(threading.get_ident())
        self.periods.append(records)

    def close(self):
        self.threads.add(threading.get_ident())


def test_a_hanging_tracker_delays_no_writer_and_counts_losses():
    slow = Slow()
    feeder = TrackerThread("slow", lambda: slow)
    started = time.monotonic()
    for number in range(MAX_WAITING_PERIODS + 50):
        feeder.write([number])
    assert time.monotonic() - started < 5 and 48 <= feeder.errors <= 50
    feeder.end()
    feeder.join(timeout=0.05)
    slow.gate.set()
    feeder.join(timeout=20)
    assert slow.periods[:3] == [[0], [1], [2]] and len(slow.periods) == MAX_WAITING_PERIODS + 50 - feeder.errors


def test_all_periods_are_written_before_join_returns():
    slow = Slow()
    slow.gate.set()
    feeder = TrackerThread("quick", lambda: slow)
    for number in range(20):
        feeder.write([number])
    feeder.end()
    feeder.join(timeout=20)
    # this thread and the tracker's
    assert slow.periods == [[number] for number in range(20)] and len(slow.threads) == 2


@pytest.mark.parametrize("part", ["make", "write"])
def test_a_failing_tracker_is_reported_once_and_losses_counted(part, capsys):
    def failing(*arguments):
        raise ConnectionError("no such host")

    feeder = TrackerThread(
        "wandb", failing if part == "make" else lambda: SimpleNamespace(write=failing, close=lambda: None)
    )
    for _ in range(3):
        feeder.write([])
    feeder.end()
    feeder.join(timeout=20)
    assert feeder.errors == (4 if part == "make" else 3)
    assert capsys.readouterr().err.count("wandb failed (ConnectionError: no such host)") == 1


def test_without_a_name_there_is_no_tracker():
    assert make_tracker_threads(SimpleNamespace(logger=LoggerParams())) == []


def test_a_missing_tracker_is_refused_with_its_pip_command(root, monkeypatch, capsys):
    monkeypatch.setattr("utils.config.validation.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        read_options(["--root", str(root), "--config", "dqn-cartpole", "--logger.wandb", "a", "--logger.mlflow", "b"])
    said = capsys.readouterr().err
    assert (
        "logger.wandb=a needs" in said
        and '".[wandb]"' in said
        and "logger.mlflow=b needs" in said
        and '".[mlflow]"' in said
    )


def train(root, *words):
    options = read_options(
        [
            "--root",
            str(root),
            *shlex.split(
                "--config dqn-cartpole --engine inline --rate_limiter.min_replay_size 50 --updates 5 "
                "--evaluator.episodes 1 --evaluator.max_steps 5"
            ),
            *words,
        ]
    )
    context, agent = create_context(options)
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict)) == 0
    return context.options


def test_an_experiment_that_another_run_makes_in_the_same_moment_is_taken(mlflow, options, monkeypatch):
    get, asked = Client.get_experiment_by_name, []

    def get_before_the_other(self, name):
        asked.append(name)
        if len(asked) > 1:
            return get(self, name)
        self.experiments[name] = "7"  # of the other run
        return None

    monkeypatch.setattr(Client, "get_experiment_by_name", get_before_the_other)
    MlflowTracker(options)
    assert mlflow.runs["box_1"]["status"] == "RUNNING" and mlflow.experiments == {asked[0]: "7"}


def test_a_run_sends_its_values_to_the_tracker(root, mlflow, monkeypatch):
    monkeypatch.setattr("utils.config.validation.find_spec", lambda name: True)
    options = train(root, "--logger.mlflow", "cartpole")
    run = mlflow.runs[options.signature]
    names = {metric[0] for metric in run["metrics"]}
    assert {"learner/loss", "global/agent_steps", "evaluator/episodic_return_mean"} <= names
    assert run["params"]["agent_type"] == "dqn" and run["status"] == "FINISHED"


# the real trackers, offline ---------------------------------------------------------------------------------------
def test_mlflow_stores_a_run(root, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    options = train(root, "--logger.mlflow", "cartpole", "--logger.tracker_timeout", "100")
    client = MlflowClient(f"sqlite:///{root / 'logs' / 'mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name("cartpole").experiment_id])
    assert (
        len(found) == 1
        and found[0].info.status == "FINISHED"
        and found[0].data.params["agent.learning_rate"] == "0.001"
    )
    written = [json.loads(line)["values"] for line in (options.log_folder / "metrics.jsonl").read_text().splitlines()]
    updates = [values["global/updates"] for values in written if "global/updates" in values]
    assert (
        found[0].data.metrics["global/updates"] == updates[-1] >= 5
        and found[0].data.tags["signature"] == options.signature
    )


def test_wandb_stores_a_run_offline(root, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = train(root, "--logger.wandb", "cartpole", "--logger.tracker_timeout", "100")
    files = list((options.log_folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1 and options.signature in files[0].name
    content = files[0].read_bytes()
    assert b"global/updates" in content and b"evaluator/episodic_return_mean" in content
