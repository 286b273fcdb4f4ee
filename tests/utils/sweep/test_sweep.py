"""Sweeps run a stand-in for main.py that writes the same files, and once the program itself, which is killed."""

import csv
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from utils import run_registry as saved_runs
from utils.api import _words
from utils.config import command_line
from utils.errors import ConfigurationError
from utils.options import CONFIGS, RUN
from utils.plot.curves import METRICS, SCORE
from utils.sweep import __main__ as sweep
from utils.sweep import subprocess_run
from utils.sweep.__main__ import Result, summaries
from utils.sweep.subprocess_run import claimed, options_of

PROJECT = Path(__file__).resolve().parents[3]
WORDS = ("--steps", "1000", "--agent.learning_rate", "0.5")


@pytest.fixture
def main(root, monkeypatch):
    """Return a function that sweeps in this process and returns the exit code; `doing` sets --game for seeds."""
    monkeypatch.setattr(subprocess_run, "MAIN", Path(__file__).parents[1] / "fake_main.py")
    games = {}
    monkeypatch.setattr(
        subprocess_run.ChildRun,
        "_command",
        lambda run, resume, made=subprocess_run.ChildRun._command: [
            *made(run, resume),
            "--game",
            games.get(run.options.seed, ""),
        ],
    )

    def call(*arguments, words=WORDS, **doing):
        games.clear()
        games.update({int(seed.removeprefix("seed")): game for seed, game in doing.items()})
        return sweep.main(["--root", str(root), "--configs", "dqn-cartpole", *arguments, "--", *words])

    return call


def tables(root, name="sweep"):
    def read(path):
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    folder = root / "logs" / name
    return read(folder / "table-runs.csv"), read(folder / "table.csv"), (folder / "table.md").read_text()


def begun(root, seed, name="sweep", row="dqn-cartpole"):
    return (root / "logs" / name / f"{row}-seed{seed}.txt").read_text().count("begins")


def test_every_config_is_run_with_every_seed_and_tabulated(main, root):
    assert main("rainbow-cartpole", "--seeds", "1", "2") == 0
    runs, rows, text = tables(root)
    assert [(run["row"], run["seed"]) for run in runs] == [
        (row, seed) for row in ("dqn-cartpole", "rainbow-cartpole") for seed in "12"
    ]
    assert [(row["row"], row["seeds"], row["final"], row["best"]) for row in rows] == [
        (row, "2 of 2", "0.5", "0.5") for row in ("dqn-cartpole", "rainbow-cartpole")
    ]
    # evaluations at or after 80 % of the steps: .4, .45, .5
    assert [float(row["late"]) for row in rows] == pytest.approx([0.45, 0.45])
    assert text.count("\n") == 4 and "0.45 0.45" in text


@pytest.mark.slow
def test_every_combination_of_varied_options_is_a_line(main, root):
    words = ("--steps", "1000")
    assert main("--vary", "agent.learning_rate=0.5,0.25", "agent.n_step=1,3", "--seeds", "1", "2", words=words) == 0
    runs, rows, _ = tables(root)
    assert [(row["row"], row["seeds"], row["final"]) for row in rows] == [
        (f"dqn-cartpole-learning_rate-{lr}-n_step-{n_step}", "2 of 2", lr) for lr in ("0.5", "0.25") for n_step in "13"
    ]
    assert (
        len(runs) == 8
        and "'--agent.n_step', '3'"
        in (root / "logs" / "sweep" / "dqn-cartpole-learning_rate-0.25-n_step-3-seed2.txt").read_text()
    )


def test_env_kwargs_vary_as_json():
    kwargs = '{"sutton_barto_reward": true}'
    varied = sweep.variants([f"env.kwargs={{}},{kwargs}"], [])
    assert [words for _, words in varied] == [["--env.kwargs", "{}"], ["--env.kwargs", kwargs]]


