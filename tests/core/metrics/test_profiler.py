"""The profiler measures the phases of processes, their shares, the table and the trace of a run."""

import io
import json
import shlex
from types import SimpleNamespace

import pytest
from rich.console import Console

from core.metrics import profiler
from core.metrics.profiler import SKIPPED_STEPS, WARM_UP_STEPS, Profile, Shares
from core.runtime.log_buffers import LogRings, Record
from core.runtime.run_state import RunCounters
from utils.config.command_line import read_options
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context


class Watch:
    """A clock that tests set."""

    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(profiler, "time", watch)
    return watch


def context_of(on, folder=None, trace=0):
    return SimpleNamespace(
        options=SimpleNamespace(profile=on, profile_trace=trace, log_folder=folder),
        logs=LogRings(2),
        counters=RunCounters(1, 1),
        process_ind=lambda role, index: ["actor", "learner"].index(role),
        send_home=None,
    )


def test_time_is_assigned_to_the_phase_that_ended(watch):
    context = context_of(True)
    profile = Profile(context, "actor", 0)
    for phase, seconds in (("wait", 2.0), ("forward", 1.0), ("wait", 0.5), ("environment", 4.0)):
        watch.now += seconds
        profile.mark(phase)
    profile.report()
    records, _ = context.logs.drain()
    assert {record.name: record.value for record in records} == {
        "profile/actor/wait": 2.5,
        "profile/actor/forward": 1.0,
        "profile/actor/environment": 4.0,
    }


def test_a_report_holds_the_seconds_since_the_last_report(watch):
    context = context_of(True)
    profile = Profile(context, "learner", 0)
    for seconds in (3.0, 1.0):
        watch.now += seconds
        profile.mark("update")
        profile.report()
    profile.close()
    assert [record.value for record in context.logs.drain()[0]] == [3.0, 1.0, 0.0]


def test_a_disabled_profiler_reads_no_clock_and_reports_nothing(watch, monkeypatch):
    context = context_of(False)
    profile = Profile(context, "actor", 0)
    monkeypatch.delattr(Watch, "perf_counter")
    profile.mark("wait")
    profile.close()
    assert context.logs.drain() == ([], 0)


def record(name, value, step=7):
    return Record(name, value, step, 1.0)


def test_shares_add_up_to_one_over_the_processes_of_a_role():
    loss = record("learner/loss", 0.5)
    shares = Shares()
    found = shares.take(
        [
            record("profile/actor/wait", 1.0),
            loss,
            record("profile/actor/forward", 2.0),
            record("profile/learner/update", 4.0),
            record("profile/actor/wait", 2.0, step=9),
            record("profile/actor/environment", 5.0),
        ]
    )
    assert found == [
        loss,
        record("profile/actor/wait", 0.3, 9),
        record("profile/actor/forward", 0.2),
        record("profile/learner/update", 1.0),
        record("profile/actor/environment", 0.5),
    ]


def test_shares_of_an_empty_period_are_zero():
    assert Shares().take([record("profile/actor/wait", 0.0)]) == [record("profile/actor/wait", 0.0)]


def test_the_table_covers_the_run_largest_share_first():
    shares = Shares()
    shares.take(
        [
            record("profile/learner/update", 30.0),
            record("profile/actor/wait", 1.0),
            record("profile/actor/forward", 2.0),
        ]
    )
    shares.take([record("profile/actor/wait", 5.0), record("profile/learner/sample", 10.0)])
    output = io.StringIO()
    Console(file=output, width=100).print(shares.table())
    rows = [line.replace("│", " ").split() for line in output.getvalue().splitlines() if "%" in line]
    assert rows == [
        ["actor", "wait", "75.0%", "6.0"],
        ["forward", "25.0%", "2.0"],
        ["learner", "update", "75.0%", "30.0"],
        ["sample", "25.0%", "10.0"],
    ]


def test_a_run_without_profiles_has_no_table():
    shares = Shares()
    shares.take([record("learner/loss", 1.0)])
    assert shares.table() is None


def test_a_profiled_run_has_scalars_a_table_and_a_trace(root, capsys):
    options = read_options(
        [
            "--root",
            str(root),
            *shlex.split(
                "--config dqn-cartpole --engine inline --memory_type prioritized --profile --profile_trace 4 "
                "--rate_limiter.min_replay_size 100 --updates"
            ),
            str(SKIPPED_STEPS + WARM_UP_STEPS + 10),
            *shlex.split("--evaluator.episodes 1 --evaluator.max_steps 5"),
        ]
    )
    context, agent = create_context(options)
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict)) == 0
    folder = context.options.log_folder
    values = [json.loads(line)["values"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shares = {name: value for line in values for name, value in line.items() if name.startswith("profile/")}
    assert {"wait", "pull", "forward", "environment", "write", "report"} == {
        name.split("/")[2] for name in shares if "/actor/" in name
    }
    assert {"wait", "sample", "update", "priorities", "publish", "report", "checkpoint"} == {
        name.split("/")[2] for name in shares if "/learner/" in name
    }
    assert sum(value for name, value in shares.items() if "/actor/" in name) == pytest.approx(1)
    assert shares["profile/learner/update"] > shares["profile/learner/publish"] > 0
    printed = capsys.readouterr().out
    assert "where the time went" in printed and "environment" in printed
    events = json.loads((folder / "trace_learner_0.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{SKIPPED_STEPS + WARM_UP_STEPS + number}" for number in range(4)}
    assert any(event["name"] == "aten::_fused_adam_" for event in events)
