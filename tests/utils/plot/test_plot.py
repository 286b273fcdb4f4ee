"""Figures of synthetic metrics show known statistics, and the command writes them."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.errors import ConfigurationError
from utils.plot import __main__ as plot
from utils.plot.curves import SCORE, alike, grouped, read, usable, write_csv
from utils.plot.figures import draw_curves, draw_trials, save

# seed: score at 100, 200, 300 steps
VALUES = {1: [1.0, 5.0, 9.0], 2: [3.0, 3.0, 0.0], 3: [8.0, 1.0, 3.0], 4: [2.0, 7.0, 4.0]}
SECONDS = [60.0, 120.0, 180.0]
RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


@pytest.fixture
def run(tmp_path):
    pytest.importorskip("matplotlib")

    def write(name, values, config, **settings):
        folder = tmp_path / name
        folder.mkdir()
        file = {"game": settings.get("game", "").lower()}  # the config's game; the run may spell it differently
        (folder / "run.json").write_text(json.dumps({"config": config, "options": settings, "file": file}))
        (folder / "metrics.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "step": 100 * (number + 1),
                        "time": 0,
                        "seconds": SECONDS[number],
                        "values": {SCORE: value, "loss": value and -value},
                    }
                )
                + "\n"
                for number, value in enumerate(values)
            )
        )
        return folder

    return write


@pytest.fixture
def runs(run):
    return [run(f"local_{seed}", values, "dqn-cartpole") for seed, values in VALUES.items()]


def lines(panel):
    return {line.get_label(): line for line in panel.lines}


@pytest.mark.parametrize("centre, expected", [("mean", [3.5, 4.0, 4.0]), ("iqm", [2.5, 4.0, 3.5])])
def test_the_line_is_the_mean_or_iqm_of_the_seeds(runs, centre, expected):
    figure = draw_curves(grouped(read(runs, [SCORE]), ["config"]), ["steps", "time"], centre, "")
    by_steps, by_time = (lines(panel)["dqn-cartpole (4 runs)"] for panel in figure.axes)
    assert by_steps.get_xdata().tolist() == [100, 200, 300] and by_time.get_xdata().tolist() == [1, 2, 3]  # minutes
    assert by_steps.get_ydata().tolist() == by_time.get_ydata().tolist() == expected


def test_the_band_of_two_seeds_spans_both(runs):
    figure = draw_curves(grouped(read(runs[:2], [SCORE]), ["config"]), ["steps"], "mean", "")
    corners = figure.axes[0].collections[0].get_paths()[0].vertices
    assert {tuple(corner) for corner in corners.tolist()} == {
        (100, 1),
        (100, 3),
        (200, 3),
        (200, 5),
        (300, 0),
        (300, 9),
    }


def test_every_group_has_a_line_and_single_runs_no_band(run, runs):
    other = run("local_other", [0.0, 1.0, 2.0], "rainbow-cartpole")
    figure = draw_curves(grouped(read([*runs, other], [SCORE, "loss"]), ["config"]), ["steps"], "mean", "", each=True)
    scores, losses = figure.axes
    assert lines(scores)["rainbow-cartpole"].get_ydata().tolist() == [0, 1, 2]
    assert lines(losses)["rainbow-cartpole"].get_ydata().tolist() == [0, -1, -2]
    assert len(scores.collections) == 1 and len(scores.lines) == 2 + len(VALUES)


def test_more_than_three_panels_continue_in_the_next_row(runs):
    (one,) = read(runs[:1], [SCORE])
    five = one._replace(curves={str(number): one.curves[SCORE] for number in range(5)})
    figure = draw_curves({"dqn": [five]}, ["steps"], "mean", "")
    places = [panel.get_subplotspec() for panel in figure.axes]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_a_legend_of_many_groups_stands_outside_the_panel(run):
    many = [
        run(f"local_{number}", [1.0, 2.0, 3.0], f"replay-rule-number-{number}-minatar-breakout") for number in range(8)
    ]
    for count, inside in ((3, True), (8, False)):
        figure = draw_curves(grouped(read(many[:count], [SCORE]), ["config"]), ["steps"], "mean", "")
        figure.canvas.draw()
        (panel,) = figure.axes
        assert (panel.get_legend() is not None) is inside and len(figure.legends) == (not inside)
        for legend in figure.legends:
            box, picture = legend.get_window_extent(), figure.bbox
            assert not box.overlaps(panel.get_window_extent()) and len(legend.get_texts()) == count
            assert box.x0 >= 0 and box.x1 <= picture.x1 and box.y0 >= 0


def test_a_single_evaluation_is_drawn_as_a_point(run):
    folders = [run("local_1", [4.0], "dqn-cartpole"), run("local_2", [6.0], "dqn-cartpole")]
    figure = draw_curves(grouped(read(folders, [SCORE]), ["config"]), ["steps"], "mean", "", each=True)
    assert [(line.get_marker(), line.get_ydata().tolist()) for line in figure.axes[0].lines] == [
        ("o", [5]),
        ("o", [4]),
        ("o", [6]),
    ]


def test_files_of_the_same_runs_are_the_same(run, tmp_path):
    groups = grouped(read([run("local_1", [4.0, 5.0], "dqn-cartpole")], [SCORE]), ["config"])
    for file in save(draw_curves(groups, ["steps"], "mean", ""), tmp_path / "curve", ["png", "svg", "pdf"]):
        assert not any(word in file.read_bytes() for word in (b"CreationDate", b"<dc:date>"))


def test_runs_without_a_common_step_are_reported(run, capsys):
    folders = [run("local_1", [4.0], "dqn-cartpole"), run("local_2", [6.0], "dqn-cartpole")]
    metrics = folders[1] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 100', '"step": 110'))
    draw_curves(grouped(read(folders, [SCORE]), ["config"]), ["steps", "time"], "mean", "")
    assert (
        capsys.readouterr().err
        == "dqn-cartpole (2 runs): no curve against steps, because no point lies within all runs\n"
    )


@pytest.mark.parametrize("words", [(), ("--summary",)])
def test_a_metric_without_values_is_refused(run, tmp_path, capsys, words):
    folder = run("a", [None, None], "dqn-breakout", env_type="atari", game="breakout")
    with pytest.raises(SystemExit) as ended:
        plot.main([str(folder), "--output", str(tmp_path / "curves"), *words])
    assert ended.value.code == 2 and f"a has no values of {SCORE}" in capsys.readouterr().err


def test_folders_without_curves_are_skipped_and_reported(run, runs, tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "draw_curves", lambda groups, *given: drawn.append(groups) or draw_curves(groups, *given))
    (tmp_path / "sweep").mkdir()
    (tmp_path / "note.txt").write_text("no folder")
    run("new", [], "dqn-cartpole")
    run("empty", [None], "dqn-cartpole")
    run("foreign", [], "dqn-cartpole").joinpath("metrics.jsonl").write_text('{"loss": 1}\n')
    os.mkfifo(run("waits", [], "dqn-cartpole").joinpath("pipe"))
    (tmp_path / "waits" / "metrics.jsonl").unlink()
    (tmp_path / "waits" / "pipe").rename(tmp_path / "waits" / "metrics.jsonl")
    words = ["--output", str(tmp_path / "curves"), "--csv", "--metric", SCORE, "loss"]
    assert plot.main([*map(str, sorted(tmp_path.iterdir())), *words]) == 0
    assert [{run.name for run in group} for group in drawn[0].values()] == [{folder.name for folder in runs}]
    told = {line.partition(": ")[0]: line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()}
    assert told == {
        "warning": f"skipped 1 line of {tmp_path / 'foreign' / 'metrics.jsonl'} that no run writes",
        "passed over (no log folder of a run)": ", ".join(
            str(tmp_path / name) for name in ("note.txt", "sweep", "waits")
        ),
        f"passed over (no values of {SCORE})": "empty, foreign, new",
        "passed over (no values of loss)": "empty, foreign, new",
    }
    assert {line.split(",")[0] for line in (tmp_path / "curves.csv").read_text().splitlines()[1:]} == {
        folder.name for folder in runs
    }


def test_a_run_is_drawn_in_the_panels_of_the_metrics_that_it_has(run, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plot, "save", lambda figure, *_: drawn.append(figure) or [])
    drawn, other = [], run("other", [1.0, 2.0], "a-first")
    (other / "metrics.jsonl").write_text((other / "metrics.jsonl").read_text().replace("loss", "extra"))
    words = [*map(str, [*runs, other]), "--output", str(tmp_path / "curves"), "--metric", "extra", SCORE]
    assert plot.main(words) == 0
    extra, score = (lines(panel) for panel in drawn[0].axes)
    assert extra.keys() == {"dqn-cartpole", "a-first"} and score.keys() == {"dqn-cartpole (4 runs)", "a-first"}
    assert extra["a-first"].get_xdata().tolist() == [100, 200] and not len(extra["dqn-cartpole"].get_xdata())
    assert extra["a-first"].get_color() == score["a-first"].get_color()
    assert capsys.readouterr().err == f"passed over (no values of extra): {', '.join(each.name for each in runs)}\n"
    with pytest.raises(SystemExit):
        plot.main([*words, "lss"])
    refusal = capsys.readouterr().err
    assert "local_1 has no values of lss, did you mean loss?" in refusal and "local_2 has no values of lss" in refusal
    assert refusal.count("there are") == 1  # the metrics are listed once, not for every run


def test_if_nothing_can_be_drawn_each_reason_is_an_error(run, tmp_path, capsys):
    folders = [run(f"new{number}", [], "dqn-cartpole") for number in range(7)]
    with pytest.raises(SystemExit) as ended:
        plot.main([*map(str, folders), "--output", str(tmp_path / "curves")])
    errors = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(errors) == 6 and errors[-1] == "error: 2 more cannot be drawn either"
    with pytest.raises(SystemExit) as ended:
        plot.main([str(tmp_path / "nowhere"), str(folders[0])])
    assert ended.value.code == 2 and "nowhere does not exist" in capsys.readouterr().err


def test_a_config_on_two_games_gives_two_labelled_curves(run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "draw_curves", lambda *given: drawn.append(draw_curves(*given)) or drawn[-1])
    folders = [
        run(f"{game}-{seed}", [1.0, 2.0, 3.0], "dqn-cartpole", game=game, seed=seed, agent={"learning_rate": 1e-3})
        for game in ("CartPole-v1", "FlappyBird-v0")
        for seed in (1, 2)
    ]
    assert plot.main([*map(str, folders), "--output", str(tmp_path / "curves")]) == 0
    assert {label for label in lines(drawn[0].axes[0]) if not label.startswith("_")} == {
        "dqn-cartpole, game CartPole-v1 (2 runs)",
        "dqn-cartpole, game FlappyBird-v0 (2 runs)",
    }


def test_long_labels_are_wrapped_below_the_curves(run):
    settings = {
        "num_actors": 16,
        "agent": {"gamma": 0.99, "learning_rate": 1e-3, "n_step": 3},
        "memory": {"capacity": 50_000},
    }
    folders = [
        run("a", [1.0, 2.0], "dqn-cartpole", **settings),
        run(
            "b",
            [1.0, 2.0],
            "dqn-cartpole",
            **{
                **settings,
                "num_actors": 2,
                "agent": {"gamma": 0.9, "learning_rate": 1e-4, "n_step": 1},
                "memory": {"capacity": 7},
            },
        ),
    ]
    figure = draw_curves(alike(read(folders, [SCORE])), ["steps"], "mean", "")
    figure.canvas.draw()
    (panel,), (legend,) = figure.axes, figure.legends
    box, picture = legend.get_window_extent(), figure.bbox
    assert not box.overlaps(panel.get_window_extent()) and box.x0 >= 0 and box.x1 <= picture.x1 and box.y0 >= 0


def test_a_figure_of_one_run_mentions_no_band(runs):
    told = [
        draw_curves(grouped(read(runs[:count], [SCORE]), ["config"]), ["steps"], "mean", "").axes[0].get_title()
        for count in (1, 2)
    ]
    assert told == ["", "mean of the runs, 95 % bootstrap bands"]


@pytest.mark.parametrize(
    ("words", "title"), [((), ""), (("--title", "two rows"), "two rows"), (("--group", "method"), "dqn")]
)
def test_the_title_is_the_only_group_or_the_given_title(run, tmp_path, monkeypatch, words, title):
    drawn = []
    monkeypatch.setattr(plot, "draw_curves", lambda *given: drawn.append(given[3]) or draw_curves(*given))
    folders = [run(f"x-{game}", [1.0, 2.0, 3.0], f"dqn-{game}", game=game) for game in ("pong", "boxing")]
    assert plot.main([*map(str, folders), "--output", str(tmp_path / "curves"), *words]) == 0 and drawn == [title]


def test_a_title_with_dollars_is_no_mathematics(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plot.main([*map(str, runs), "--title", r"$\foo{$", "--formats", "png"]) == 0
    assert Path("curves.png").exists()


def test_the_command_writes_figures_and_a_csv(runs, tmp_path, capsys):
    words = [
        *map(str, runs),
        "--output",
        str(tmp_path / "docs" / "one.two"),
        "--csv",
        "--metric",
        SCORE,
        "loss",
        "--statistic",
        "iqm",
    ]
    assert plot.main(words) == 0
    written = [tmp_path / "docs" / f"one.two.{ending}" for ending in ("png", "svg", "csv")]
    assert capsys.readouterr().out.split() == list(map(str, written))
    png, svg, table = (path.read_bytes() for path in written)
    assert png.startswith(b"\x89PNG") and b"<svg" in svg and table.startswith(b"run,config,seed,step,seconds,mean,loss")
    assert plot.main(words) == 0 and written[1].read_bytes() == svg  # the same runs give the same file


def test_a_run_that_is_named_twice_is_drawn_once(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    twice = [
        runs[0],
        tmp_path / "." / runs[0].name,
        Path(runs[0].name),
        runs[1],
        tmp_path / ".." / tmp_path.name / "local_1",
    ]
    assert [run.name for run in usable(twice, [SCORE])] == ["local_1", "local_2"]
    assert [len(group) for group in alike(read(twice, [SCORE])).values()] == [5]


def test_runs_of_one_name_are_told_apart(run, tmp_path):
    pong = [RESULTS / f"{row}-pong-small.csv" for row in ("dqn", "impala")]
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
    folders = [run(f"{parent}/local_1", [1.0, 2.0], "dqn-cartpole") for parent in ("a", "b")]
    assert list(grouped(usable([*pong, *folders], [SCORE]), ["run"])) == [
        *(f"{row}-pong-small-seed {seed}" for row in ("dqn", "impala") for seed in (1, 2, 3)),
        "a/local_1",
        "b/local_1",
    ]
    assert plot.main([*map(str, pong), "--csv", "--output", str(tmp_path / "both"), "--formats", "png"]) == 0
    groups = alike(read([tmp_path / "both.csv"], [SCORE]))
    assert {row: len(same) for row, same in groups.items()} == {"dqn-pong-small": 3, "impala-pong-small": 3}


@pytest.mark.parametrize("group", [(), ("--group", "agent.n_step")])
def test_a_csv_keeps_apart_the_curves_that_were_drawn(run, tmp_path, group):
    """Both values of a sweep with --vary became one curve."""
    folders = [run(f"{n}-{seed}", [n], "a", **{"agent.n_step": n, "seed": seed}) for n in (1, 3) for seed in (1, 2)]
    words = ["--csv", "--output", str(tmp_path / "both"), "--formats", "png"]
    assert plot.main([*map(str, folders), *words, *group]) == 0
    assert [len(group) for group in alike(read([tmp_path / "both.csv"], [SCORE])).values()] == [2, 2]


def test_a_csv_of_means_alone_is_drawn_and_written_again(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    means = RESULTS / "pqn.csv"
    (tmp_path / "all.csv").write_text("run,step,seconds,mean,std,median\nall,1,1.0,2.0,3.0,4.0\nnone,1,1.0,,3.0,4.0\n")
    words = ["--csv", "--output", str(tmp_path / "again"), "--formats", "png"]
    assert plot.main([str(means), *words]) == 0
    values = [
        {run.name: run.curves[SCORE].values.tolist() for run in read([path], [SCORE])}
        for path in (means, tmp_path / "again.csv")
    ]
    assert values[0] == values[1]
    assert plot.main([str(means), str(tmp_path / "all.csv"), *words]) == 0
    assert "passed over (no values of evaluator/episodic_return_mean): none" in capsys.readouterr().err
    header, *lines = (tmp_path / "again.csv").read_text().splitlines()
    assert header == "run,config,seed,step,seconds,mean,std,median" and lines[-1] == "all,all,,1,1.0,2.0,3.0,4.0"
    assert {line.partition(",")[0] for line in lines} == {*values[0], "all"}


@pytest.mark.parametrize(
    "words, names",
    [
        (("x.png",), {"x.png"}),
        (("x.png", "--formats", "svg", "png"), {"x.png", "x.svg"}),
        (("x.csv", "--csv", "--metric", "loss", "--formats", "png"), {"x.png", "x.csv"}),
        (("x.two", "--formats", "png"), {"x.two.png"}),
        (("", "--formats", "png"), {"curves.png"}),
        ((".", "--formats", "png"), {"curves.png"}),
        (("new/", "--formats", "png"), {"new/curves.png"}),
        (("new/x",), {"new/x.png", "new/x.svg"}),
    ],
)
def test_files_have_the_name_of_the_output(runs, tmp_path, monkeypatch, words, names):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert plot.main([*map(str, runs[:1]), "--output", *words]) == 0
    assert {str(path.relative_to(Path.cwd())) for path in Path.cwd().rglob("*.*")} == names


@pytest.mark.parametrize(
    "output, reason",
    [
        ("/proc/x", "[Errno 2] No such file or directory: '/proc/x.png'"),
        ("note.txt/x", "[Errno 17] File exists: 'note.txt'"),
        ("x", "[Errno 21] Is a directory: 'x.png'"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused(runs, tmp_path, monkeypatch, capsys, output, reason):
    monkeypatch.chdir(tmp_path)
    Path("note.txt").touch()
    Path("x.png").mkdir()
    with pytest.raises(SystemExit) as ended:
        plot.main([*map(str, runs), "--output", output])
    assert (
        ended.value.code == 2 and capsys.readouterr().err == f"error: --output {output} cannot be written: {reason}\n"
    )


def test_a_summary_refuses_what_only_curves_have(runs, capsys):
    given = ["--metric", "loss", "--x", "time", "--statistic", "iqm", "--each", "--csv"]
    with pytest.raises(SystemExit) as ended:
        plot.main(["--summary", str(runs[0]), *given])
    assert ended.value.code == 2 and capsys.readouterr().err == (
        "error: --summary always draws scores over games: leave out --metric, --x, --statistic, --each, --csv\n"
    )


def test_the_summary_normalizes_by_human_scores(run, tmp_path, capsys):
    # human minus random: 30.5 - 1.7, 14.6 + 20.7
    breakout, pong = lambda score: 1.7 + score * 28.8, lambda score: -20.7 + score * 35.3
    scores = {"pong": (pong, (0.2, 0.4)), "breakout": (breakout, (1.5, 0.9))}
    folders = [
        run(f"{game}-{score}", [0.0, 0.0, scale(score)], f"dqn-{game}", env_type="atari", game=spelling, steps=300)
        for game, (scale, values) in scores.items()
        for score, spelling in zip(values, (game, game.title()))
    ]
    assert plot.main(["--summary", *map(str, folders), "--output", str(tmp_path / "s")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| dqn |"))
    cells = [cell.strip().split(" ")[0] for cell in line.strip("|").split("|")]
    assert cells == ["dqn", "2", "4", "0.650", "0.750", "0.750", "0.375"]  # IQM: 0.4, 0.9; gap: (0.7 + 0.05) / 2
    assert (tmp_path / "s.png").exists()


def test_the_summary_compares_methods_of_the_same_games(run, tmp_path, capsys):
    scores = {"dqn": (5.0, 9.0), "rainbow": (7.0, 8.0)}  # dqn is above rainbow in two of four pairs of runs
    folders = [
        run(f"{row}-{score}", [score], f"{row}-pong", env_type="atari", game="pong", steps=100)
        for row, values in scores.items()
        for score in values
    ]
    assert plot.main(["--summary", *map(str, folders), "--output", str(tmp_path / "s")]) == 0
    table = capsys.readouterr().out.split("\n\n")[1]
    assert table.splitlines()[:3:2] == ["| probability of improvement on | rainbow |", "| dqn | 0.500 [0.000, 1.000] |"]
    other = run("other", [1.0], "rainbow-breakout", env_type="atari", game="breakout", steps=100)
    assert plot.main(["--summary", *map(str, [*folders, other]), "--output", str(tmp_path / "s")]) == 0
    assert "improvement" not in capsys.readouterr().out


def test_a_game_without_human_scores_has_no_summary(run):
    folder = run("a", [1.0], "dqn-cartpole", env_type="gym", game="CartPole-v1")
    with pytest.raises(ConfigurationError, match="no human score is known for game=CartPole-v1"):
        plot.by_game(read([folder], [SCORE]))


@pytest.mark.parametrize("env_type", ["lost.module:Lost", "lost", "json:JSONDecoder"])
def test_a_run_of_a_lost_environment_class_has_no_summary(run, env_type):
    folder = run("a", [1.0], "dqn-cartpole", env_type=env_type, game="pong")
    with pytest.raises(ConfigurationError, match=f"^a: .*env_type.*{env_type}"):
        plot.by_game(read([folder], [SCORE]))


def test_without_matplotlib_the_pip_command_is_named(run, monkeypatch, capsys):
    folder = run("a", [1.0, 2.0], "dqn-cartpole")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        plot.main([str(folder)])
    assert ended.value.code == 2 and 'pip install -e ".[plots]"' in capsys.readouterr().err


@pytest.mark.parametrize("values", [(None, 4.0), (4.0, None), ("a", "b"), (1, 2.0)])
def test_trials_are_drawn_whatever_the_values_of_a_choice_are(values):
    pytest.importorskip("matplotlib")
    complete = SimpleNamespace(name="COMPLETE")
    trials = [SimpleNamespace(params={"x": value}, value=1.0, state=complete) for value in values]
    figure = draw_trials({"x": False}, trials, "trials")
    assert len(figure.axes[0].collections[0].get_offsets()) == 2


def test_a_csv_file_has_no_summary(tmp_path, run):
    data = tmp_path / "data.csv"
    write_csv(data, read([run("a", [1.0], "dqn-pong", env_type="atari", game="pong")], [SCORE]))
    with pytest.raises(ConfigurationError, match="nothing says of which game it is: a CSV"):
        plot.by_game(read([data], [SCORE]))


def test_the_summary_names_what_makes_runs_unequal(run, tmp_path, capsys):
    lengths = {
        "pong-1": ("pong", 300),
        "pong-2": ("pong", 200),
        "pong-3": ("pong", 900),
        "breakout-1": ("breakout", 300),
    }
    folders = [
        run(name, [1.0, 2.0, 3.0], f"dqn-{game}", env_type="atari", game=game, steps=steps)
        for name, (game, steps) in lengths.items()
    ]
    assert plot.main(["--summary", *map(str, folders), "--output", str(tmp_path / "s")]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "warning: scored by the last fifth of fewer steps than planned: pong-3",
        "warning: runs of dqn in one game have different numbers of steps",
        "warning: dqn has more runs of some games, which weigh more in its IQM",
    ]
    equal = [folders[0], folders[3]]
    assert plot.main(["--summary", *map(str, equal), "--output", str(tmp_path / "s")]) == 0
    assert not capsys.readouterr().err


def test_one_run_of_a_game_gives_no_interval(run, tmp_path, capsys):
    folders = [
        run(f"{row}-{game}", [score], f"{row}-{game}", env_type="atari", game=game, steps=100)
        for row, score in (("dqn", 1.0), ("rainbow", 2.0))
        for game in ("pong", "breakout")
    ]
    assert plot.main(["--summary", *map(str, folders), "--output", str(tmp_path / "s")]) == 0
    table = capsys.readouterr().out
    assert "[" not in table and "| dqn | 0.000 |" in table
