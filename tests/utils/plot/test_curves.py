"""Curves are read from metrics files that are whole, torn or resumed, and from CSV."""

import json
from pathlib import Path

import numpy as np
import pytest

from utils.errors import ConfigurationError
from utils.plot.curves import COLUMNS, KEPT, SCORE, Curve, grouped, late_score, on_grid, read, read_curve, write_csv

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def line(step, seconds, **values):
    return json.dumps({"step": step, "time": 1e9 + seconds, "seconds": seconds, "values": values}) + "\n"


def evaluation(step, seconds, mean, std=0.0):
    return line(step, seconds, **dict(zip(COLUMNS, (mean, std, mean))))


@pytest.fixture
def run(tmp_path):
    def write(name, lines, config=None, **settings):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(lines))
        if config:
            content = {"config": config, "options": settings, "file": {"game": settings.get("game")}}
            (folder / "run.json").write_text(json.dumps(content))
        return folder

    return write


def test_a_metric_is_read_with_its_steps_and_seconds(run):
    folder = run(
        "a", [line(5, 1.0, loss=3.0), evaluation(10, 2.0, 7.0), line(12, 3.0, loss=None), line(20, 4.0, loss=2.0)]
    )
    curve = read_curve(folder / "metrics.jsonl", "loss")
    assert [column.tolist() for column in curve] == [[5, 20], [1, 4], [3, 2]]
    assert read_curve(folder / "metrics.jsonl").values.tolist() == [7]
    assert len(read_curve(folder / "none" / "metrics.jsonl").steps) == 0


def test_a_half_written_line_is_skipped(run):
    folder = run("a", [evaluation(10, 1.0, 1.0), evaluation(20, 2.0, 2.0)[:-9]])
    assert read_curve(folder / "metrics.jsonl").steps.tolist() == [10]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\0\xff",
        b'{"step": 1, "val{"step": 15}',
        b"[1]",
        b'"values"',
        b'{"values": {}}',
        b'{"step": 15, "seconds": 1.5, "values": {"evaluator/episodic_return_mean": "7"}}',
        b'{"values": 3}',
        b"[" * 100_000,
    ],
)
def test_lines_that_no_run_writes_are_skipped_and_reported(run, capsys, garbage):
    path = run("a", []) / "metrics.jsonl"
    path.write_bytes(evaluation(10, 1.0, 1.0).encode() + garbage + b"\n" + evaluation(20, 2.0, 2.0).encode())
    assert read_curve(path).steps.tolist() == read([path.parent], [SCORE])[0].curves[SCORE].steps.tolist() == [10, 20]
    assert capsys.readouterr().err == f"warning: skipped 1 line of {path} that no run writes\n"


def test_steps_that_a_resumed_run_repeats_replace_the_lost_ones(run):
    folder = run(
        "a",
        [evaluation(step, step, step) for step in (10, 20, 30, 40)] + [evaluation(25, 50, 0.5), evaluation(45, 60, 9)],
    )
    curve = read_curve(folder / "metrics.jsonl")
    assert curve.steps.tolist() == [10, 20, 25, 45] and curve.values.tolist() == [10, 20, 0.5, 9]


def test_steps_that_a_resumed_run_gave_up_are_left_out(run):
    def period(step):
        return line(step, step, **{"global/agent_steps": step})

    evaluated = [
        [period(now), evaluation(now - 10, now, mean)]
        for now, mean in ((100, 1.0), (200, 2.0), (300, 30.0), (400, 40.0))
    ]
    continued = [period(205), evaluation(295, 500, 3.0), period(301)]  # from a checkpoint at 200; 290 is before 295
    curve = read_curve(run("a", [*(part for both in evaluated for part in both), *continued]) / "metrics.jsonl")
    assert curve.steps.tolist() == [90, 190, 295] and curve.values.tolist() == [1, 2, 3]


