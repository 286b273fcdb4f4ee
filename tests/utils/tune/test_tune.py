"""Ranges are parsed and checked, and studies run a stand-in for main.py whose score is agent.learning_rate."""

import ast
import csv
import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from core.common.files import folder_lock
from utils import run_registry
from utils.config.rows import find_row, flatten, from_row
from utils.errors import ConfigurationError
from utils.options import CONFIGS
from utils.plot.curves import PERIOD, SCORE, late_score, read_curve
from utils.sweep import subprocess_run
from utils.sweep.subprocess_run import options_of
from utils.tune import __main__ as tune
from utils.tune.__main__ import Study
from utils.tune.ranges import ranges


def options(root, config="dqn-cartpole"):
    return options_of(config, [], "tune", str(root))


# ranges -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, values, kind",
    [
        ("agent.learning_rate=1e-5..1e-2:log", (1e-5, 1e-2), "log"),
        ("agent.n_step=1..5", (1, 5), "range"),
        ("agent.gamma=0.9,0.99", (0.9, 0.99), "choice"),
        ("agent.double_q=true,false", (True, False), "choice"),
        ("agent.exploration=linear,ladder", ("linear", "ladder"), "choice"),
        ('env.kwargs={},{"gravity": 9.8, "length..log": 1}', ("{}", '{"gravity": 9.8, "length..log": 1}'), "choice"),
        ("rate_limiter.samples_per_insert=1..8", (1.0, 8.0), "range"),
        ("agent.learning_rate", (1e-4, 3e-3), "log"),
        ("model_type=core.models.dqn:DQNMLP,dqn-mlp", ("core.models.dqn:DQNMLP", "dqn-mlp"), "choice"),
    ],
)
def test_a_range_has_the_type_of_its_option(root, text, values, kind):
    (part,) = ranges(options(root), [text])
    assert (part.name, part.values, part.kind) == (text.partition("=")[0], values, kind)
    assert [type(value) for value in part.values] == [type(value) for value in values]


@pytest.mark.parametrize(
    "text, message",
    [
        ("agent.learning_rte=1..2", "no setting agent.learning_rte to tune, did you mean agent.learning_rate"),
        ("agent.optimizer_eps", "agent.optimizer_eps has no declared range: write"),
        ("agent.learning_rate=1e-2..1e-4", "low must be below high"),
        ("agent.learning_rate=0..1:log", "above 0 for :log"),
        ("agent.learning_rate=-1..1", "greater than 0"),
        ("agent.n_step=1..x", "two numbers"),
        ("agent.n_step=1,x", "must be a valid integer"),
        ("agent.exploration=linear..ladder", "two numbers"),
        ("agent.learning_rate=1,2:log", "must be a valid number"),
        ("agent.learning_rate=1e-4..1e-2:lin", "only :log"),
        ("agent.exploration=linear,cosine", "must be one of"),
    ],
)
def test_invalid_ranges_are_refused(root, text, message):
    with pytest.raises(ConfigurationError, match=message):
        ranges(options(root), [text])


@pytest.mark.parametrize(
    "name", ["seed", "root", "check", "steps", "updates", "seconds", "target_score", "evaluator.episodes"]
)
def test_options_that_trials_share_cannot_be_tuned(root, name):
    with pytest.raises(ConfigurationError, match=f"^{name} cannot be tuned"):
        ranges(options(root), [f"{name}=1,2"])


def test_an_option_has_one_range_or_one_value(root):
    with pytest.raises(ConfigurationError) as refused:
        ranges(options(root), ["agent.gamma", "agent.n_step=1..3", "agent.n_step=1..5"], {"agent.gamma": ["0.9"]})
    assert refused.value.problems == (
        "agent.n_step has 2 ranges: give one",
        "agent.gamma has a range and a value after --: give one of them",
    )
    assert "agent.gamma" not in [part.name for part in ranges(options(root), [], {"agent.gamma": ["0.9"]})]


def test_declared_ranges_of_options_that_the_agent_lacks_are_left_out():
    given = from_row(find_row("dqn-cartpole"), {"agent_type": "pqn"})[0]
    assert [part.name for part in ranges(given, [])] == ["agent.learning_rate", "agent.gamma"]


def test_every_config_has_valid_default_ranges():
    assert [row["name"] for row in CONFIGS if len(ranges(from_row(row)[0], [])) <= 3] == []


def test_names_may_have_hyphens_as_on_the_command_line(root):
    assert ranges(options(root), ["agent.learning-rate=1e-4..1e-3:log"])[0].name == "agent.learning_rate"