def test_complete_runs_are_repeated_only_for_more_steps(main, root, capsys):
    assert main("--seeds", "1", "2") == main("--seeds", "1", "2", "3") == 0
    assert [begun(root, seed) for seed in (1, 2, 3)] == [
        1,
        1,
        1,
    ] and "2 of 3 runs are complete already" in capsys.readouterr().out
    assert main("--seeds", "1", words=("--steps", "2000", "--agent.learning_rate", "0.5")) == 0
    assert "--resume" in (root / "logs" / "sweep" / "dqn-cartpole-seed1.txt").read_text()


def test_a_failing_run_is_reported_and_stops_no_other(main, root, capsys):
    assert main("--seeds", "1", "2", seed1="fails") == 1
    runs, rows, _ = tables(root)
    assert [run["exit_code"] for run in runs] == ["4", "0"] and rows[0]["incomplete"] == "seed 1: exit code 4"
    assert "seed1 ended with exit code 4: see" in capsys.readouterr().out
    assert main("--seeds", "1", "2") == 0  # resumed from its checkpoint
    assert [begun(root, seed) for seed in (1, 2)] == [2, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_every_run_and_the_sweep_resumes(main, root, number):
    def interrupt():
        while len(list(root.glob("logs/*/metrics.jsonl"))) < 1:
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(number)
    assert main("--seeds", "1", "2", seed1="waits") == 128 + number
    thread.join()
    assert signal.getsignal(number) is before
    runs, rows, _ = tables(root)
    assert [run["exit_code"] for run in runs] == ["130", ""] and "seed 2: killed or not begun" in rows[0]["incomplete"]
    assert main("--seeds", "1", "2") == 0
    lines = (root / "logs" / "sweep_dqn-cartpole-seed1" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 10 and [begun(root, seed) for seed in (1, 2)] == [2, 1]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two jobs need two cores")
def test_parallel_jobs_run_on_disjoint_cores(main, root):
    assert main("--seeds", "1", "2", "3", "--jobs", "2") == 0
    texts = [(root / "logs" / "sweep" / f"dqn-cartpole-seed{seed}.txt").read_text() for seed in (1, 2, 3)]
    cores = [set(map(int, re.search(r" \[([\d, ]+)\]$", text.strip())[1].split(","))) for text in texts]
    assert not cores[0] & cores[1] and cores[0] | cores[1] == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    "arguments, words, message",
    [
        (("--jobs", "1000"), WORDS, "--jobs 1000 must be 1 to"),
        ((), ("--agent.learning_rte", "1"), "dqn-cartpole: unknown option --agent.learning_rte"),
        (("no-such-row",), WORDS, "no-such-row"),
        (
            ("impala-pong-small",),
            ("--agent.learning_rate", "0.5"),
            "impala-pong-small: nothing says when its runs are done",
        ),
        (("--name", "a/b"), WORDS, "machine='a/b'"),
        (("--steps", "100"), WORDS, "unrecognized arguments: --steps 100; options of the runs stand behind --"),
        (("--seeds", "1", "-1"), WORDS, "--seeds: seed=-1 must be at least 0"),
        ((), ("--seed", "3"), "--seed is not yours to give here: give it before --"),
        ((), (*WORDS, "--root", "elsewhere"), "--root is not yours to give here: give it before --"),
        ((), (*WORDS, "--check"), "--check is not yours to give here"),
        ((), (*WORDS, "-h"), "--help is not yours to give here"),
        (
            ("--vary", "agent.learning_rate=0.5"),
            ("--steps", "1000"),
            "'agent.learning_rate=0.5': write name=value,value",
        ),
        (("--vary", "agent.learning_rate=0.5,0.5"), ("--steps", "1000"), "each once"),
        (("--vary", "agent.learning_rate=0.5,0.2"), WORDS, "agent.learning_rate is given twice"),
        (("--vary", "agent.n_step=1,2", "agent.n_step=3,4"), WORDS, "agent.n_step is given twice"),
        (("--vary", "agent.n_step=1,x"), WORDS, "agent.n_step='x'"),
        (
            ("--vary", "agent.n_step=1,1.0"),
            WORDS,
            "dqn-cartpole-n_step-1 and dqn-cartpole-n_step-1.0 would be the same",
        ),
        (("--vary", "agent.nsteps=1,2"), WORDS, "unknown option --agent.nsteps"),
        (
            ("--vary", "ray.address=host:1,host-1"),
            WORDS,
            "two different runs would both be named sweep_dqn-cartpole-address-host-1-seed1",
        ),
        (("--vary", f"agent.learning_rate=0.1,0.1{250 * '0'}"), ("--steps", "1000"), "shorten them"),
    ],
)
def test_mistakes_are_reported_before_a_run_starts(main, root, capsys, arguments, words, message):
    with pytest.raises(SystemExit) as ended:
        main(*arguments, words=words)
    assert ended.value.code == 2 and message in capsys.readouterr().err and not list(root.glob("logs/*"))


def test_a_root_that_cannot_be_a_folder_is_refused(main, root, capsys):
    (root / "file").touch()
    for path in (str(root / "file"), "/proc/x"):
        with pytest.raises(SystemExit) as ended:
            main("--root", path)
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and line.startswith(f"error: {path}/logs/sweep cannot be made (")


def test_a_tilde_in_root_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert sweep.parser().parse_args(["--configs", "dqn-cartpole", "--root=~/x"]).root == "/somewhere/x"


def test_a_run_requested_twice_is_run_once(main, root):
    number = str([row["name"] for row in CONFIGS].index("dqn-cartpole"))
    assert main("dqn-cartpole", number, "--seeds", "1", "1") == 0
    runs, rows, _ = tables(root)
    assert [run["row"] for run in runs] == ["dqn-cartpole"] and rows[0]["seeds"] == "1 of 1" and begun(root, 1) == 1


def test_values_that_are_no_file_names_are_sanitized(main, root):
    assert main("--vary", "env_type=gym,core.envs.gym:GymEnv", "--seeds", "1") == 0
    rows = ["dqn-cartpole-env_type-gym", "dqn-cartpole-env_type-core.envs.gym-GymEnv"]
    assert [row["row"] for row in tables(root)[1]] == rows
    assert "'--env_type', 'core.envs.gym:GymEnv'" in (root / "logs" / "sweep" / f"{rows[1]}-seed1.txt").read_text()


def test_runs_train_whatever_the_lines_of_run_say(root, monkeypatch):
    monkeypatch.setitem(RUN, "mode", 2)
    monkeypatch.setitem(RUN, "check", True)
    options = options_of("dqn-cartpole", WORDS, "local", str(root))
    again = command_line.read(subprocess_run.ChildRun(options, WORDS, root / "a.txt")._command(False))
    of_api = command_line.read([*_words("dqn-cartpole", {}), "--root", str(root)])
    assert [(each.mode, each.check) for each in (options, again, of_api)] == [(1, False)] * 3


def test_a_configs_resume_option_does_not_affect_a_sweep(main, root, monkeypatch):
    own = options_of("dqn-cartpole", WORDS, "local", str(root))
    own.log_folder.mkdir(parents=True)
    own.checkpoint_folder.mkdir(parents=True)
    saved_runs.save(own, {})
    monkeypatch.setitem(RUN, "resume", "newest")
    assert main("--seeds", "1") == 0
    assert (root / "logs" / "sweep_dqn-cartpole-seed1").exists() and not (own.log_folder / "metrics.jsonl").exists()
    assert "'--resume', 'none'" in (root / "logs" / "sweep" / "dqn-cartpole-seed1.txt").read_text()


def test_runs_started_from_weights_resume_from_checkpoints(root):
    words = [*WORDS, "--model_file", str(root / "weights.pth")]
    run = subprocess_run.ChildRun(
        dataclasses.replace(options_of("dqn-cartpole", words, "sweep", str(root)), timestamp="a"), words, root / "a.txt"
    )
    run.options.log_folder.mkdir(parents=True)
    saved_runs.save(run.options, {})
    options = command_line.read(run._command(True))
    assert (options.signature, options.resume, options.model_file) == ("sweep_a", "sweep_a", None)


def test_other_options_need_another_sweep_name(main, root, capsys):
    assert main("--seeds", "1") == 0
    other = ("--steps", "1000", "--agent.learning_rate", "0.25")
    with pytest.raises(SystemExit) as ended:
        main("--seeds", "1", words=other)
    assert ended.value.code == 2 and "agent.learning_rate=0.5 there and 0.25 here" in capsys.readouterr().err
    assert main("--seeds", "1", "--name", "lower", words=other) == 0 and tables(root, "lower")[1][0]["final"] == "0.25"


@pytest.mark.parametrize("config, refused", [("ppo-cartpole", True), ("dqn-cartpole", False)])
def test_fewer_steps_are_another_run_where_a_schedule_ends_with_it(root, config, refused):
    def planned(steps):
        words = ("--steps", str(steps))
        (options,) = subprocess_run.seeded(options_of(config, words, "sweep", str(root)), config, [1])
        return subprocess_run.ChildRun(options, words, root / "output.txt")

    earlier = planned(24_000)
    earlier.options.log_folder.mkdir(parents=True)
    saved_runs.save(earlier.options, {})
    earlier.check()
    planned(48_000).check()  # goes on
    if not refused:
        return planned(12_000).check()
    with pytest.raises(ConfigurationError, match="steps=24000 there and 12000 here"):
        planned(12_000).check()


def test_an_elastic_run_continues_with_the_learners_of_its_last_part(root):
    words = (
        *WORDS,
        *shlex.split(
            "--engine ray --num_learners 2 --num_actors 4 --supervisor.elastic 3 --seconds 60 --ray.address a:1"
        ),
    )
    run = subprocess_run.ChildRun(options_of("dqn-cartpole", words, "sweep", str(root)), words, root / "output.txt")
    run.options.log_folder.mkdir(parents=True)
    last = dataclasses.replace(run.options, num_learners=3, num_actors=6, seconds=20.0)
    saved_runs.save(last, {})
    run.check()
    saved_runs.end(last, 0)
    assert run.complete


@pytest.fixture
def made(root):
    """Return the run that `main` makes of seed 1, as its options and words say."""
    (options,) = subprocess_run.seeded(options_of("dqn-cartpole", WORDS, "sweep", str(root)), "dqn-cartpole", [1])
    return subprocess_run.ChildRun(options, WORDS, root / "output.txt")


def test_checkpoints_of_a_run_without_logs_are_refused(main, root, made, capsys):
    checkpoint = made.options.checkpoint_folder / "step_000000000100"
    checkpoint.mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        main("--seeds", "1")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(f"error: {checkpoint.parent} has checkpoints, but ")
    assert "remove that folder, or choose another" in line and not list(root.glob("logs/*"))


def test_steps_that_a_resume_superseded_are_not_tabulated(made):
    made.options.log_folder.mkdir(parents=True)
    lines = [{"step": step, "seconds": step / 100, "time": 0, "values": {}} for step in (100, 400, 300, 350)]
    (made.options.log_folder / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert (sweep.result(made).steps, sweep.result(made).minutes * 60) == (350, 3.5)


def test_steps_after_those_of_this_sweep_are_not_tabulated(made):
    made.options.log_folder.mkdir(parents=True)
    lines = [{"step": step, "seconds": step / 100, "time": 0, "values": {SCORE: 1.0}} for step in (500, 1000, 2000)]
    (made.options.log_folder / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert (sweep.result(made).steps, sweep.result(made).minutes * 60) == (1000, 10)


@pytest.mark.parametrize("exit_code, complete", [(0, True), (None, True), (4, False), (130, False)])
def test_an_evaluated_run_is_complete_unless_it_failed(made, exit_code, complete):
    made.options.log_folder.mkdir(parents=True)
    saved_runs.save(made.options, {})
    line = {"step": 1003, "time": 1.0, "seconds": 9.0, "values": {SCORE: 50.0}}
    (made.options.log_folder / METRICS).write_text(json.dumps(line) + "\n")
    if exit_code is not None:
        saved_runs.end(made.options, exit_code)
    assert made.complete == complete


def test_ray_runs_wait_for_room_and_resume_on_another_cluster(main, root):
    pytest.importorskip("ray")
    output = root / "logs" / "sweep" / "dqn-cartpole-seed1.txt"
    for steps, address in (("1000", "10.0.0.1:6379"), ("2000", "10.0.0.2:6379")):
        assert main("--seeds", "1", words=("--steps", steps, "--engine", "ray", "--ray.address", address)) == 0
    assert (
        output.read_text().count("'--ray.placement_timeout', 'none'")
        == output.read_text().count("'--engine', 'ray'")
        == 2
    )
    assert "'--resume'" in output.read_text()


def test_a_run_without_a_checkpoint_restarts_and_keeps_old_files(main, root):
    folder = root / "logs" / "sweep_dqn-cartpole-seed1"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 0, "seconds": 0, "values": {}}\n')
    model = root / "models" / "sweep_dqn-cartpole-seed1.pth"
    model.parent.mkdir(exist_ok=True)
    model.write_text("of the start before")
    assert main("--seeds", "1") == 0
    assert not model.exists() or model.read_bytes() != b"of the start before"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 10
    (kept,) = root.glob("logs/sweep/*begun-again*/metrics.jsonl")
    assert len(kept.read_text().splitlines()) == 1


def test_two_sweeps_of_one_name_do_not_run_at_once(main, root, capsys):
    with claimed(root / "logs" / "sweep"):
        with pytest.raises(SystemExit) as ended:
            main("--seeds", "1")
    assert ended.value.code == 2 and "worked on by another process" in capsys.readouterr().err


def test_a_run_receives_each_interrupt_once(root):
    class Process:
        told = 0

        def poll(self):
            return None

        def send_signal(self, number):
            assert number == signal.SIGINT
            self.told += 1

    run = subprocess_run.ChildRun(None, [], root / "output.txt", "row")
    run.interrupt()
    run.process = process = Process()
    for times, told in ((0, 0), (1, 1), (1, 1), (2, 2), (1, 2)):
        run.interrupt(times)
        assert process.told == told


def test_means_cover_the_evaluated_seeds():
    nan = float("nan")
    results = [
        Result("a", 1, True, 0, 100, 2.0, 5.0, 6.0, 4.0),
        Result("a", 2, False, 4, 50, 1.0, nan, nan, nan),
        Result("a", 3, True, 0, 120, 4.0, 7.0, 8.0, 6.0),
    ]
    (summary,) = summaries(results)
    assert (summary.seeds, summary.late, summary.late_of_each, summary.final, summary.best, summary.minutes) == (
        "2 of 3",
        5.0,
        "4.00 6.00",
        6.0,
        7.0,
        3.0,
    )
    assert summary.incomplete == "seed 2: exit code 4"


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_killed_sweep_of_the_program_is_resumed(root):
    command = [
        sys.executable,
        "-m",
        "utils.sweep",
        "--root",
        str(root),
        *shlex.split(
            "--configs dqn-cartpole --seeds 1 -- --engine inline --num_envs_per_actor 2 "
            "--evaluator.max_steps 30 --evaluator.episodes 1 --evaluator.steps 500 --logger.period 0.2 "
            "--rate_limiter.min_replay_size 200"
        ),
    ]
    metrics = root / "logs" / "sweep_dqn-cartpole-seed1" / "metrics.jsonl"
    process = subprocess.Popen([*command, "--steps", "1000000"], cwd=PROJECT, stdout=subprocess.DEVNULL)
    try:
        until(lambda: metrics.exists() and metrics.read_text().count("evaluator/") > 0, 100)
        family = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    assert family
    until(lambda: not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in family), 60)
    steps = last_step(metrics)
    again = subprocess.run(
        [*command, "--steps", str(steps + 600)], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )
    assert again.returncode == 0 and "1 of 1" in again.stdout, again.stderr
    output = (root / "logs" / "sweep" / "dqn-cartpole-seed1.txt").read_text()
    assert "continues with" in output and last_step(metrics) >= steps + 600


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def last_step(metrics):
    return max(int(step) for step in re.findall(r'^\{"step": (\d+)', metrics.read_text(), re.M))
