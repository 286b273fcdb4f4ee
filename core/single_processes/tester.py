"""Run the tester (mode 2): play a model's episodes, print their scores, and write every raw return beside the model."""

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from core.checkpoint.model_file import file_beside, load_into, load_weights
from core.common.files import write_atomically
from core.common.system import usable_cores, versions
from core.evaluation.episodes import Episode, EpisodeResults, play_episodes, results_of
from core.runtime.context import Context


def tester(context: Context, index: int) -> Iterator[bool]:
    """Yield True after each step of the test. An interrupted one prints the statistics of the episodes that ended.

    Raises:
        CheckpointError: the model file cannot be used.
    """
    options = context.options
    path = Path(options.model_file or options.model_path)
    assert context.initial_weights is not None
    weights, metadata = load_weights(context.initial_weights, is_verified=True)
    agent = context.make_agent(options.device)
    load_into(agent.model, weights, path)
    ended: list[Episode] = []

    def print_episode(episode: Episode) -> None:
        ended.append(episode)
        truncated = ", truncated" if episode.truncated else ""
        number = f"{len(ended)}/{options.episodes}"
        _print(f"episode {number}: return {episode.score:g}, {episode.length} steps{truncated}")

    num_envs = 1 if options.record or options.render else min(options.episodes, options.evaluator.num_envs)
    with ExitStack() as stack:
        env = context.make_env(
            num_envs,
            training=False,
            num_threads=min(num_envs, usable_cores()),
            render_mode="rgb_array" if options.record else "human" if options.render else None,
        )
        stack.callback(env.close)
        renderer = None
        if options.record:
            from core.evaluation.video import EpisodeRenderer  # opencv takes long to import

            renderer = EpisodeRenderer(file_beside(path, f"_test.{options.video.format}"), options.video, context.spec)
            stack.callback(renderer.close)
        exploration = agent.evaluation_exploration(num_envs, context.seed_everything("tester", index))
        played = yield from context.run_state.until_interrupted(
            play_episodes(
                agent,
                env,
                options.episodes,
                options.evaluator.max_steps,
                exploration,
                context.seed("tester", index),
                renderer.add if renderer else None,
                print_episode,
            )
        )
    if played is None and not ended:
        return
    results = results_of(ended, context.spec.reward_threshold) if played is None else played
    summary = summarise(results, options.env_class, context.spec.name)
    numbers = ", ".join(
        f"{name} {value:g}" if isinstance(value, int) else f"{name} {value:.2f}" for name, value in summary.items()
    )
    _print(f"{path.name} on {context.spec.name}: {numbers}")
    report_path = file_beside(path, "_test.json")
    if renderer is not None:
        _print(f"video: {renderer.video.path}")
    if played is None:
        return _print(f"interrupted: {report_path} was not written")
    report = {
        "model_file": str(path),
        "model": {name: value for name, value in metadata.items() if name != "options"},
        "game": context.spec.name,
        "seed": options.seed,
        "summary": summary,
        "protocol": {
            "env_type": options.env_type,
            "env": dataclasses.asdict(options.env),
            "max_steps": options.evaluator.max_steps,
            "num_envs": num_envs,
            "exploration": None if exploration is None else exploration.statistics(),
        },
        **{name: array.tolist() for name, array in results._asdict().items() if array is not None},
        "versions": versions(),
        "time": time.time(),
        "options": options.to_dict(),
    }
    # Another process may test the same model, and end in the same moment.
    write_atomically(report_path, (json.dumps(report, indent=1, default=str) + "\n").encode(), f"{os.getpid()}_")
    _print(f"all returns: {report_path}")


def summarise(results: EpisodeResults, env_class: Any, game: str) -> dict[str, float | int]:
    """Return statistics of the episodes.

    `std` is that of the population. `solved_share` and `human_normalized` are missing if they are not known.
    """
    returns = results.returns
    solved = {} if results.solved is None else {"solved_share": float(results.solved.mean())}
    human = env_class.human_normalized(game, float(returns.mean()))
    return {
        "episodes": len(returns),
        "mean": float(returns.mean()),
        "std": float(returns.std()),
        "median": float(np.median(returns)),
        "min": float(returns.min()),
        "max": float(returns.max()),
        "mean_length": float(results.lengths.mean()),
        "truncated": int(results.truncated.sum()),
        **solved,
        **({} if human is None else {"human_normalized": human}),
    }


def _print(message: str) -> None:
    """Print to stdout. A closed pipe (`| head -2`) or a full disk behind stdout does not stop the test."""
    with suppress(OSError, ValueError):  # ValueError if an environment has closed it
        print(message, flush=True)