@pytest.mark.parametrize("row", [row["name"] for row in CONFIGS if row["name"].startswith("r2d2-")])
def test_no_trial_of_r2d2_is_refused_for_the_size_of_its_batches(root, row, monkeypatch):
    monkeypatch.setattr("utils.config.memory_budget.available_bytes", lambda: 64 << 30)
    tuned = {part.name: part.values for part in ranges(options_of(row, ["--updates", "9"], "tune", str(root)), [])}
    largest, least = max(tuned["agent.batch_size"]), min(tuned["rate_limiter.samples_per_insert"])
    words = f"--agent.batch_size {largest} --rate_limiter.samples_per_insert {least} --updates 9".split()
    assert options_of(row, words, "tune", str(root)).batch_size == largest


# studies ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def main(root, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(subprocess_run, "MAIN", Path(__file__).parents[1] / "fake_main.py")
    monkeypatch.setattr(tune, "LOOK_PERIOD", 0.0)

    def call(*arguments, trials=3, lr="0.01..0.9", game="", config="dqn-cartpole", words=()):
        monkeypatch.setattr(
            subprocess_run.ChildRun, "_command", lambda run, resume, made=made: [*made(run, resume), "--game", game]
        )
        return tune.main(
            [
                "--root",
                str(root),
                "--config",
                config,
                "--trials",
                str(trials),
                "--evaluations",
                "10",
                "--ranges",
                f"agent.learning_rate={lr}",
                "agent.n_step=1..3",
                *arguments,
                "--",
                "--steps",
                "1000",
                *words,
            ]
        )

    made = subprocess_run.ChildRun._command
    return call