def test_an_evaluation_that_no_log_period_follows_is_given_up_too(run):
    lines = [line(step, step, **{"global/agent_steps": step}) for step in (100, 200, 200)]
    lines.insert(2, evaluation(280, 280, 99.0))  # the run was killed and continues from 200
    assert read_curve(run("a", [*lines, evaluation(310, 400, 2.0)]) / "metrics.jsonl").values.tolist() == [2.0]


def test_the_late_score_averages_the_last_fifth_of_the_steps():
    curve = Curve(np.array([100.0, 800, 1_010]), np.arange(3.0), np.array([50.0, 2, 4]))
    assert late_score(curve, 1_000) == 3  # 800 of 1,000 counts
    assert late_score(curve) == 4  # 800 of 1,010 does not
    assert late_score(Curve(*(column[:2] for column in curve)), 1_000) == 2  # the run so far
    assert late_score(curve, 700) == 2  # the first evaluation after the end counts, later ones do not
    assert np.isnan(late_score(Curve(*np.zeros((3, 0)))))


def test_curves_are_interpolated_where_all_of_them_exist():
    curves = [
        Curve(np.array(steps), np.zeros(len(steps)), np.array(values))
        for steps, values in (([0.0, 10, 30], [0.0, 1, 3]), ([5.0, 20], [4.0, 7]))
    ]
    grid, values = on_grid(curves, "steps")
    assert grid.tolist() == [5, 10, 20] and values.tolist() == [[0.5, 4], [1, 5], [2, 7]]


def test_long_curves_are_thinned_evenly():
    steps = np.arange(1_000.0)
    grid, values = on_grid([Curve(steps, steps, 2 * steps)], "seconds")
    assert len(grid) == 200 and (grid[0], grid[-1]) == (0, 999) and np.allclose(values[:, 0], 2 * grid)


def test_runs_are_grouped_by_config_option_or_method(run):
    folders = [
        run(name, [evaluation(1, 1, 1)], config, game=game, agent={"learning_rate": lr})
        for name, config, game, lr in (
            ("a", "dqn-pong-small", "pong", 1e-3),
            ("b", "dqn-boxing-small", "boxing", 1e-4),
            ("c", "dqn-pong-small", "pong", 1e-4),
        )
    ]
    runs = read(folders, [SCORE])
    named = {
        keys: {label: [run.name for run in group] for label, group in grouped(runs, keys).items()}
        for keys in (("config",), ("agent.learning_rate",), ("method",), ("game", "agent.learning_rate"))
    }
    assert named["config",] == {"dqn-pong-small": ["a", "c"], "dqn-boxing-small": ["b"]}
    assert named["agent.learning_rate",] == {"learning_rate 0.001": ["a"], "learning_rate 0.0001": ["b", "c"]}
    assert named["method",] == {"dqn-small": ["a", "b", "c"]}
    assert list(named["game", "agent.learning_rate"]) == [
        "pong, learning_rate 0.001",
        "boxing, learning_rate 0.0001",
        "pong, learning_rate 0.0001",
    ]
    with pytest.raises(ConfigurationError, match=r"no setting agent.learning_rte, did you mean agent.learning_rate"):
        grouped(runs, ["agent.learning_rte"])


