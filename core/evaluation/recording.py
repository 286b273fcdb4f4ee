"""Record one episode of the policy that is being evaluated; its score does not count for the evaluation."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from core.agent import Agent
from core.common.console import log_to_stderr
from core.evaluation.episodes import play_episodes
from core.runtime.context import Context


def record_episode(context: Context, agent: Agent, path: Path, max_steps: int, seed: int) -> Iterator[bool]:
    """Play one episode into a video file. Yield True after each step. A full disk is reported and training continues.

    Args:
        context: Context of the evaluator.
        agent: Agent that plays.
        path: The video file.
        max_steps: Agent steps after which the episode is cut.
        seed: Seed of the environment and of the exploration.
    """
    from core.evaluation.video_overlay import EpisodeRenderer  # opencv takes long to import, and most runs need none

    with ExitStack() as stack:
        env = context.make_env(1, training=False, render_mode="rgb_array")
        stack.callback(env.close)
        exploration = agent.evaluation_exploration(1, np.random.default_rng(seed))
        try:
            renderer = EpisodeRenderer(path, context.options.video, context.spec)
            try:
                for _ in play_episodes(agent, env, 1, max_steps, exploration, seed, renderer.add):
                    if context.run_state.interrupted:
                        return
                    yield True
            finally:
                renderer.close()
        except OSError as error:
            log_to_stderr(f"video {path} not written, training goes on, and the next is tried when it is due: {error}")