def trials(root):
    with (root / "logs" / "tune" / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_study_finds_the_best_trial_and_prints_its_config(main, root, capsys):
    pytest.importorskip("matplotlib")
    assert main("--plot") == 0 and (root / "logs" / "tune" / "trials.png").read_bytes().startswith(b"\x89PNG")
    rows, best = trials(root), max(trials(root), key=lambda row: float(row["score"]))
    assert [row["state"] for row in rows] == ["complete"] * 3 and len({row["agent.learning_rate"] for row in rows}) == 3
    # the late evaluations score .8, .9 and 1 of it
    assert all(float(row["score"]) == pytest.approx(0.9 * float(row["agent.learning_rate"])) for row in rows)
    printed = capsys.readouterr().out
    row = ast.literal_eval(printed[printed.index("    {") :].strip().rstrip(","))
    options, problems = from_row(row)
    assert not problems and row["name"] == "dqn-cartpole-tuned"
    told, plain = flatten(options), flatten(from_row(next(row for row in CONFIGS if row["name"] == "dqn-cartpole"))[0])
    assert [told[name] for name in ("agent.learning_rate", "agent.n_step", "steps")] == [
        float(best["agent.learning_rate"]),
        int(best["agent.n_step"]),
        1000,
    ]
    assert {name for name, value in told.items() if value != plain[name]} <= {
        "agent.learning_rate",
        "agent.n_step",
        "steps",
        "config",
    }


def test_the_printed_config_has_options_of_its_own_classes_only(main, capsys):
    assert main("memory_type=shared", "learner.threads=1,2", trials=1, config="rainbow-cartpole") == 0
    printed = capsys.readouterr().out
    row = ast.literal_eval(printed[printed.index("    {") :].strip().rstrip(","))
    options, problems = from_row(row)  # without the prioritised memory's options
    assert not problems and options.memory_type == "shared" and not any(name.startswith("memory.alpha") for name in row)


def test_options_that_no_row_can_have_are_printed_beside_it(main, capsys):
    assert main(trials=1, words=("--num_actors", "4", "--device", "cpu")) == 0
    assert ", as a row of CONFIGS (train it with --num_actors 4):\n    {" in capsys.readouterr().out


def test_layer_sizes_are_tuned_as_written(main, root, capsys):
    for count in (1, 2):  # the second call finds the choices of the first
        assert main("model.hidden=32,64", trials=count, config="ddpg-pendulum") == 0
    assert {row["model.hidden"] for row in trials(root)} <= {"32", "64"} and [row["state"] for row in trials(root)] == [
        "complete"
    ] * 2
    assert (
        f"'--model.hidden', '{trials(root)[0]['model.hidden']}'" in (root / "logs" / "tune" / "trial0.txt").read_text()
    )
    assert '"model.hidden": (' in capsys.readouterr().out


def test_a_study_is_resumed(main, root):
    assert main(trials=2) == main(trials=3) == 0
    assert len({row["agent.learning_rate"] for row in trials(root)}) == 3  # no value is drawn twice
    outputs = sorted(root.glob("logs/tune/trial*.txt"))
    assert [path.read_text().count("begins") for path in outputs] == [1, 1, 1]


def test_a_study_with_a_torn_last_line_is_resumed(main, root, monkeypatch):
    monkeypatch.chdir(root.parent)
    assert main("--root", root.name, trials=1) == 0  # a relative root, because the study's lock is a link
    (journal,) = root.glob("logs/tune/study.log")
    journal.write_bytes(journal.read_bytes()[:-20])
    assert main(trials=2) == main(trials=3) == 0
    assert [row["state"] for row in trials(root)] == ["complete"] * 3


@pytest.mark.slow
def test_trials_that_do_worse_are_pruned(main, root, monkeypatch):
    monkeypatch.setenv("EVALUATION_SECONDS", "0.15")
    assert main("--startup", "1", "--warmup", "3", trials=4) == 0
    rows = trials(root)
    pruned = [row for row in rows if row["state"] == "pruned"]
    assert rows[0]["state"] == "complete" and pruned
    median = sorted(float(row["agent.learning_rate"]) for row in rows if row["state"] == "complete")
    assert all(float(row["agent.learning_rate"]) < median[-1] for row in pruned)
    evaluated = [
        len((root / "logs" / f"tune_trial{row['trial']}" / "metrics.jsonl").read_text().splitlines()) for row in pruned
    ]
    assert all(3 <= count < 10 for count in evaluated)


def test_every_report_of_a_trial_is_its_late_score(main, root, capsys):
    """Reported, printed, tabulated and best scores have the definition of the sweeps' tables."""
    optuna = pytest.importorskip("optuna")
    assert main(game="repeats", trials=2) == 0
    journal = optuna.storages.journal.JournalFileBackend(str(root / "logs" / "tune" / "study.log"))
    told = optuna.load_study(study_name="tune", storage=optuna.storages.JournalStorage(journal)).trials
    printed = capsys.readouterr().out
    for row, trial in zip(trials(root), told, strict=True):
        curve, rate = (
            read_curve(root / "logs" / f"tune_trial{trial.number}" / "metrics.jsonl"),
            float(row["agent.learning_rate"]),
        )
        late = rate * (0.8 + 0.9 + 1 + 50 + 60) / 5  # without the 1,000 of the evaluation long after the steps
        assert late_score(curve, 1_000) == pytest.approx(late)
        # of 500 steps, 400 to 500 are late
        assert trial.intermediate_values[5] == pytest.approx(rate * (0.4 + 0.5) / 2)
        assert trial.intermediate_values[trial.last_step] == trial.value == float(row["score"]) == pytest.approx(late)
        assert f"score {late:.2f}" in printed
    best = max(trials(root), key=lambda row: float(row["score"]))
    assert (
        f'"agent.learning_rate": {best["agent.learning_rate"]}' in printed
        and f"score {float(best['score']):.2f}, as a row" in printed
    )


@pytest.mark.slow
def test_a_trial_that_made_its_steps_is_not_pruned(main, root, monkeypatch):
    monkeypatch.setenv("EVALUATION_SECONDS", "0.1")
    assert main("--startup", "1", "--warmup", "0", game="late", trials=4) == 0
    assert [row["state"] for row in trials(root)] == ["complete"] * 4


@pytest.mark.slow
def test_a_trial_that_finishes_while_pruned_gets_its_evaluation(main, root, monkeypatch):
    monkeypatch.setenv("EVALUATION_SECONDS", "0.15")
    assert main("--startup", "1", "--warmup", "3", game="overtaken", trials=4) == 0
    continued = [
        row
        for row in trials(root)
        if (root / "logs" / "tune" / f"trial{row['trial']}.txt").read_text().count("begins") == 2
    ]
    assert [row["state"] for row in trials(root)] == ["complete"] * 4 and continued
    assert all(float(row["score"]) == pytest.approx(100 * float(row["agent.learning_rate"])) for row in continued)


def study_of(root, startup=0, warmup=0):
    """Return a study of runs of 1,000 steps that are evaluated every 100 steps."""
    pytest.importorskip("optuna")
    (root / "logs" / "tune").mkdir(parents=True)
    template = options_of("dqn-cartpole", ["--steps", "1000"], "tune", str(root))
    words, parts = ["--steps", "1000", "--evaluator.steps", "100"], ranges(options(root), ["agent.learning_rate"])
    return Study(template, words, parts, root / "logs" / "tune", startup, warmup, 1)


def add_metrics(run, *points):
    """Write lines of one metric each."""
    run.options.log_folder.mkdir(parents=True, exist_ok=True)
    with (run.options.log_folder / "metrics.jsonl").open("a") as file:
        for step, name, value in points:
            file.write(json.dumps({"step": step, "time": 0, "seconds": 0, "values": {name: value}}) + "\n")


def test_evaluations_that_a_resumed_trial_gave_up_do_not_count(root):
    """The trial was killed after 900 steps and resumed from 500."""
    study = study_of(root)
    run = study._child(study._study.ask({}))
    add_metrics(
        run,
        (400, SCORE, 1.0),
        (500, PERIOD, 500),
        (800, SCORE, 99.0),
        (900, PERIOD, 900),
        (550, PERIOD, 550),
        (600, SCORE, 2.0),
    )
    assert study._scores(run, run.lines) == {4: 1.0, 6: 2.0}


def test_a_trial_is_pruned_after_as_many_scores_as_the_warmup(root):
    """The first evaluation takes four periods, so that the second score is already of the fifth."""
    optuna = pytest.importorskip("optuna")
    study = study_of(root, startup=1, warmup=5)
    earlier = optuna.trial.create_trial(value=9.0, intermediate_values=dict.fromkeys(range(1, 11), 9.0))
    study._study.add_trial(earlier)
    run = study._child(study._study.ask({}))
    add_metrics(run, (110, SCORE, 1.0), *((step, SCORE, 1.0) for step in range(510, 800, 100)))
    assert len(study._scores(run, run.lines)) == 4 and not study._should_prune(run)
    add_metrics(run, (810, SCORE, 1.0))
    assert study._should_prune(run)


@pytest.mark.parametrize("period, looks", [(0.0, 5), (1e9, 0)])
def test_metrics_of_a_trial_are_read_seldom_and_once_a_look(root, monkeypatch, period, looks):
    study, read = study_of(root), []
    run = study._child(study._study.ask({}))
    codes = iter([None] * 5)
    monkeypatch.setattr(subprocess_run.ChildRun, "start", lambda run, cores: None)
    monkeypatch.setattr(subprocess_run.ChildRun, "exit_code", property(lambda run: next(codes, 0)))
    monkeypatch.setattr(subprocess_run, "read_lines", lambda path: read.append(path) or [])
    monkeypatch.setattr(tune, "POLL", 0)
    monkeypatch.setattr(tune, "LOOK_PERIOD", period)
    assert not study._watch(run) and len(read) == looks


def test_a_trial_that_an_earlier_start_still_trains_stays_unfinished(root, monkeypatch):
    """It counted as failed, with exit code None."""
    study = study_of(root)
    trial = study._study.ask({})
    add_metrics(run := study._child(trial))
    monkeypatch.setattr(subprocess_run, "GRACE", 0)
    monkeypatch.setattr(run_registry, "read", lambda folder: None)
    with folder_lock(run.options.log_folder), pytest.raises(ConfigurationError, match="tune_trial0 is still being"):
        study._run(trial)
    assert [trial.state.name for trial in study.trials] == ["RUNNING"]


def test_a_trial_does_not_take_the_score_of_an_earlier_run(main, root, capsys):
    earlier = dataclasses.replace(
        options_of("dqn-cartpole", ["--steps", "1000"], "tune", str(root)), timestamp="trial0"
    )
    earlier.log_folder.mkdir(parents=True)
    run_registry.save(earlier, {})
    run_registry.end(earlier, 0)
    with pytest.raises(SystemExit) as ended:
        main(trials=1)
    assert ended.value.code == 2 and "run tune_trial0 exists with other settings (" in capsys.readouterr().err
    assert not (root / "logs" / "tune" / "trial0.txt").exists()


def test_a_trial_without_evaluations_fails(main, root, capsys):
    assert main(game="blind", trials=1) == 1
    assert [row["state"] for row in trials(root)] == ["fail"] and "was never evaluated" in capsys.readouterr().out


def test_an_interrupted_trial_is_resumed_with_its_options(main, root):
    def interrupt():
        while not list(root.glob("logs/tune_trial0/metrics.jsonl")):
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(game="waits") == 130
    thread.join()
    assert [row["state"] for row in trials(root)] == ["running"]
    first = trials(root)[0]["agent.learning_rate"]
    assert main() == 0
    rows, output = trials(root), (root / "logs" / "tune" / "trial0.txt").read_text()
    assert [row["state"] for row in rows] == ["complete"] * 3 and rows[0]["agent.learning_rate"] == first
    assert (
        output.count("begins") == 2
        and output.count(f"'--agent.learning_rate', '{first}'") == 2
        and "'--resume', 'tune_trial0'" in output
    )


def test_failing_trials_are_reported_and_counted(main, root, capsys):
    assert main(game="fails", trials=2) == 1
    assert [row["state"] for row in trials(root)] == [
        "fail"
    ] * 2 and "ended with exit code 4" in capsys.readouterr().out


def test_another_study_needs_another_name(main, capsys):
    assert main(trials=1) == 0
    with pytest.raises(SystemExit) as ended:
        main(trials=1, lr="0.1..0.2")
    assert ended.value.code == 2 and "another definition" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, messages",
    [
        (
            ("--trials", "0", "--evaluations", "-3"),
            ("trials=0 must be at least 1", "evaluations=-3 must be at least 1"),
        ),
        (("--startup", "-1", "--warmup=-1"), ("startup=-1 must be at least 0", "warmup=-1 must be at least 0")),
        (("--seed", "-1", "--evaluations", "0"), ("evaluations=0 must be at least 1", "seed=-1 must be at least 0")),
    ],
)
def test_numbers_out_of_bounds_are_refused(main, root, capsys, words, messages):
    with pytest.raises(SystemExit) as ended:
        main(*words)
    assert ended.value.code == 2 and not list(root.iterdir())
    assert capsys.readouterr().err.splitlines() == [f"error: --{message}" for message in messages]


