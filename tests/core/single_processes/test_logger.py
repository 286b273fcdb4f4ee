import csv
import io
import json
import math
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console
from tensorboard.backend.event_processing import plugin_event_multiplexer
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.util import tensor_util

from core.common.system import rss_mb, versions
from core.common.terminal import Terminal
from core.metrics.file_writers import MetricsFiles, append_whole
from core.metrics.progress import Progress, QuietConsole
from core.runtime import run_state as run_state_module
from core.runtime.context import Context
from core.runtime.log_buffers import LogRings, Record
from core.runtime.options import LoggerParams
from core.runtime.parameter_store import ParameterStore
from core.runtime.run_state import RateLimiterParams, RunCounters, RunState
from core.single_processes import logger as logger_module
from core.single_processes.logger import aggregate, logger
from core.specs import ArraySpec, Discrete, EnvSpec
from tests.core.checkpoint.test_run_checkpoint import file_size_limit
from utils.plot.curves import read_curve

RUN = "a-row__known__package.module-Agent__seed7"
ROLES = (("logger", 0), ("actor", 0), ("actor", 1), ("learner", 0), ("evaluator", 0))


class Game:
    @staticmethod
    def human_normalized(game: str, score: float) -> float | None:
        return (score - 10) / 20 if game == "known" else None


class Memory:
    def size(self) -> int:
        return 77


def make_context(folder: Path, game: str = "known", period: float = 1e-9, every: int = 0, **limits: Any) -> Context:
    settings = {"steps": None, "updates": None, "seconds": None, "target_score": None, **limits}
    options = SimpleNamespace(
        logger=LoggerParams(period=period, steps=every),
        rate_limiter=RateLimiterParams(min_replay_size=10),
        log_folder=folder,
        env_class=Game,
        config="a row",
        seed=7,
        agent_type="package.module:Agent",
        to_dict=lambda: {"game": game, **limits},
        **settings,
    )
    spec = EnvSpec(game, ArraySpec((4,), "float32"), 0, Discrete(2), frames_per_step=4)
    return Context(
        options,
        spec,
        ROLES,
        {0: Memory()},
        ParameterStore(1),
        RunCounters(2, 1),
        RunState(len(ROLES)),
        LogRings(len(ROLES)),
    )


def play(context: Context) -> None:
    context.counters.count_agent_steps(0, 60, episodes=1)
    context.counters.count_agent_steps(1, 40, episodes=1)
    context.counters.count_update(0, 360)
    context.report("actor", 0, {"episodic_return": 10.0, "speed": 1.0})
    context.report("actor", 1, {"episodic_return": 40.0, "speed": 4.0})
    context.report("learner", 0, {"loss": 0.5})


def finish(context: Context, generator: Iterator[bool]) -> None:
    context.run_state.end_logger()
    assert list(generator) == []


