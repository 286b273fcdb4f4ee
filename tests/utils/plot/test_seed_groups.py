"""Runs that differ only by seed form a group, and labels tell groups apart."""

import dataclasses

import numpy as np
import pytest

from utils import run_registry
from utils.config.rows import flatten
from utils.errors import ConfigurationError
from utils.options import Options
from utils.plot.curves import SCORE, Curve, Run, alike
from utils.sweep.subprocess_run import ChildRun, options_of


@pytest.fixture(scope="module")
def settings():
    return flatten(options_of("dqn-cartpole", [], "local", "somewhere"))


@pytest.fixture
def run(settings):
    def make(name, config="dqn-cartpole", method="dqn", **changed):
        told = {**settings, **{key.replace("__", "."): value for key, value in changed.items()}}
        return Run(name, {**told, "run": name, "config": config, "method": method}, {SCORE: Curve(*np.ones((3, 1)))})

    return make


def groups(found, title="config"):
    return {label: [run.name for run in runs] for label, runs in alike(found, title).items()}


@pytest.mark.parametrize(
    ("setting", "here", "there"),
    [
        ("game", "CartPole-v1", "FlappyBird-v0"),
        ("agent_type", "dqn", "rainbow"),
        ("memory_type", "shared", "prioritized"),
        ("model_type", "dqn-mlp", "dqn-cnn"),
        ("agent.learning_rate", 1e-3, 1e-4),
        ("memory.capacity", 50_000, 1_000),
        ("num_actors", 1, 2),
        ("model.hidden", [64], [64, 64]),
        ("rate_limiter.samples_per_insert", 8.0, None),
        ("env.max_steps", None, 100),
        ("evaluator.max_steps", 27_000, 100),
        ("learner.precision", "float32", "bf16"),
        ("model_file", None, "x.pth"),
    ],
)
def test_runs_that_learn_differently_form_two_labelled_groups(run, setting, here, there):
    key = setting.replace(".", "__")
    found = [run("a", seed=1, **{key: here}), run("b", seed=2, **{key: there}), run("c", seed=3, **{key: here})]
    assert groups(found) == {f"dqn-cartpole, {setting} {here}": ["a", "c"], f"dqn-cartpole, {setting} {there}": ["b"]}


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 2},
        {"timestamp": "x", "machine": "y", "root": "z"},
        {"device": "cuda", "actor__device": "cuda"},
        {"resume": "newest"},
        {"engine": "inline"},
        {"steps": 7, "updates": 7, "seconds": 7.0, "target_score": 7.0},
        {"profile": True, "episodes": 3},
        {"evaluator__period": 5.0, "logger__period": 5.0, "supervisor__max_restarts": 1, "video__fps": 5.0},
    ],
)
def test_options_of_one_start_do_not_split_a_group(run, changed):
    assert groups([run("a"), run("b", **changed)]) == {"dqn-cartpole": ["a", "b"]}


def test_a_label_names_every_option_that_differs(run):
    found = [
        run("a"),
        run("b", agent__learning_rate=1e-4, num_actors=2),
        run("c", "rainbow-cartpole", agent__learning_rate=7),
    ]
    assert list(groups(found)) == [
        "dqn-cartpole, num_actors 1, agent.learning_rate 0.001",
        "dqn-cartpole, num_actors 2, agent.learning_rate 0.0001",
        "rainbow-cartpole",
    ]


def test_options_of_a_class_are_compared_within_that_class(run):
    found = [
        run("a", agent_type="dqn"),
        run("b", agent_type="other", agent__learning_rate=7),
        run("c", agent_type="dqn", agent__n_step=9),
    ]
    assert groups(found) == {
        "dqn-cartpole, agent_type dqn, agent.n_step 3": ["a"],
        "dqn-cartpole, agent_type other, agent.n_step 3": ["b"],
        "dqn-cartpole, agent_type dqn, agent.n_step 9": ["c"],
    }


def test_an_option_that_older_runs_lack_splits_newer_runs_only(run):
    old = run("old")
    del old.settings["agent.learning_rate"]
    assert groups([old, run("a"), run("b")]) == {"dqn-cartpole": ["old", "a", "b"]}
    assert groups([old, run("a"), run("b", agent__learning_rate=7)]) == {
        "dqn-cartpole": ["old"],
        "dqn-cartpole, agent.learning_rate 0.001": ["a"],
        "dqn-cartpole, agent.learning_rate 7": ["b"],
    }


def test_runs_of_several_games_form_one_method(run):
    pong = [run(f"pong-{lr}", "dqn-pong", game="pong", agent__learning_rate=lr, agent__n_step=5) for lr in (1, 2)]
    boxing = [run(f"boxing-{lr}", "dqn-boxing", game="boxing", agent__learning_rate=lr) for lr in (1, 2)]
    assert groups([pong[0], boxing[0]], "method") == {"dqn": ["pong-1", "boxing-1"]}  # configs may differ
    assert groups([*pong, *boxing], "method") == {
        "dqn, agent.learning_rate 1": ["pong-1", "boxing-1"],
        "dqn, agent.learning_rate 2": ["pong-2", "boxing-2"],
    }
    other = run("tennis", "dqn-pong", game="tennis", agent__learning_rate=1, agent__n_step=5)
    assert groups([pong[0], other], "method") == {"dqn": ["pong-1", "tennis"]}


def test_runs_with_unknown_options_are_kept_apart(run):
    from_csv = [Run(name, {"run": name, "config": "dqn-cartpole", "method": "dqn"}, {}) for name in "ab"]
    assert groups(from_csv) == {"dqn-cartpole": ["a", "b"]}
    assert groups([*from_csv, run("c")]) == {"dqn-cartpole, settings unknown": ["a", "b"], "dqn-cartpole": ["c"]}


def test_a_resumed_run_records_the_model_it_started_from(root, settings, alone):
    options: Options = options_of("dqn-cartpole", ["--model_file", "x.pth"], "local", str(root))
    options.log_folder.mkdir(parents=True)
    run_registry.save(options, {})
    run_registry.save(dataclasses.replace(options, model_file=None, resume=options.signature), {})
    assert run_registry.read(options.log_folder).options["model_file"] == options.model_file is not None


def test_a_sweep_refuses_runs_that_would_form_another_group(root):
    def child(*words):
        options = dataclasses.replace(options_of("dqn-cartpole", words, "local", str(root)), timestamp="x")
        return ChildRun(options, words, root / "out.txt")

    options = child().options
    options.log_folder.mkdir(parents=True)
    run_registry.save(options, {})
    child("--steps", "7000", "--engine", "inline", "--video.fps", "5", "--evaluator.period", "3").check()
    for name, value in (("agent.learning_rate", "1e-5"), ("evaluator.max_steps", "100"), ("model_file", "x.pth")):
        with pytest.raises(ConfigurationError, match=name):
            child(f"--{name}", value).check()


@pytest.mark.parametrize(
    ("schedule", "updates", "apart"), [("linear", None, True), ("linear", 9, False), ("constant", None, False)]
)
def test_runs_of_other_lengths_differ_if_their_learning_rate_does(run, schedule, updates, apart):
    scheduled = {"agent__lr_schedule": schedule, "agent__lr_schedule_updates": updates}
    found = groups([run("a", steps=7, **scheduled), run("b", steps=9, **scheduled)])
    assert found == (
        {"dqn-cartpole, steps 7": ["a"], "dqn-cartpole, steps 9": ["b"]} if apart else {"dqn-cartpole": ["a", "b"]}
    )