def test_an_option_of_all_runs_is_not_tuned(main, root, capsys):
    with pytest.raises(SystemExit) as ended:
        main("--", "--agent.n_step", "3", "--steps", "1000")
    assert ended.value.code == 2 and "agent.n_step has a range and a value" in capsys.readouterr().err


def test_the_steps_between_evaluations_are_refused(main, root, capsys):
    with pytest.raises(SystemExit) as ended:
        main("--", "--evaluator.steps", "100", "--steps", "1000")
    assert ended.value.code == 2 and not list(root.iterdir())
    assert "--evaluator.steps is not yours to give here: --evaluations" in capsys.readouterr().err


def test_trials_that_end_at_a_score_are_refused(main, root, capsys):
    with pytest.raises(SystemExit) as ended:
        main("--", "--target_score", "475", "--steps", "1000")
    assert ended.value.code == 2 and not list(root.iterdir())
    assert "trials that end at a target_score have no late score" in capsys.readouterr().err


def test_a_root_that_cannot_be_a_folder_is_refused(main, capsys):
    with pytest.raises(SystemExit) as ended:
        main("--root", "/proc/x")
    assert ended.value.code == 2 and "/proc/x/logs/tune cannot be made (" in capsys.readouterr().err


def test_a_tilde_in_root_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert tune.parser().parse_args(["--config", "dqn-cartpole", "--root=~/x"]).root == "/somewhere/x"


