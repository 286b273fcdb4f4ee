"""The evaluator keeps the run's best model by the score in its file."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.checkpoint import model_file
from core.checkpoint.run_checkpoint import CheckpointError
from core.runtime.context import Context
from core.runtime.options import EvaluatorParams
from core.runtime.parameter_store import ParameterStore
from core.runtime.run_state import RunCounters
from core.single_processes.evaluator import evaluator
from tests.core.single_processes.test_tester import Countdown, Network, make_context


@pytest.fixture
def context(tmp_path: Path) -> Context:
    context = make_context(
        tmp_path,
        engine="inline",
        signature="run 1",
        config="row",
        evaluator=EvaluatorParams(steps=1, episodes=1),
        steps=None,
        updates=None,
        target_score=None,
    )
    context.roles, context.parameters = (("evaluator", 0),), ParameterStore(ParameterStore.size_of(Network()))
    context.counters = RunCounters(1, 1)
    return context


def kept(context: Context, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]) -> list[float]:
    """Return the stored model's score after each evaluation; an episode of k steps scores 1 + ... + k."""
    running, scores = evaluator(context, 0), []
    for length in lengths:
        monkeypatch.setattr(Countdown, "lengths", (length,))
        assert next(running) is False
        context.parameters.publish(Network())
        context.counters.count_agent_steps(0, 1)
        while next(running):
            """The episode."""
        assert context.counters.scores is not None and context.counters.scores[0] == length * (length + 1) / 2
        scores.append(model_file.load_weights(context.options.model_path)[1]["score"])
    running.close()  # type: ignore[attr-defined]
    return scores


def test_the_best_model_is_kept_across_restarts_of_the_evaluator(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept(context, monkeypatch, (2, 5, 4)) == [3, 15, 15]
    assert kept(context, monkeypatch, (4, 3)) == [15, 15]  # the evaluator was killed and replaced
    context.counters, context.resume_from = RunCounters(1, 1), Path("a checkpoint that is older")
    assert kept(context, monkeypatch, (4, 6, 3)) == [15, 21, 21]


def test_an_evaluation_reports_episodes_and_the_share_solved(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    context.options.evaluator = EvaluatorParams(steps=1, episodes=3, num_envs=3)
    monkeypatch.setattr(Countdown, "lengths", (3, 5, 2))
    for threshold, solved in ((None, {}), (9, {"evaluator/solved_share": 2 / 3})):
        monkeypatch.setattr(Countdown, "threshold", threshold)
        running = evaluator(context, 0)
        assert next(running) is False
        context.parameters.publish(Network())
        context.counters.count_agent_steps(0, 1)
        while next(running):
            """The episodes."""
        running.close()  # type: ignore[attr-defined]
        reported = {record.name: record.value for record in context.logs.drain()[0]}
        assert reported["evaluator/episodes"] == 3 and reported["evaluator/episodic_return_mean"] == 15
        assert {name: value for name, value in reported.items() if "solved" in name} == solved


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_interrupted_evaluation_is_not_recorded(
    context: Context, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    recorded = list[int]()
    context.options.evaluator = EvaluatorParams(steps=1, episodes=1, record_every=1)
    monkeypatch.setattr("core.evaluation.video.record_episode", lambda *arguments: recorded.append(1) or iter(()))
    running = evaluator(context, 0)
    assert next(running) is False
    context.parameters.publish(Network())
    context.counters.count_agent_steps(0, 1)
    assert next(running) is True  # a step of the evaluation's episode
    if interrupted:
        context.run_state.stop(interrupt=True)
    while next(running, False):
        """The rest of the episode."""
    assert len(recorded) == (not interrupted)


def test_a_run_at_its_limit_is_evaluated_once(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    context.options.steps = 3
    monkeypatch.setattr(Countdown, "lengths", (2,))
    running = evaluator(context, 0)
    assert next(running) is False
    for _ in range(3):
        context.counters.count_agent_steps(0, 1)
        context.parameters.publish(Network())
        while next(running):
            """The episode."""
    assert context.counters.evaluations == 2  # that of step 3 waits for the engine to end the run
    context.run_state.stop()
    list(running)
    assert context.counters.evaluations == 3 and context.counters.evaluated_at == 3


@pytest.mark.parametrize("role", ["actor", "evaluator"])
def test_environments_that_draw_from_global_generators_repeat(context: Context, role: str) -> None:
    draws = []
    for index in (0, 0, 1):
        context.seed_everything(role, index)
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))  # noqa: NPY002
    assert draws[0] == draws[1] != draws[2]


def test_a_model_file_from_before_a_new_run_does_not_count(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    model_file.save_weights(context.options.model_path, Network().state_dict(), {"score": 100.0})
    assert kept(context, monkeypatch, (2, 1)) == [3, 3]


def test_a_model_that_was_not_written_is_not_the_best(
    context: Context, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    attempts, save = [], model_file.save_weights

    def save_all_but_the_second(*arguments: Any) -> None:
        assert context.counters.evaluations == len(attempts)  # A checkpoint would count it as made.
        attempts.append(arguments)
        if len(attempts) == 2:
            raise CheckpointError("no space left")
        save(*arguments)

    monkeypatch.setattr(model_file, "save_weights", save_all_but_the_second)
    assert kept(context, monkeypatch, (2, 5, 4)) == [3, 3, 10]
    assert "best model not written" in capsys.readouterr().err


def test_the_last_evaluation_waits_for_the_last_parameters(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    context.options.evaluator = EvaluatorParams(steps=1_000, episodes=1)
    monkeypatch.setattr(Countdown, "lengths", (2,))
    running, last = evaluator(context, 0), Network()
    assert next(running) is False
    context.parameters.publish(Network())
    context.run_state.request_checkpoint()
    context.run_state.stop()
    assert [next(running) for _ in range(3)] == [False] * 3  # an update and the save take their time
    with torch.no_grad():
        for parameter in last.parameters():
            parameter.add_(1)
    context.parameters.publish(last)
    context.run_state.confirm_checkpoint()
    assert not any(slice_ is False for slice_ in running)
    saved = model_file.load_weights(context.options.model_path)[0]
    assert all(torch.equal(saved[name], value) for name, value in last.state_dict().items())