def json_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    events = EventAccumulator(str(folder / RUN)).Reload()
    return {
        tag: [(event.step, event.value, event.wall_time) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def cells(line: dict) -> dict[str, str]:
    """Return the table's cells for a line of metrics.jsonl."""
    point = {name: str(line[name]) for name in ("step", "seconds", "time")}
    return {**point, **{name: "" if value is None else repr(value) for name, value in line["values"].items()}}


def test_episode_statistics_equal_their_definitions() -> None:
    returns = [1.0, 5.0, 30.0, -4.0]
    records = [
        Record("actor/episodic_return", value, 10 + number, 100.0 + number) for number, value in enumerate(returns)
    ]
    records += [Record("learner/loss", 2.0, 3, 50.0), Record("learner/loss", 4.0, 7, 51.0)]
    found = {record.name: record for record in aggregate(records)}
    assert found["learner/loss"] == Record("learner/loss", 3.0, 7, 51.0)
    assert found["actor/episodic_return_mean"] == Record(
        "actor/episodic_return_mean", statistics.fmean(returns), 13, 103.0
    )
    assert found["actor/episodic_return_std"].value == pytest.approx(statistics.pstdev(returns))
    assert found["actor/episodic_return_median"].value == statistics.median(returns)
    assert len(found) == 4


@pytest.mark.parametrize("name", ["checkpoint_errors", "nonfinite_updates", "queue_dropped", "reservoir_inserted_2"])
def test_a_total_is_the_last_one_of_its_period(name: str) -> None:
    records = [Record(f"learner/{name}", value, 10, 100.0) for value in (1.0, 2.0, 9.0)]
    assert aggregate(records) == [Record(f"learner/{name}", 9.0, 10, 100.0)]


def test_an_aggregated_value_stands_at_the_last_report_of_all_processes() -> None:
    records = [Record("actor/speed", 1.0, 9_000, 103.0), Record("actor/speed", 3.0, 100, 101.0)]
    assert aggregate(records) == [Record("actor/speed", 2.0, 9_000, 103.0)]


def test_a_period_is_equal_in_jsonl_csv_and_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    context, before = make_context(tmp_path / "logs"), time.time()
    generator = logger(context, 0)
    next(generator)
    play(context)
    context.report("evaluator", 0, {"episodic_return_mean": 30.0, "episodic_return_std": 2.0})
    context.counters.record_evaluation(30.0)
    assert next(generator) is True
    finish(context, generator)

    _, evaluation, period, *_ = json_lines(tmp_path / "logs")
    values = period["values"]
    assert (period["step"], evaluation["step"]) == (100, 100)
    assert (values["actor/episodic_return_mean"], values["actor/human_normalized"], values["actor/speed"]) == (
        25.0,
        0.75,
        2.5,
    )
    assert values["learner/loss"] == 0.5
    assert (
        values["global/agent_steps"],
        values["global/frames"],
        values["global/episodes"],
        values["global/updates"],
    ) == (100, 400, 2, 1)
    assert (values["global/samples_per_insert"], values["global/replay_steps"]) == (
        4.0,
        77,
    )  # 360 samples over 90 steps
    assert values["global/fps"] == pytest.approx(4 * values["global/agent_steps_per_second"])
    assert evaluation["values"] == {
        "evaluator/episodic_return_mean": 30.0,
        "evaluator/episodic_return_std": 2.0,
        "evaluator/human_normalized": 1.0,
    }

    rows = [row for row in table(tmp_path / "logs") if row["step"] == "100"]
    curves = scalars(tmp_path / "logs")
    for name, value in {**values, **evaluation["values"]}.items():
        assert value in [float(row[name]) for row in rows if row[name]]
        assert any(step == 100 and found == pytest.approx(value, rel=1e-6) for step, found, _ in curves[name])
    assert all(before - 1 <= moment <= time.time() + 1 for curve in curves.values() for *_, moment in curve)
    printed = capsys.readouterr().out
    assert "evaluation at step 100: mean return 30.00" in printed


def test_nothing_is_written_before_the_period_is_over(tmp_path: Path) -> None:
    context = make_context(tmp_path, period=1000.0)
    generator = logger(context, 0)
    play(context)
    assert [next(generator) for _ in range(50)] == [False] * 50
    assert not (tmp_path / "metrics.jsonl").exists()
    generator.close()  # type: ignore[attr-defined]
    assert json_lines(tmp_path)[0]["values"]["learner/loss"] == 0.5


def test_a_stopped_run_is_logged_until_all_processes_reported(tmp_path: Path) -> None:
    context = make_context(tmp_path, period=1000.0)
    generator = logger(context, 0)
    next(generator)
    context.run_state.stop()
    assert next(generator) is False
    context.report("learner", 0, {"last_word": 1.0})
    finish(context, generator)
    assert json_lines(tmp_path)[-1]["values"]["learner/last_word"] == 1.0


def test_a_restarted_logger_appends_and_repeats_nothing(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    first = logger(context, 0)
    next(first)
    play(context)
    next(first)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "torn')  # the logger was killed while it wrote
    context.counters.count_agent_steps(0, 100)
    context.report("learner", 0, {"loss": 0.25})
    received: Any = multiprocessing.get_context("fork").Process(target=finish, args=(context, logger(context, 0)))
    received.start()
    received.join()
    assert received.exitcode == 0
    lines = json_lines(tmp_path)
    assert [line["values"]["learner/loss"] for line in lines if "learner/loss" in line["values"]] == [0.5, 0.25]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert [{name: cell for name, cell in row.items() if cell} for row in table(tmp_path)] == [
        cells(line) for line in lines
    ]


@pytest.mark.parametrize("period", [1e-9, 1e9])
def test_lines_are_written_every_logger_steps_without_loss(tmp_path: Path, period: float) -> None:
    context = make_context(tmp_path, period=period, every=100)
    generator = logger(context, 0)
    for number in range(25):
        context.counters.count_agent_steps(0, 10)
        context.report("actor", 0, {"episodic_return": float(number)})
        for _ in range(300):
            context.report("learner", 0, {"loss": 1.0})
        next(generator)
    finish(context, generator)
    lines = [line for line in json_lines(tmp_path) if "global/agent_steps" in line["values"]]
    assert [line["step"] for line in lines] == [100, 200, 250]
    assert [line["values"]["actor/episodic_return_mean"] for line in lines] == [4.5, 14.5, 22.0]
    assert lines[-1]["values"]["global/dropped_log_records"] == 0


def test_an_evaluation_is_written_at_once(tmp_path: Path) -> None:
    context = make_context(tmp_path, every=1_000)
    generator = logger(context, 0)
    next(generator)
    context.counters.count_agent_steps(0, 70)
    for step, score in ((20, 30.0), (50, 50.0)):
        context.logs.write(ROLES.index(("evaluator", 0)), {"evaluator/episodic_return_mean": score}, step)
    assert next(generator) is True
    curve = read_curve(tmp_path / "metrics.jsonl", "evaluator/episodic_return_mean")
    assert (curve.steps.tolist(), curve.values.tolist()) == ([20, 50], [30.0, 50.0])
    finish(context, generator)
    assert [step for step, *_ in scalars(tmp_path)["evaluator/human_normalized"]] == [20, 50]


def test_records_of_a_fast_process_are_not_lost_between_two_periods(tmp_path: Path) -> None:
    context = make_context(tmp_path, period=1e9)
    generator = logger(context, 0)
    for number in range(50):
        for _ in range(200):
            context.report("actor", 0, {"episodic_return": float(number)})
        next(generator)
    finish(context, generator)
    values = json_lines(tmp_path)[-1]["values"]
    assert (values["actor/episodic_return_mean"], values["global/dropped_log_records"]) == (24.5, 0)


@pytest.mark.parametrize("limit", [None, 150])
def test_a_run_that_ended_has_one_line_with_its_last_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    now = [0.0]
    for module in (logger_module, run_state_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    context = make_context(tmp_path, period=2.0, steps=limit)
    generator = logger(context, 0)
    next(generator)
    for steps, seconds in ((100, 2.0), (50, 1.0)):
        context.counters.count_agent_steps(0, steps)
        now[0] += seconds
        next(generator)
    if limit is None:
        context.run_state.stop()
    for _ in range(3):  # the last evaluation takes two periods
        next(generator)
        now[0] += 2.0
    finish(context, generator)
    rates = [(line["step"], line["values"]["global/agent_steps_per_second"]) for line in json_lines(tmp_path)]
    assert rates == [(100, 50.0), (150, 50.0)]


def test_a_resumed_run_continues_its_curves_and_its_clock(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    generator = logger(context, 0)
    for _ in range(3):
        context.counters.count_agent_steps(0, 100)
        context.report("learner", 0, {"loss": 1.0})
        next(generator)
    finish(context, generator)
    last = json_lines(tmp_path)[-1]["seconds"]
    (tmp_path / "metrics.jsonl").open("a").write(json.dumps({"seconds": last + 500, "time": 0.0}) + "\n")
    time.sleep(0.01)

    resumed = make_context(tmp_path, steps=1_000)  # its checkpoint was at step 200: step 300 is lost
    resumed.counters.count_agent_steps(0, 200)
    generator = logger(resumed, 0)
    next(generator)
    resumed.counters.count_agent_steps(0, 50)
    resumed.report("learner", 0, {"loss": 2.0})
    next(generator)
    finish(resumed, generator)
    assert json_lines(tmp_path)[-1]["seconds"] > last + 500
    losses = [(step, value) for step, value, _ in scalars(tmp_path)["learner/loss"]]
    assert losses == [(100, 1.0), (200, 1.0), (250, 2.0)]
    assert json.loads((tmp_path / "options.json").read_text()) == {"game": "known"}
    assert json.loads((tmp_path / "options_step_200.json").read_text()) == {"game": "known", "steps": 1_000}


def test_a_run_resumed_from_its_beginning_hides_the_curves_of_before(tmp_path: Path) -> None:
    for steps in (500, 400):
        context = make_context(tmp_path)
        generator = logger(context, 0)
        next(generator)
        context.counters.count_agent_steps(0, steps)
        context.report("learner", 0, {"loss": 1.0})
        next(generator)
        finish(context, generator)
    assert [step for step, *_ in scalars(tmp_path)["learner/loss"]] == [400]


def test_a_resumed_part_begins_with_a_line_at_its_steps(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    generator = logger(context, 0)
    for _ in range(3):
        context.counters.count_agent_steps(0, 100)
        next(generator)
    finish(context, generator)
    begun = len(json_lines(tmp_path))

    resumed = make_context(tmp_path, period=1e9)
    resumed.counters.count_agent_steps(0, 200)
    generator = logger(resumed, 0)
    next(generator)
    (line,) = json_lines(tmp_path)[begun:]
    assert line["step"] == line["values"]["global/agent_steps"] == 200
    assert read_curve(tmp_path / "metrics.jsonl", "global/fps").steps.tolist() == [100, 200]


def test_the_time_without_a_logger_counts_within_one_start(tmp_path: Path) -> None:
    clock = [1_000.0]

    def write_for_ten_seconds(began: float) -> float:
        files = MetricsFiles(tmp_path, 0, now=lambda: clock[0], began=began)
        clock[0] += 10.0
        files.write([Record("global/agent_steps", 0.0, 0, clock[0])], 0)
        return json_lines(tmp_path)[-1]["seconds"]

    assert write_for_ten_seconds(began=995.0) == 15.0  # the processes of the run took five seconds to start
    clock[0] += 3.0  # until its successor
    assert write_for_ten_seconds(began=995.0) == 28.0
    clock[0] += 3_600.0  # until the run is resumed
    assert write_for_ten_seconds(began=clock[0] - 5.0) == 43.0


def test_rates_of_a_line_are_those_since_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    for module in (logger_module, run_state_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    context = make_context(tmp_path, period=2.0, every=2_000)
    generator = logger(context, 0)
    next(generator)
    for _ in range(22):
        now[0] += 0.5
        context.counters.count_agent_steps(0, 50 if now[0] <= 10 else 500)
        next(generator)
    (line,) = json_lines(tmp_path)
    assert line["step"] == 2_000 and line["values"]["global/agent_steps_per_second"] == pytest.approx(2_000 / 11)


def test_trackers_share_the_time_that_they_have_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Hanging:
        errors = 0

        def write(self, records: list[Record]) -> None:
            pass

        def end(self) -> None:
            calls.append("end")

        def join(self, timeout: float) -> None:
            calls.append(f"join {timeout:.1f}")
            time.sleep(timeout)

    monkeypatch.setattr(logger_module, "make_tracker_threads", lambda options: [Hanging(), Hanging()])
    context = make_context(tmp_path)
    context.options.logger = LoggerParams(tracker_timeout=0.3)
    finish(context, logger(context, 0))
    assert calls == ["end", "end", "join 0.3", "join 0.0"]


def test_heartbeats_are_sent_while_a_long_table_is_rewritten(tmp_path: Path) -> None:
    beats: list[int] = []
    for _ in range(2):
        files = MetricsFiles(tmp_path, 0, heartbeat=lambda: beats.append(len(beats)))
        for number in range(20):
            files.write([Record("learner/loss", 1.0, number, 0.0)], number)
    assert len(beats) >= 2 * 20


def test_the_clock_continues_from_the_last_period(tmp_path: Path) -> None:
    """A line of an evaluation can be older than the period that it is written with."""
    context = make_context(tmp_path, period=1e9)
    generator = logger(context, 0)
    next(generator)
    context.report("evaluator", 0, {"episodic_return_mean": 30.0})
    context.report("learner", 0, {"loss": 1.0})
    context.counters.count_agent_steps(0, 100)
    time.sleep(0.2)
    finish(context, generator)
    evaluation, period = json_lines(tmp_path)
    assert (evaluation["step"], period["step"]) == (0, 100)
    assert period["seconds"] > evaluation["seconds"] + 0.1
    assert MetricsFiles(tmp_path, 100).seconds >= period["seconds"]


def test_a_line_stands_at_the_steps_that_it_counts(tmp_path: Path) -> None:
    context = make_context(tmp_path)

    def act_meanwhile() -> float:
        context.counters.count_agent_steps(0, 10)
        return 8.0

    context.rate_limiter.ratio = act_meanwhile  # type: ignore[method-assign]
    generator = logger(context, 0)
    next(generator)
    finish(context, generator)
    assert [(line["step"], line["values"]["global/agent_steps"]) for line in json_lines(tmp_path)] == [(0, 0), (10, 10)]


def test_a_full_disk_is_counted_and_leaves_whole_lines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    context = make_context(tmp_path)
    generator = logger(context, 0)
    play(context)
    next(generator)
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with file_size_limit(10):
        for number in range(3):
            play(context)
            context.report("learner", 0, {f"new {number}": 1.0})  # makes the table be written anew
            assert next(generator) is True
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == whole
    play(context)
    next(generator)
    finish(context, generator)
    lines = json_lines(tmp_path)
    assert lines[-1]["values"]["global/metric_write_errors"] == 9
    assert len(scalars(tmp_path)["learner/loss"]) == 2
    assert capsys.readouterr().err.count("metrics cannot be written") == 1


def test_an_incomplete_write_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    append_whole(path, b"0123456789")
    with file_size_limit(15), pytest.raises(OSError):
        append_whole(path, b"0123456789")
    assert path.read_bytes() == b"0123456789"


def test_the_table_has_a_column_for_each_metric(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("time,step,name,value\n1.0,2,actor/fps,3.0\n")  # of an older version
    context = make_context(tmp_path)
    generator = logger(context, 0)
    for number in range(4):
        context.counters.count_agent_steps(0, 100)
        context.report(
            "learner", 0, {"loss": 0.5, **({"late, and odd": math.nan if number == 2 else 2.5} if number > 1 else {})}
        )
        context.report("evaluator", 0, {"episodic_return_mean": float(number)})
        next(generator)
        rows, lines = table(tmp_path), json_lines(tmp_path)
        assert len(lines) == len(rows) == 2 * (number + 1)
        for row, line in zip(rows, lines):
            assert {name: row[name] for name in cells(line)} == cells(line)
            assert not any(cell for name, cell in row.items() if name not in cells(line))
        assert [*rows[0]][:3] == ["step", "seconds", "time"] and ("learner/late, and odd" in rows[0]) == (number > 1)
    appended = (tmp_path / "metrics.csv").stat().st_ino
    next(generator)
    assert (tmp_path / "metrics.csv").stat().st_ino == appended  # no new column: a line was appended
    (tmp_path / "metrics.csv").unlink()
    finish(context, generator)
    assert len(table(tmp_path)) == len(json_lines(tmp_path))
    assert not list(tmp_path.glob(".temporary_*"))


def test_tensorboard_tells_runs_apart_by_name_and_options(tmp_path: Path) -> None:
    signatures = {"local_1": 1e-3, "local_2": 2e-3}
    for signature, learning_rate in signatures.items():
        for life in range(2):  # the second time as a resumed run, with another seed
            context = make_context(
                tmp_path / signature, agent={"learning_rate": learning_rate, "sizes": [3, 4], "none": None, "on": True}
            )
            context.options.seed += life
            context.counters.count_agent_steps(0, 100 * life)
            generator = logger(context, 0)
            context.report("evaluator", 0, {"episodic_return_mean": 1e4 * learning_rate + life})
            next(generator)
            generator.close()  # type: ignore[attr-defined]
    names = {f"{signature}/{RUN}": signature for signature in signatures}
    multiplexer = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    assert multiplexer.Runs().keys() == names.keys()
    for name, signature in names.items():
        texts = [str(tensor_util.make_ndarray(event.tensor_proto)) for event in multiplexer.Tensors(name, "settings")]
        assert len(texts) == 2 and all(f"| agent.learning_rate | `{signatures[signature]}` |" in text for text in texts)
    tb_context = base_plugin.TBContext(
        data_provider=MultiplexerDataProvider(multiplexer, str(tmp_path)), logdir=str(tmp_path)
    )
    page = backend_context.Context(tb_context)
    columns = [api_pb2.ColParams(metric={"group": "", "tag": "evaluator/episodic_return_mean"})]
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=10, col_params=columns, allowed_statuses=api_pb2.Status.values()
    )
    ask = RequestContext()
    experiment = page.experiment_from_metadata(ask, "", True, page.hparams_metadata(ask, ""), [])
    assert {"agent.learning_rate", "agent.sizes", "game"} <= {
        found.name for found in experiment.hparam_infos if found.name
    }
    assert {found.name for found in experiment.hparam_infos if found.differs} == {"agent.learning_rate"}
    groups = list_session_groups.Handler(ask, page, "", request).run().session_groups
    assert {group.name for group in groups} == signatures.keys()
    for group in groups:
        values, session = dict(group.hparams.items()), group.sessions[0]
        assert (
            values["agent.learning_rate"].number_value == signatures[group.name]
            and values["agent.on"].bool_value is True
        )
        assert (values["agent.none"].string_value, values["agent.sizes"].string_value) == ("None", "[3, 4]")
        scores = [found.value for found in session.metric_values if found.name.tag == "evaluator/episodic_return_mean"]
        assert scores == pytest.approx([1e4 * signatures[group.name] + 1])


def test_non_finite_values_leave_the_files_readable(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    generator = logger(context, 0)
    context.report("learner", 0, {"loss": math.nan, "q": math.inf})
    next(generator)
    finish(context, generator)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json_lines(tmp_path)[0]["values"]["learner/loss"] is None
    assert math.isnan(scalars(tmp_path)["learner/loss"][0][1])


def test_dropped_records_are_counted(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    generator = logger(context, 0)
    for _ in range(5_000):
        context.report("learner", 0, {"loss": 1.0})
    next(generator)
    finish(context, generator)
    assert json_lines(tmp_path)[0]["values"]["global/dropped_log_records"] == 5_000 - 4_096


def test_versions_are_saved_with_the_run(tmp_path: Path) -> None:
    found = versions()
    assert {"python", "torch", "numpy", "gymnasium", "ale-py", "commit", "platform", "cpu_count"} <= found.keys()
    generator = logger(make_context(tmp_path / "ünicode folder"), 0)
    next(generator)
    assert json.loads((tmp_path / "ünicode folder" / "versions.json").read_text()) == found


def hold(megabytes: int, ready: Any, done: Any) -> None:
    data = bytearray(os.urandom(1)) * (megabytes * 1_000_000)
    ready.set()
    done.wait()
    del data


@pytest.mark.timeout(60)
def test_rss_includes_child_processes() -> None:
    processes = multiprocessing.get_context("fork")
    ready, done, before = processes.Event(), processes.Event(), rss_mb()
    child = processes.Process(target=hold, args=(200, ready, done))
    child.start()
    ready.wait()
    after = rss_mb()
    done.set()
    child.join()
    assert after - before >= 200
    assert rss_mb() - before < 100


# progress ---------------------------------------------------------------------------------------------------------
COUNTS = {"global/agent_steps": 1_000.0, "global/updates": 50.0, "global/samples_per_insert": 8.0}
VALUES = {**COUNTS, "global/agent_steps_per_second": 100.0, "global/updates_per_second": 5.0}


def shown(
    terminal: bool, scores: tuple[float, float] | None = None, rounds: int = 1, width: int = 200, **limits: Any
) -> str:
    output = io.StringIO()
    options = SimpleNamespace(**{"steps": None, "updates": None, "seconds": None, **limits})
    console = Console(file=output, force_terminal=terminal, width=width, highlight=False, soft_wrap=True)
    with patch("core.metrics.progress.time.monotonic", lambda: 0.0):  # within one moment, rates are those of VALUES
        progress = Progress(options, console)
        for _ in range(rounds):
            progress.show(VALUES, scores)
        progress.close()
    return output.getvalue()


def test_a_plain_line_is_printed_every_ten_seconds_and_last() -> None:
    lines = shown(False, scores=(12.0, 15.5), rounds=20, steps=2_000_000).splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]  # the first and the last
    assert (
        lines[0]
        == "steps 1,000/2.00M | score 12.00 (best 15.50) | left 5:33:10 | 100 steps/s | 5.0 updates/s | ratio 8.00"
    )


def test_the_live_line_stays_on_one_line_of_a_terminal() -> None:
    output = shown(True, rounds=3)
    assert output.count("\r") == 3 and output.count("\n") == 1 and "score -" in output


@pytest.mark.parametrize("width", range(10, 110, 7))
def test_live_lines_fit_the_terminal_and_cut_no_number(width: int) -> None:
    whole = shown(False, scores=(12.0, 15.5), steps=2_000_000).splitlines()[0].split(" | ")
    for line in re.split(
        "[\r\n]+", shown(True, scores=(12.0, 15.5), rounds=2, width=width, steps=2_000_000).rstrip("\n")
    ):
        parts = line.rstrip().split(" | ")
        assert len(line) == width - 1  # covers the previous line without a line break
        assert parts == whole[: len(parts)] or width - 1 < len(whole[0])
        assert len(parts) == len(whole) or len(" | ".join(whole[: len(parts) + 1])) > width - 1


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"steps": 10_000}, "0:01:30"),
        ({"updates": 60}, "0:00:02"),
        ({"seconds": 3_700.9}, "1:01:40"),
        ({"steps": 10_000, "updates": 60}, "0:00:02"),
        ({"steps": 500}, "0:00:00"),
    ],
)
def test_time_left_is_that_of_the_first_limit_reached(limits: dict[str, Any], left: str) -> None:
    assert f"left {left} |" in shown(False, **limits)


def test_rates_are_means_over_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not depend on when lines are written, from which the metrics' own rates count."""
    now, steps, updates, output = 0.0, 0.0, 0.0, io.StringIO()
    monkeypatch.setattr("core.metrics.progress.time.monotonic", lambda: now)
    progress = Progress(SimpleNamespace(steps=100_000, updates=None, seconds=None), Console(file=output, width=200))
    for moment in range(2, 242, 2):  # Two seconds report a rollout, the next two the updates with it.
        fast = 1.0 if moment <= 120 else 0.1
        steps, updates = (steps + 800 * fast, updates) if moment % 4 else (steps, updates + 16 * fast)
        now, counts = float(moment), {"global/agent_steps": steps, "global/updates": updates}
        progress.show({**VALUES, **counts, "global/agent_steps_per_second": steps / moment}, None)
    for number, line in enumerate(output.getvalue().splitlines()[4:], start=4):  # a line every ten seconds
        fast = 1.0 if number < 12 else 0.1
        shown_steps, shown_updates = (float(part.split()[0]) for part in line.split(" | ")[3:5])
        if not 12 <= number <= 15:  # half a minute in which the rate falls
            assert 150 <= shown_steps / fast <= 250 and 3 <= shown_updates / fast <= 5
    assert "steps 26,240/100,000 | score - | left 1:01:28 | 20 steps/s" in line


def test_the_clock_of_a_run_goes_on_with_another_logger() -> None:
    output, options = io.StringIO(), SimpleNamespace(steps=None, updates=None, seconds=60.0)
    Progress(options, Console(file=output, width=200), seconds=45.0).show(VALUES, None)
    assert re.search(r"left 0:00:1[45]", output.getvalue())


def test_a_closed_standard_output_stops_nothing() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    closed_by_an_environment = io.StringIO()
    closed_by_an_environment.close()
    for file in (Closed(), closed_by_an_environment):
        console = QuietConsole(Terminal(None), file=file)
        progress = Progress(SimpleNamespace(steps=None, updates=None, seconds=None), console)
        progress.show(VALUES, None)
        progress.evaluation(5, 1.0)
        progress.close()


def test_a_torn_line_is_found_within_the_searched_tail(tmp_path: Path) -> None:
    path, lines = tmp_path / "metrics.jsonl", b'{"time": 0, "seconds": 7.5}\n' * 20_000
    path.write_bytes(lines + b'{"time": 0, "seconds": 9')
    files = MetricsFiles(tmp_path, 0)
    assert path.read_bytes() == lines and files.errors == 0
    assert files.seconds == pytest.approx(7.5, abs=1)
