"""One recorded episode of the policy that is being evaluated, beside the evaluation and not part of its score."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from core.agent import Agent
from core.common.console import log_to_stderr
from core.evaluation.episodes import play_episodes
from core.runtime.context import Context


def record_episode(context: Context, agent: Agent, path: Path, max_steps: int, seed: int) -> Iterator[bool]:
    """Play one episode, cut after max_steps, into the file; yields True after each step. A full disk is reported and training goes on."""
    from core.evaluation.video_overlay import EpisodeRenderer  # opencv is large, and most runs draw nothing

    with ExitStack() as stack:
        env = context.make_env(1, training=False, render_mode="rgb_array")
        stack.callback(env.close)
        exploration = agent.evaluation_exploration(1, np.random.default_rng(seed))
        try:
            film = EpisodeRenderer(path, context.options.video, context.spec)
            try:
                for _ in play_episodes(agent, env, 1, max_steps, exploration, seed, film.add):
                    if context.run_state.interrupted:
                        return
                    yield True
            finally:
                film.close()
        except OSError as error:
            log_to_stderr(f"video {path} not written, training goes on, and the next is tried when it is due: {error}")
