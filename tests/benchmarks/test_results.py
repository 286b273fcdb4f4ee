"""The learning results can be repeated, and their data can be drawn again."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks import results
from benchmarks.results import PARTS, Part, games_table, hours, over_games, published
from utils.options import CONFIGS
from utils.plot import curves, figures
from utils.plot.curves import alike
from utils.sweep import subprocess_run

DATA = Path(__file__).resolve().parents[2] / "docs" / "results"
CURVES = sorted(path for path in DATA.glob("*.csv") if path.open().readline().startswith("run,step,seconds,"))


def test_every_part_consists_of_rows():
    names = {row["name"] for row in CONFIGS}
    assert {f"{row}{part.ending}" for part in PARTS.values() for row in part.rows} <= names


def test_hours_are_steps_by_rate(monkeypatch):
    monkeypatch.setattr(results, "RATES", {"dqn-minatar": 100, "dqn-cart": 50})
    part = Part("Two rows", ("dqn", "rainbow"), "-minatar-breakout", ("asterix", "breakout"), 3, ("--steps", "36000"))
    assert hours(part) == (12, 0.6, 6)  # 6 runs of 360 s; nobody has measured Rainbow
    assert hours(Part("The row's own steps", ("dqn-cartpole",))) == (3, 3 * 200_000 / 50 / 3600, 0)


def test_a_row_has_the_speed_of_its_own_pictures():
    def speed(row):
        return next(rate for beginning, rate in results.RATES.items() if row.startswith(beginning))

    assert speed("elite3-minatar-breakout") > 10 * speed("elite3-pong")
    assert all(speed(f"{name}-pong-small") != speed(f"{name}-pong") for name in ("dqn", "rainbow", "r2d2", "pqn"))


def test_scores_are_relative_to_the_best_row_of_each_game():
    part = Part("Four rows", ("a", "b", "c", "d"), games=("x", "y"))
    late = {"x-a": [1.0, 3.0], "x-b": [4.0, 4.0], "y-a": [10.0, 10.0], "y-b": [5.0, 5.0]}
    late |= {"x-c": [2.0, 2.0], "x-d": [2.0, 2.0], "y-d": [8.0]}  # one lacks a game, one a second seed
    scores = over_games(part, {label: np.array(values) for label, values in late.items()})
    assert [values.tolist() for values in scores["a"]] == [[0.25, 0.75], [1.0, 1.0]]
    assert [values.tolist() for values in scores["b"]] == [[1.0, 1.0], [0.5, 0.5]]
    assert list(scores) == ["a", "b"]


def test_the_table_of_games_has_the_span_of_the_seeds():
    part = Part("Three rows", ("a", "b", "c"), games=("x", "y"))
    late = {"x-a": np.array([1.0, 3.0, 2.0]), "y-a": np.array([10.0]), "y-b": np.array([5.0])}
    lines = games_table(part, late).splitlines()
    assert lines[0] == "| row | x | y |" and len(lines) == 4
    assert lines[2:] == ["| a | 2.0 (1.0 .. 3.0) | 10.0 |", "| b |  | 5.0 |"]


@pytest.mark.parametrize("path", CURVES, ids=lambda path: path.stem)
def test_the_data_of_every_curve_are_read_back(path):
    lines = list(csv.DictReader(path.open()))
    runs = curves.read([path], [curves.SCORE])
    assert len(runs) == len({line["run"] for line in lines})
    for run in runs:
        curve = run.curves[curves.SCORE]
        last = {float(line["step"]): float(line["mean"]) for line in lines if line["run"] == run.name}
        assert dict(zip(curve.steps, curve.values)) == last
        assert (np.diff(curve.steps) > 0).all()


def test_a_figure_is_drawn_again_from_its_data(tmp_path):
    runs = curves.read([DATA / "replay-study-breakout.csv"], [curves.SCORE])
    figure = figures.draw_curves(alike(runs), ["steps"], "mean", "again")
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert len(lines) == 7
    (label,) = [label for label in lines if "laser" in label]
    grid, values = curves.on_grid([run.curves[curves.SCORE] for run in runs if "laser" in run.name], "steps")
    np.testing.assert_array_equal(lines[label].get_xdata(), grid)
    np.testing.assert_allclose(lines[label].get_ydata(), values.mean(-1))
    (image,) = figures.save(figure, tmp_path / "again", ["png"])
    assert image.stat().st_size > 10_000


def test_published_curves_are_drawn_beside_those_of_a_part(monkeypatch, tmp_path):
    lines = [
        "part,run,game,step,mean,min,max",
        "tiny,Others,,500,1.0,0,2",
        "tiny,Others,,900,3.0,2,4",
        "pong,Others,,500,7,6,8",
        "games,Others,chess,500,7,,",
        "games,Others,go,500,8,,",
    ]
    (tmp_path / "published.csv").write_text("\n".join([*lines, ""]))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert [run.name for run in published("pong", 500)] == ["Others"] and not published("pong", 499)
    ((curve,),) = (run.curves.values() for run in published("tiny", 800))
    assert (curve.steps.tolist(), curve.values.tolist()) == ([500], [1.0])
    runs = curves.read([DATA / "pong.csv"], [curves.SCORE])
    panel = figures.draw_curves(alike(runs), ["steps"], "mean", "", dashed=published("tiny", 900)).axes[0]
    line = panel.get_lines()[-1]
    assert (line.get_label(), line.get_linestyle()) == ("Others", "--")
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([500, 900], [1.0, 3.0])
    legend = panel.get_legend() or panel.figure.legends[0]  # many curves have it below the picture
    assert "Others" in [text.get_text() for text in legend.get_texts()]
    own = [curves.Run("a", {}, dict.fromkeys(("go", "chess", "draughts"), curve))]
    drawn = figures.draw_curves({"a": own}, ["steps"], "mean", "", dashed=published("games", 900)).axes
    ends = {panel.get_ylabel(): [line.get_ydata()[-1] for line in panel.get_lines()[1:]] for panel in drawn}
    assert ends == {"go": [8], "chess": [7], "draughts": []}


def test_seeds_out_of_bounds_are_refused(monkeypatch, capsys, root):
    monkeypatch.setattr("sys.argv", ["results", "memory", "--seeds", "1", "-1", "--root", str(root)])
    with pytest.raises(SystemExit) as ended:
        results.main()
    assert ended.value.code == 2 and not list(root.iterdir())
    assert capsys.readouterr().err == "error: --seeds: seed=-1 must be at least 0\n"


def test_a_part_is_trained_once_and_written(monkeypatch, tmp_path, root):
    """A stand-in for main.py writes the files of each run."""
    monkeypatch.setattr(subprocess_run, "MAIN", Path(__file__).parents[1] / "utils" / "fake_main.py")
    part = Part("Two games", ("dqn",), "-cartpole", ("CartPole-v1", "MountainCar-v0"), 1, ("--steps", "2000"))
    monkeypatch.setattr(results, "PARTS", {"tiny": part})
    command = ["results", "tiny", "--root", str(root), "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    assert results.main() == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert {"tiny.csv", "tiny.png", "tiny-table.md", "tiny-summary.md"} <= written  # one seed has no interval to draw
    runs = curves.read([tmp_path / "tiny.csv"], [curves.SCORE])
    assert {run.name for run in runs} == {"CartPole-v1-dqn-seed1", "MountainCar-v0-dqn-seed1"}
    metrics = sorted(root.glob("logs/*/metrics.jsonl"))
    before = [path.stat().st_mtime_ns for path in metrics]
    assert results.main() == 0
    assert [path.stat().st_mtime_ns for path in metrics] == before and len(before) == 2

    monkeypatch.setattr(results, "PARTS", {"tiny": part, "other": part._replace(runs="tiny")})
    monkeypatch.setattr("sys.argv", ["results", "other", *command[2:]])
    assert results.main() == 0
    assert [path.stat().st_mtime_ns for path in root.glob("logs/*/metrics.jsonl")] == before
    assert (tmp_path / "other.csv").read_text() == (tmp_path / "tiny.csv").read_text()
    monkeypatch.setattr("sys.argv", command)

    (tmp_path / "tiny.csv").unlink()
    monkeypatch.setattr(results, "PARTS", {"tiny": part._replace(seeds=2)})
    monkeypatch.setattr(results.Runner, "run", lambda self: 130)  # interrupted before the second seed
    assert results.main() == 130
    assert len(curves.read([tmp_path / "tiny.csv"], [curves.SCORE])) == 2


@pytest.mark.parametrize("name", [name for name in PARTS if (DATA / f"{name}-table.md").exists()])
def test_tables_are_those_of_the_data(name, monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "save", lambda *arguments: [])
    shutil.copy(DATA / f"{name}.csv", tmp_path)
    monkeypatch.setattr("sys.argv", ["results", name, "--redraw", "--output", str(tmp_path)])
    assert results.main() == 0
    for table in tmp_path.glob("*.md"):
        assert table.read_text() == (DATA / table.name).read_text()
    assert (tmp_path / f"{name}-table.md").exists()


def test_an_evaluation_at_the_beginning_of_the_late_share_counts(monkeypatch, tmp_path):
    part = Part("One row", ("dqn",), "-cartpole", words=("--steps", "1000"))
    monkeypatch.setattr(results, "PARTS", {"tiny": part})
    monkeypatch.setattr(figures, "save", lambda *arguments: [])
    lines = ["dqn-seed1,790,1.0,9.0,0,9.0", "dqn-seed1,801,1.0,1.0,0,1.0", "dqn-seed1,1040,2.0,3.0,0,3.0"]
    others = ["former-seed1,500,1.0,7.0,0,7.0"]
    (tmp_path / "tiny.csv").write_text("\n".join(["run,step,seconds,mean,std,median", *lines, *others, ""]))
    results.write("tiny", [], tmp_path)
    assert "| dqn | 2.00 | 2.00 | 9.00 | 1,040 | 0.0 |" in (tmp_path / "tiny-table.md").read_text()
    assert {run.name for run in curves.read([tmp_path / "tiny.csv"], [curves.SCORE])} == {"dqn-seed1", "former-seed1"}


def test_a_part_with_a_target_tells_when_each_seed_reached_it(monkeypatch, tmp_path):
    part = Part("One row", ("dqn",), "-cartpole", words=("--steps", "1000", "--target_score", "18"))
    monkeypatch.setattr(results, "PARTS", {"tiny": part})
    monkeypatch.setattr(figures, "save", lambda *arguments: [])
    lines = [f"dqn-seed1,{step},60.0,{mean},0,0" for step, mean in ((100, 3.0), (200, 18.0), (300, 17.0))]
    lines += [f"dqn-seed2,{step},120.0,{mean},0,0" for step, mean in ((100, 3.0), (1000, 9.0))]
    (tmp_path / "tiny.csv").write_text("\n".join(["run,step,seconds,mean,std,median", *lines, ""]))
    results.write("tiny", [], tmp_path)
    (line,) = (tmp_path / "tiny-table.md").read_text().splitlines()[2:]
    assert line == "| dqn | 200; not reached | 17.00; 9.00 | 18.00; 9.00 | 300; 1,000 | 1.0; 2.0 |"


def test_games_that_no_row_has_yet_are_left_out(monkeypatch, tmp_path):
    """The first games of a long part are written as soon as they are complete."""
    part = Part("Two rows", ("dqn", "iqn"), "-cartpole", ("x", "y", "z"), words=("--steps", "1000"))
    monkeypatch.setattr(results, "PARTS", {"tiny": part})
    drawn = []
    monkeypatch.setattr(figures, "draw_curves", lambda groups, *rest, **others: drawn.append(groups))
    monkeypatch.setattr(figures, "save", lambda *arguments: [])
    data = [f"{label}-seed1,{step},1.0,9.0,0,9.0" for label in ("x-dqn", "y-dqn", "x-iqn") for step in (500, 1000)]
    (tmp_path / "tiny.csv").write_text("\n".join(["run,step,seconds,mean,std,median", *data, ""]))
    results.write("tiny", [], tmp_path)
    (groups,) = drawn  # of the games of the row that has most of them
    assert {row: list(run.curves) for row, (run,) in groups.items()} == {"dqn": ["x", "y"]}
    assert "| dqn | 9.0 | 9.0 |  |\n| iqn | 9.0 |  |  |" in (tmp_path / "tiny-summary.md").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("memory --rows r2d2-recall dqn-pong", "--rows dqn-pong: memory has the rows r2d2-recall, impala-lstm-recall"),
        ("minatar --games breakout pong", "--games pong: minatar has the games asterix, breakout, freeway"),
        ("memory --games pong", "--games pong: memory has no choice of games"),
    ],
)
def test_rows_and_games_of_other_parts_are_refused(words, sentence, monkeypatch, capsys, root):
    monkeypatch.setattr("sys.argv", ["results", *words.split(), "--root", str(root)])
    with pytest.raises(SystemExit) as ended:
        results.main()
    assert ended.value.code == 2 and not list(root.iterdir())
    assert sentence in capsys.readouterr().err


def test_a_choice_of_games_is_trained(monkeypatch, root):
    trained = list[str]()

    class Runner:
        def __init__(self, runs, jobs):
            trained.extend(run.row for run in runs)

        def run(self):
            return 0

    monkeypatch.setattr(results, "Runner", Runner)
    words = ["minatar", "--rows", "dqn", "--games", "freeway", "--seeds", "1", "2", "--root", str(root)]
    monkeypatch.setattr("sys.argv", ["results", *words])
    results.main()
    assert trained == ["freeway-dqn", "freeway-dqn"]
