"""Evaluator: play whole episodes with the newest parameters beside the training, keep the best model."""

import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from core.agent import Agent
from core.context import Context
from core.env import Env
from core.episodes import EpisodeResults, play_episodes
from core.notices import notice
from core.recording import record_episode
from core.settings import setting
from utils import tensor_file, weights_file


@dataclass(frozen=True)
class EvaluatorParams:
    period: float = setting(60.0, above=0)       # seconds between starts of evaluations
    steps: int = setting(0, low=0)               # agent steps between evaluations; 0: by seconds
    episodes: int = setting(10, low=1)           # episodes an evaluation
    num_envs: int = setting(10, low=1)           # episodes played side by side
    max_steps: int = setting(27_000, low=1)      # agent steps an episode, then it counts as truncated
    niceness: int = setting(5, low=0, high=19)   # of the process, so that training goes first
    record_every: int = setting(0, low=0)        # evaluations from one recorded episode to the next, in logs/<signature>/videos; 0: none
    record_steps: int = setting(3_000, low=1)    # agent steps of a recorded episode at most


def evaluator(context: Context, index: int) -> Iterator[bool]:
    """Yields True while episodes are played, False while nothing is due. A run that finished ends with one more evaluation."""
    params, clock = context.options.evaluator, context.clock
    if context.options.engine != "inline":
        os.nice(params.niceness)
    generator = context.seed_everything("evaluator", index, clock.agent_steps)
    agent = context.make_agent()
    env = context.make_env(min(params.num_envs, params.episodes), training=False)
    env.note_stream_in(clock.stream_cell(context.process_ind("evaluator", index)))
    schedule = Schedule(params, clock.agent_steps)
    version, evaluations, best = 0, 0, _kept_score(context)
    try:
        while not clock.interrupted:
            stopping = clock.stopped
            if (stopping or schedule.due(clock.agent_steps)) and context.parameters.version > version:
                schedule.start(clock.agent_steps)
                version = context.parameters.pull(agent.model, version)
                best = yield from _evaluate(context, index, agent, env, generator, best)
                evaluations += 1
                if params.record_every and evaluations % params.record_every == 0:
                    yield from _record(context, index, agent)
            elif not stopping:
                yield False
            if stopping:
                break
        if not context.options.model_path.exists() and context.parameters.pull(agent.model, 0):
            _save(context, index, agent, None)
    finally:
        env.close()


class Schedule:
    """When the next evaluation is due: by agent steps where set, else by seconds."""

    def __init__(self, params: EvaluatorParams, agent_steps: int):
        self._params = params
        self._next_time = time.monotonic() + params.period
        self._next_steps = (agent_steps // params.steps + 1) * params.steps if params.steps else 0

    def due(self, agent_steps: int) -> bool:
        return agent_steps >= self._next_steps if self._params.steps else time.monotonic() >= self._next_time

    def start(self, agent_steps: int) -> None:
        self._next_time = time.monotonic() + self._params.period
        if self._params.steps:
            self._next_steps = (agent_steps // self._params.steps + 1) * self._params.steps


def _evaluate(context: Context, index: int, agent: Agent, env: Env, generator: np.random.Generator,
              best: float) -> Generator[bool, None, float]:
    params, agent_steps = context.options.evaluator, context.clock.agent_steps
    exploration = agent.evaluation_exploration(min(params.num_envs, params.episodes), generator)
    playing = play_episodes(agent, env, params.episodes, params.max_steps, exploration, int(generator.integers(2**31)))
    while True:
        try:
            next(playing)
        except StopIteration as end:
            results: EpisodeResults = end.value
            break
        if context.clock.interrupted:
            return best
        yield True
    score = float(np.mean(results.returns))
    context.clock.evaluated(score, best)
    if score > best and _save(context, index, agent, score):
        best = score
    context.logs.write(context.process_ind("evaluator", index), {
        "evaluator/episodic_return_mean": score, "evaluator/episodic_return_std": float(np.std(results.returns)),
        "evaluator/episodic_return_median": float(np.median(results.returns)),
        "evaluator/episodic_length_mean": float(np.mean(results.lengths))}, agent_steps)
    return best


def _record(context: Context, index: int, agent: Agent) -> Iterator[bool]:
    options, agent_steps = context.options, context.clock.agent_steps
    path = options.log_folder / "videos" / f"step_{agent_steps:012}.{options.video.format}"
    yield from record_episode(context, agent, path, options.evaluator.record_steps, context.seed("evaluator", index, agent_steps))


def _kept_score(context: Context) -> float:
    """Of the run's model: a checkpoint may be older. One that is there before a run's first evaluation is none of its own."""
    if context.resume_from is None and context.clock.scores is None:
        return float("-inf")
    try:
        score = weights_file.load_weights(context.options.model_path)[1].get("score")
    except tensor_file.CheckpointError:
        score = None
    return float("-inf") if score is None else float(score)


def _save(context: Context, index: int, agent: Agent, score: float | None) -> bool:
    """Keep this model as the run's best. Returns True if it was written."""
    options = context.options
    metadata = {"signature": options.signature, "config": options.config, "agent_steps": context.clock.agent_steps, "score": score}
    try:
        weights_file.save_weights(options.model_path, agent.model.state_dict(), metadata)
        written = True
    except tensor_file.CheckpointError as error:
        notice(f"best model not written, one that is there stays as it was: {error}")
        written = False
    context.clock.note_written(context.process_ind("evaluator", index), written)
    return written
