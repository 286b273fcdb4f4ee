"""Evaluate an agent of stable-baselines3 during its training, as our evaluator does, for the studies beside it."""

import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy

EVALUATIONS = 20  # of a run


class Evaluation(BaseCallback):
    """Play whole episodes after each twentieth of a run's agent steps; seconds leave out the evaluations.

    Args:
        run: Name of the run in the CSV.
        env: Environment of the evaluations.
        episodes: Episodes of an evaluation.
        steps: Agent steps of the run.
        deterministic: Take the best action, else sample the policy.
    """

    def __init__(self, run: str, env: Any, episodes: int, steps: int, deterministic: bool):
        super().__init__()
        self._run, self._env, self._episodes, self._deterministic = run, env, episodes, deterministic
        self._period = steps / EVALUATIONS
        self._started, self._evaluating = time.monotonic(), 0.0
        self._lines: list[dict[str, Any]] = []

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= (len(self._lines) + 1) * self._period:
            self._evaluate()

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self._evaluate()

    def _evaluate(self) -> None:
        began = time.monotonic()
        returns, _ = evaluate_policy(
            self.model, self._env, self._episodes, self._deterministic, return_episode_rewards=True, warn=False
        )
        self._evaluating += time.monotonic() - began
        self._lines.append(
            {
                "run": self._run,
                "step": self.num_timesteps,
                "seconds": round(time.monotonic() - self._started - self._evaluating, 1),
                "mean": float(np.mean(returns)),
                "std": float(np.std(returns)),
                "median": float(np.median(returns)),
            }
        )

    def write(self, path: Path) -> None:
        """Write the evaluations as a CSV that `utils.plot` reads."""
        with path.with_suffix(".part").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self._lines[0]))
            writer.writeheader()
            writer.writerows(self._lines)
        path.with_suffix(".part").rename(path)
