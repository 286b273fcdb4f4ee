"""A partial measurement keeps what others have measured, and checkouts are told apart."""

import csv
import json
import shutil
from types import SimpleNamespace

import pytest

from benchmarks import control_study, grace, onpolicy, resident, start
from benchmarks.training import RESULTS
from utils.errors import ConfigurationError
from utils.plot import curves


def call(monkeypatch, module, *arguments):
    monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
    return module.main()


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def log_folder(tmp_path):
    folder = tmp_path / "pong_seed1"
    folder.mkdir()
    points = [(0, 10, 900.04), (59, 20, 950.0), (61, 30, 1_000.0)]
    lines = [
        {"step": step, "time": 0, "seconds": seconds, "values": {"global/rss_mb": megabytes}}
        for seconds, step, megabytes in points
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_resident_memory_of_other_runs_is_kept(monkeypatch, tmp_path, log_folder):
    path = tmp_path / "resident-memory.csv"
    shutil.copy(RESULTS / "resident-memory.csv", path)
    before = rows(path)
    monkeypatch.setattr(resident, "RESULTS", tmp_path)
    monkeypatch.chdir(log_folder)
    call(monkeypatch, resident, ".", "--output", path)
    others = [row for row in before if row["run"] != "pong_seed1"]
    new = [("pong_seed1", "0", "10", "900.0"), ("pong_seed1", "1", "30", "1000.0")]
    assert len(others) < len(before) and rows(path) == [*others, *(dict(zip(before[0], row)) for row in new)]


@pytest.mark.parametrize("arguments", [("--help",), (), ("--outptu", "x")])
def test_wrong_arguments_leave_the_resident_memory_as_it_is(monkeypatch, tmp_path, arguments):
    monkeypatch.setattr(resident, "RESULTS", tmp_path)
    (tmp_path / "resident-memory.csv").write_text("measured")
    with pytest.raises(SystemExit):
        call(monkeypatch, resident, *arguments)
    assert (tmp_path / "resident-memory.csv").read_text() == "measured"


@pytest.mark.parametrize("seed", [1, 4])
def test_a_study_of_one_run_keeps_the_others(monkeypatch, tmp_path, seed):
    pytest.importorskip("matplotlib")
    for ending in (".csv", "-table.csv"):
        shutil.copy(RESULTS / f"control-pendulum{ending}", tmp_path)
    before = {run.name: run for run in curves.read([tmp_path / "control-pendulum.csv"], list(curves.COLUMNS))}
    table = rows(tmp_path / "control-pendulum-table.csv")
    new = "".join(f"x,{step},60,-100,1,-100\n" for step in range(7_500, 15_001, 750))
    (tmp_path / "new.csv").write_text(f"run,step,seconds,mean,std,median\n{new}")
    trained = SimpleNamespace(complete=True, options=SimpleNamespace(log_folder=tmp_path / "new.csv"))
    monkeypatch.setattr(control_study, "ours", lambda *arguments: trained)
    monkeypatch.setattr(control_study, "Runner", lambda *arguments: SimpleNamespace(run=lambda: 0))
    assert control_study.study("pendulum", ["ddpg"], [seed], 15_000, 1, tmp_path) == 0
    runs = {run.name: run for run in curves.read([tmp_path / "control-pendulum.csv"], list(curves.COLUMNS))}
    assert runs.keys() == before.keys() | {f"ddpg-seed{seed}"}
    assert runs[f"ddpg-seed{seed}"].curves[curves.SCORE].values.max() == -100
    kept = before.keys() - {f"ddpg-seed{seed}"}
    assert all(
        (runs[name].curves[curves.SCORE].values == before[name].curves[curves.SCORE].values).all() for name in kept
    )
    ours, *others = rows(tmp_path / "control-pendulum-table.csv")
    scores = {f"seed {number}": table[0].get(f"seed {number}") for number in range(1, 4)} | {f"seed {seed}": "-100.0"}
    assert ours["side"] == "ddpg" and scores.items() <= ours.items()
    assert [row | {"seed 4": ""} for row in others] == [row | {"seed 4": ""} for row in table[1:]]


def test_a_study_refuses_a_data_file_of_runs_of_another_length(tmp_path):
    shutil.copy(RESULTS / "control-pendulum.csv", tmp_path)
    with pytest.raises(ConfigurationError, match=r"control-pendulum.csv holds d4pg-seed1 of 15,005 steps: choose its"):
        control_study.study("pendulum", ["ddpg"], [1, 2, 3], 30_000, 1, tmp_path)


def test_one_part_of_the_on_policy_results_keeps_the_other(monkeypatch, tmp_path):
    path = tmp_path / "results" / "onpolicy.json"
    monkeypatch.setattr(onpolicy, "last_line", lambda *module, side, seconds: str(seconds))
    call(monkeypatch, onpolicy, "--seconds", 2, "--rounds", 1, "--output", path)
    call(monkeypatch, onpolicy, "--seconds", 3, "--rounds", 1, "--output", path, "--only", "speed")
    result = json.loads(path.read_text())
    assert result["agent steps per second"] == {side: [3.0] for side in onpolicy.SPEED}
    assert result["samples per second"] == {side: [2.0] for side in ("queue", *onpolicy.STRATEGIES)}


def test_starts_are_measured_in_two_checkouts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(start, "measure", lambda checkout: dict.fromkeys((*start.MEASURES, "load"), len(checkout.name)))
    words = ("--runs", 1, "--output", tmp_path / "start.json")
    call(monkeypatch, start, "/x/a", "/x/bbb", *words)
    assert "| ratio | 3.00 | 3.00 | 3.00 |" in capsys.readouterr().out
    assert {name: runs[0]["CPU"] for name, runs in json.loads((tmp_path / "start.json").read_text()).items()} == {
        "before": 1,
        "after": 3,
    }
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, start, "/x/a", "/x/bbb", "/x/cc", *words)
    assert ended.value.code == 2


def test_checkouts_of_one_folder_name_are_told_apart(monkeypatch, tmp_path):
    measured = iter(range(1, 100))
    monkeypatch.setattr(grace, "RESULTS", tmp_path)
    monkeypatch.setattr(grace, "speed", lambda *arguments: float(next(measured)))
    call(monkeypatch, grace, "/a/main", "/b/main", ".", "--rounds", 1)
    result = json.loads((tmp_path / "grace.json").read_text())
    assert {name: cases["alone"] for name, cases in result["results"].items()} == {
        "dqn-pong-small, /a/main": [1.0],
        "dqn-pong-small, /b/main": [2.0],
        "dqn-pong-small, .": [3.0],
    }
    assert result["command"] == "python -m benchmarks.grace /a/main /b/main . --rounds 1"
