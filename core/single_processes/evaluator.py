"""Run the evaluator: play whole episodes with the newest parameters during training, and keep the best model."""

import math
import os
from collections.abc import Generator, Iterator

import numpy as np

from core.agent import Agent
from core.checkpoint import model_file
from core.checkpoint.run_checkpoint import CheckpointError
from core.common.console import log_to_stderr
from core.env import Env
from core.evaluation.episodes import play_episodes
from core.runtime.context import Context
from core.runtime.log_buffers import EVALUATOR
from core.runtime.run_state import Schedule


def evaluator(context: Context, index: int) -> Iterator[bool]:
    """Yield True while episodes are played, False while nothing is due. A finished run ends with one more evaluation.

    No evaluation begins while a checkpoint is due, so that a checkpoint of the inline engine never interrupts one. All
    random numbers of an evaluation depend on the agent steps at which it begins: a resumed run repeats the evaluations
    that the run would have made.
    """
    params, counters, run_state = context.options.evaluator, context.counters, context.run_state
    if context.options.engine != "inline":
        os.nice(params.niceness)
    agent = context.make_agent()
    env = context.make_env(min(params.num_envs, params.episodes), training=False)
    env.set_activity_marker(run_state.activity_marker(context.process_ind("evaluator", index)))
    schedule = Schedule(params.period, params.steps, counters.evaluated_at)
    version, best = 0, _best_score_on_disk(context)
    try:
        while not run_state.interrupted:
            stopping = run_state.stopped
            if stopping and run_state.checkpoint_due:
                yield False  # until the learner has published its last parameters and saved them
                continue
            agent_steps = counters.agent_steps
            # A run that has reached its limit will stop, and has its last evaluation then.
            scheduled = schedule.due(agent_steps) and not (run_state.checkpoint_due or context.reached_limits())
            if (stopping or scheduled) and context.parameters.version > version:
                schedule.start(agent_steps)
                version = context.parameters.pull(agent.model, version)
                best = yield from _evaluate(context, index, agent, env, best, agent_steps)
                records = params.record_every and counters.evaluations % params.record_every == 0
                if records and not run_state.interrupted:
                    from core.evaluation.video import record_episode  # opencv takes long to import; most runs need none

                    yield from record_episode(context, index, agent, agent_steps)
            elif not stopping:
                yield False
            if stopping:
                break
        if not context.options.model_path.exists() and context.parameters.pull(agent.model, 0):
            _save(context, index, agent, counters.agent_steps, None)
    finally:
        env.close()


def _evaluate(
    context: Context, index: int, agent: Agent, env: Env, best: float, agent_steps: int
) -> Generator[bool, None, float]:
    """Play the episodes of one evaluation, report them, and save the model if it is the best. Return the best score."""
    params = context.options.evaluator
    generator = context.seed_everything("evaluator", index, agent_steps)
    exploration = agent.evaluation_exploration(min(params.num_envs, params.episodes), generator)
    results = yield from context.run_state.until_interrupted(
        play_episodes(agent, env, params.episodes, params.max_steps, exploration, int(generator.integers(2**31)))
    )
    if results is None:
        return best
    score = float(np.mean(results.returns))
    if score > best and _save(context, index, agent, agent_steps, score):
        best = score
    values = {
        "episodic_return_mean": score,
        "episodic_return_std": float(np.std(results.returns)),
        "episodic_return_median": float(np.median(results.returns)),
        "episodic_length_mean": float(np.mean(results.lengths)),
        "episodes": float(len(results.returns)),
    }
    if results.solved is not None:
        values["solved_share"] = float(np.mean(results.solved))
    named = {EVALUATOR + name: value for name, value in values.items()}
    context.logs.write(context.process_ind("evaluator", index), named, agent_steps)
    # Last, because a checkpoint counts it as made from here on.
    context.counters.record_evaluation(score, best, agent_steps)
    return best


def _best_score_on_disk(context: Context) -> float:
    """Return the score of the run's model file, which can be newer than its checkpoint; -inf if there is none.

    A model file that is there before the first evaluation of a new run belongs to another run.
    """
    is_new = context.resume_from is None and context.counters.scores is None
    if is_new or not context.options.model_path.exists():
        return -math.inf
    try:
        score = model_file.load_weights(context.options.model_path)[1].get("score")
    except CheckpointError as error:
        log_to_stderr(f"warning: the next evaluation replaces the best model, which cannot be read: {error}")
        return -math.inf
    return -math.inf if score is None else float(score)


def _save(context: Context, index: int, agent: Agent, agent_steps: int, score: float | None) -> bool:
    """Save the model as the run's best. Return True if it was written."""
    metadata = context.model_metadata(agent_steps, score)
    try:
        model_file.save_weights(context.options.model_path, agent.model.state_dict(), metadata)
        written = True
    except CheckpointError as error:
        log_to_stderr(f"best model not written, one that is there stays as it was: {error}")
        written = False
    context.run_state.record_write(context.process_ind("evaluator", index), written)
    return written