@pytest.mark.parametrize("line", [b"garbage", b"\xff", b'{"op_code": 0', b"", b"[]", b"{}"])
def test_a_line_that_is_no_record_is_named(main, root, capsys, line):
    journal = root / "logs" / "tune" / "study.log"
    journal.parent.mkdir(parents=True)
    journal.write_bytes(before := b'{"op_code": 0}\n' + line + b"\n{")
    with pytest.raises(SystemExit) as ended:
        main()
    (message,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 3 and message.startswith(f"error: {journal}, line 2 is no record of a study")
    assert journal.read_bytes() == before


def test_a_seed_may_be_larger_than_those_of_numpy(root):
    pytest.importorskip("optuna")
    (root / "logs" / "tune").mkdir(parents=True)
    parts = ranges(options(root), ["agent.learning_rate"])
    assert not Study(options(root), [], parts, root / "logs" / "tune", 0, 0, 2**63 - 1).trials


def test_a_run_without_a_number_of_steps_is_refused(root, capsys):
    with pytest.raises(SystemExit) as ended:
        tune.main(["--root", str(root), "--config", "impala-pong-small", "--", "--seconds", "5"])
    assert ended.value.code == 2 and "-- --steps 100000" in capsys.readouterr().err


def test_without_optuna_the_pip_command_is_named(main, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and 'pip install -e ".[tune]"' in capsys.readouterr().err