def test_missing_metrics_and_folders_are_refused(run, tmp_path):
    folder = run("a", [line(1, 1, **{"learner/loss": 1.0})])
    with pytest.raises(ConfigurationError, match=r"no values of learner/los, did you mean learner/loss"):
        read([folder], ["learner/los"])
    with pytest.raises(ConfigurationError, match="no log folder"):
        read([tmp_path / "nowhere"], [SCORE])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read([tmp_path / "nowhere.csv"], [SCORE])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # the metrics.csv of a run
        ("time,step,name,value\n1.0,2,actor/fps,3.0\n", "holds no curves, it has no column run or seconds"),
        # a table, and an empty file
        ("row,seed,steps,late\ndqn-cartpole,1,100,0.5\n", "holds no curves"),
        ("", "holds no curves"),
        ("run,step,seconds,mean\na,10,1.0,2\na,x,1.0,2\n", "line 3: invalid literal"),
        ("run,step,seconds,mean\na,10\n", "line 2: "),
        ("run,step,seconds,mean\na,10,1.0,2,3\n", "line 2: "),
    ],
)
def test_a_csv_without_curves_is_refused(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read([tmp_path / "x.csv"], [SCORE])


def test_a_csv_round_trips_its_curves(run, tmp_path):
    folders = [
        run(f"x-seed{seed}", [evaluation(step, step / 2, step + seed, 0.5) for step in (10, 20)]) for seed in (1, 2)
    ]
    runs = read(folders, list(COLUMNS))
    write_csv(tmp_path / "x.csv", runs)
    assert (tmp_path / "x.csv").read_text().splitlines()[:2] == [
        "run,step,seconds,mean,std,median",
        "x-seed1,10,5.0,11.0,0.5,11.0",
    ]
    again = read([tmp_path / "x.csv"], list(COLUMNS))
    assert [run.name for run in again] == ["x-seed1", "x-seed2"] and list(grouped(again, ["config"])) == ["x"]
    for run_, copy in zip(runs, again):
        assert all(np.array_equal(a, b) for metric in COLUMNS for a, b in zip(run_.curves[metric], copy.curves[metric]))


def test_a_csv_keeps_the_rows_of_runs_that_are_named_after_their_time(run, tmp_path):
    lines = [evaluation(step, step / 2, step, 0.5) for step in (10, 20)]
    folders = [
        run(f"local_20260101-12000{seed}", lines, "dqn-pong", seed=seed, game="pong", env_type="atari")
        for seed in (1, 2)
    ]
    write_csv(tmp_path / "x.csv", read(folders, [SCORE]), KEPT)
    assert (tmp_path / "x.csv").read_text().splitlines()[:2] == [
        "run,config,seed,step,seconds,mean",
        "local_20260101-120001,dqn-pong,1,10,5.0,10.0",
    ]
    again = read([tmp_path / "x.csv"], [SCORE])
    assert list(again[0].curves) == [SCORE] and list(again[0].curves[SCORE].values) == [10, 20]
    assert {name: len(runs) for name, runs in grouped(again, ["config"]).items()} == {"dqn-pong": 2}
    write_csv(tmp_path / "y.csv", again, KEPT)
    assert (tmp_path / "y.csv").read_text() == (tmp_path / "x.csv").read_text()


def test_every_curve_of_the_results_can_be_read():
    files = [path for path in RESULTS.glob("*.csv") if path.read_text().startswith("run,step,seconds,mean")]
    assert len(files) >= 4 and all(len(run.curves[SCORE].steps) > 2 for run in read(files, [SCORE]))


def test_options_that_a_resume_has_changed_are_named(run, capsys):
    folders = [run(name, [evaluation(10, 1.0, 2.0)], "dqn", seed=1, **{"agent.gamma": 0.9}) for name in "abc"]
    for folder, gamma in zip(folders, (0.9, 0.8)):
        (folder / "options.json").write_text(json.dumps({"agent": {"gamma": gamma}, "seed": 1, "resume": "newest"}))
    assert [each.settings["agent.gamma"] for each in read(folders, [SCORE])] == [0.9] * 3
    assert capsys.readouterr().err == ("warning: b was resumed with other options, by which it is named: agent.gamma\n")


def test_a_run_whose_run_json_is_lost_has_its_first_options(run, capsys):
    folder = run("a-seed1", [evaluation(10, 1.0, 2.0)])
    first = {"config": "dqn-pong", "game": "pong", "seed": 1, "agent": {"gamma": 0.9}}
    (folder / "options.json").write_text(json.dumps(first))
    (found,) = read([folder], [SCORE])
    names = ("config", "method", "run", "seed", "agent.gamma")
    assert [found.settings[name] for name in names] == ["dqn-pong", "dqn", "a-seed1", 1, 0.9]
    assert capsys.readouterr().err == ""
