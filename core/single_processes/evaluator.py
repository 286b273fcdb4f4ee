"""Evaluator: play whole episodes with the newest parameters beside the training, keep the best model."""

import os
from collections.abc import Generator, Iterator

import numpy as np

from core.agent import Agent
from core.checkpoint import model_file, tensor_file
from core.common.console import log_to_stderr
from core.env import Env
from core.evaluation.episodes import EpisodeResults, play_episodes
from core.evaluation.recording import record_episode
from core.runtime.context import Context
from core.runtime.schedule import Schedule


def evaluator(context: Context, index: int) -> Iterator[bool]:
    """Yields True while episodes are played, False while nothing is due. A run that finished ends with one more evaluation.

    No evaluation begins while a checkpoint is due, so that on the engine inline none is cut in two by it. All that an evaluation draws
    comes from the agent steps at which it begins: a run that goes on from a checkpoint makes those that the run would have made.
    """
    params, clock = context.options.evaluator, context.clock
    if context.options.engine != "inline":
        os.nice(params.niceness)
    agent = context.make_agent()
    env = context.make_env(min(params.num_envs, params.episodes), training=False)
    env.set_activity_marker(clock.activity_marker(context.process_ind("evaluator", index)))
    schedule = Schedule(params.period, params.steps, clock.evaluated_at)
    version, best = 0, _kept_score(context)
    try:
        while not clock.interrupted:
            stopping = clock.stopped
            if stopping:
                yield False  # the learner has published its last parameters when the engine inline goes on from here
            due = stopping or (schedule.due(clock.agent_steps) and not clock.checkpoint_due)
            if due and context.parameters.version > version:
                schedule.start(clock.agent_steps)
                version = context.parameters.pull(agent.model, version)
                best = yield from _evaluate(context, index, agent, env, best)
                if params.record_every and clock.evaluations % params.record_every == 0:
                    yield from _record(context, index, agent)
            elif not stopping:
                yield False
            if stopping:
                break
        if not context.options.model_path.exists() and context.parameters.pull(agent.model, 0):
            _save(context, index, agent, clock.agent_steps, None)
    finally:
        env.close()


def _evaluate(context: Context, index: int, agent: Agent, env: Env, best: float) -> Generator[bool, None, float]:
    params, agent_steps = context.options.evaluator, context.clock.agent_steps
    generator = context.seed_everything("evaluator", index, agent_steps)
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
    context.clock.evaluated(score, best, agent_steps)
    if score > best and _save(context, index, agent, agent_steps, score):
        best = score
    solved = {} if results.solved is None else {"evaluator/solved_share": float(np.mean(results.solved))}
    context.logs.write(context.process_ind("evaluator", index), {
        "evaluator/episodic_return_mean": score, "evaluator/episodic_return_std": float(np.std(results.returns)),
        "evaluator/episodic_return_median": float(np.median(results.returns)),
        "evaluator/episodic_length_mean": float(np.mean(results.lengths)),
        "evaluator/episodes": float(len(results.returns)), **solved}, agent_steps)
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
        score = model_file.load_weights(context.options.model_path)[1].get("score")
    except tensor_file.CheckpointError:
        score = None
    return float("-inf") if score is None else float(score)


def _save(context: Context, index: int, agent: Agent, agent_steps: int, score: float | None) -> bool:
    """Keep this model, of these agent steps, as the run's best. Returns True if it was written."""
    options = context.options
    metadata = {"signature": options.signature, "config": options.config, "env_type": options.env_type, "game": options.game,
                "environment": context.spec.name, "agent_steps": agent_steps, "score": score, "options": options.to_dict()}
    try:
        model_file.save_weights(options.model_path, agent.model.state_dict(), metadata)
        written = True
    except tensor_file.CheckpointError as error:
        log_to_stderr(f"best model not written, one that is there stays as it was: {error}")
        written = False
    context.clock.note_written(context.process_ind("evaluator", index), written)
    return written
