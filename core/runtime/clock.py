"""Step counters, stop flag, heartbeats and the samples-per-insert limiter, in shared memory; every counter has one writer."""

import time
from typing import Any

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.common.shared_arrays import SharedArrays
from core.specs import ArraySpec

LINE = 8  # int64 a cache line
FLAGS = {"stop": 0, "checkpoints_requested": 1, "checkpoints_written": 2, "logger_may_end": 3, "restarts": 4}
FINISHED, INTERRUPTED = 1, 2  # values of stop
LIMITER = ("inserted", "sampled")
COUNTS = ("agent_steps", "episodes", "updates", *LIMITER)  # that a checkpoint has


@frozen_dataclass
class ClockParams:
    """Options of the pace: how many samples are learnt from for each agent step, and when learning starts."""

    samples_per_insert: float | None = Field(default=8.0, gt=0, le=1e6)
    """Samples learnt from for each agent step stored (Nature DQN: 32 / 4)."""
    learn_start: int = Field(default=20_000, ge=1, le=10**10)
    """Agent steps stored before the first update."""
    tolerance: int = Field(default=1_000, ge=1, le=10**10)
    """Agent steps that actors may run ahead of samples_per_insert."""


class Clock:
    """Counts for num_actors actors and num_learners learners; `num_processes` heartbeats.

    An *agent step* is one action of one environment. `samples_per_insert` is the number of samples learnt from for each agent step
    stored, counted from `learn_start`. Rows that end an episode are neither, as no action was taken there. Both sides wait for the other,
    the actors with `tolerance` agent steps of grace. None: no
    limit. Counts of the limiter restart with an empty memory, counts of the run go on.
    """

    def __init__(self, num_actors: int, num_learners: int, num_processes: int, params: ClockParams):
        self.params = params
        self._arrays = SharedArrays({
            "agent_steps": ArraySpec((num_actors, LINE), "int64"), "inserted": ArraySpec((num_actors, LINE), "int64"),
            "episodes": ArraySpec((num_actors, LINE), "int64"),
            "updates": ArraySpec((num_learners, LINE), "int64"), "sampled": ArraySpec((num_learners, LINE), "int64"),
            "flags": ArraySpec((len(FLAGS), LINE), "int64"), "scores": ArraySpec((LINE,), "float64"),
            "heartbeats": ArraySpec((num_processes, LINE), "float64")})  # monotonic seconds, 1 + stream in foreign code, write failed

    # counters ---------------------------------------------------------------------------------------------------------
    @property
    def agent_steps(self) -> int:
        return int(self._arrays["agent_steps"][:, 0].sum())

    @property
    def updates(self) -> int:
        """Updates of one learner; several run in step."""
        return int(self._arrays["updates"][:, 0].max())

    @property
    def episodes(self) -> int:
        return int(self._arrays["episodes"][:, 0].sum())

    @property
    def inserted(self) -> int:
        return int(self._arrays["inserted"][:, 0].sum())

    @property
    def sampled(self) -> int:
        return int(self._arrays["sampled"][:, 0].sum())

    def count_agent_steps(self, actor_ind: int, agent_steps: int, episodes: int = 0) -> None:
        self._arrays["agent_steps"][actor_ind, 0] += agent_steps
        self._arrays["inserted"][actor_ind, 0] += agent_steps
        self._arrays["episodes"][actor_ind, 0] += episodes

    def count_update(self, learner_ind: int, samples: int, updates: int = 1) -> None:
        self._arrays["updates"][learner_ind, 0] += updates
        self._arrays["sampled"][learner_ind, 0] += samples

    # limiter ----------------------------------------------------------------------------------------------------------
    @property
    def is_warming_up(self) -> bool:
        """Rows are stored and not learnt from yet."""
        return self.inserted < self.params.learn_start

    def can_insert(self) -> bool:
        if self.params.samples_per_insert is None or self.is_warming_up:
            return True
        return self._sample_deficit() < self.params.tolerance * self.params.samples_per_insert

    def can_sample(self, samples: int) -> bool:
        if self.is_warming_up:
            return False
        return self.params.samples_per_insert is None or self._sample_deficit() >= samples

    def ratio(self) -> float:
        """Samples per insert in force since learn_start; 0 before."""
        inserted = self.inserted - self.params.learn_start
        return self.sampled / inserted if inserted > 0 else 0.0

    def _sample_deficit(self) -> float:
        """Samples the learner is behind."""
        assert self.params.samples_per_insert is not None
        return (self.inserted - self.params.learn_start) * self.params.samples_per_insert - self.sampled

    # stop, checkpoints, scores, heartbeats ------------------------------------------------------------------------------
    def _flag(self, name: str) -> int:
        return int(self._arrays["flags"][FLAGS[name], 0])

    def _raise(self, name: str, value: int) -> None:
        self._arrays["flags"][FLAGS[name], 0] = value

    @property
    def stopped(self) -> bool:
        return self._flag("stop") != 0

    @property
    def interrupted(self) -> bool:
        """Save and leave at once; a run that merely finished still plays its last evaluation."""
        return self._flag("stop") == INTERRUPTED

    def stop(self, interrupt: bool = False) -> None:
        self._raise("stop", INTERRUPTED if interrupt or self.interrupted else FINISHED)

    @property
    def logger_may_end(self) -> bool:
        """Every other process has had its last word."""
        return self._flag("logger_may_end") != 0

    def end_logger(self) -> None:
        self._raise("logger_may_end", 1)

    @property
    def checkpoint_due(self) -> bool:
        return self._flag("checkpoints_requested") > self._flag("checkpoints_written")

    @property
    def checkpoints_written(self) -> int:
        return self._flag("checkpoints_written")

    def request_checkpoint(self) -> None:
        """Ask the learner for a full checkpoint; only the engine does."""
        self._raise("checkpoints_requested", self._flag("checkpoints_requested") + 1)

    def checkpoint_written(self) -> None:
        """The learner's answer, also when the disk was full."""
        self._raise("checkpoints_written", self._flag("checkpoints_requested"))

    @property
    def restarts(self) -> int:
        return self._flag("restarts")

    def count_restart(self) -> None:
        self._raise("restarts", self.restarts + 1)

    @property
    def scores(self) -> tuple[float, float] | None:
        """Mean return of the last and of the best evaluation; None before the first."""
        count, last, best = self._arrays["scores"][:3]
        return (float(last), float(best)) if count else None

    @property
    def evaluations(self) -> int:
        """Count the evaluations of the run."""
        return int(self._arrays["scores"][0])

    @property
    def evaluated_at(self) -> int:
        """Return the agent steps at which the last evaluation began; 0 before the first."""
        return int(self._arrays["scores"][3])

    def evaluated(self, score: float, best: float = float("-inf"), agent_steps: int = 0) -> None:
        """Called by the evaluator, who may know of a better one, `best`, that is younger than the checkpoint a run went on from."""
        scores = self.scores
        self._arrays["scores"][1:4] = score, max(score, best, *(scores or ())), agent_steps
        self._arrays["scores"][0] += 1

    def heartbeat(self, process_ind: int) -> None:
        self._arrays["heartbeats"][process_ind, 0] = time.monotonic()

    def has_started(self, process_ind: int) -> bool:
        return bool(self._arrays["heartbeats"][process_ind, 0])

    def seconds_since_heartbeat(self, process_ind: int) -> float:
        """Seconds since the last beat; 0 for a process that never beat."""
        beat = float(self._arrays["heartbeats"][process_ind, 0])
        return time.monotonic() - beat if beat else 0.0

    def reset_heartbeat(self, process_ind: int) -> None:
        """A new process takes this place."""
        self._arrays["heartbeats"][process_ind] = 0.0

    def activity_marker(self, process_ind: int) -> np.ndarray:
        """Where an environment of this process notes whose code runs (Env.note_stream_in)."""
        return self._arrays["heartbeats"][process_ind, 1:2]

    def stream(self, process_ind: int) -> int | None:
        """The stream whose foreign code this process is in."""
        noted = int(self._arrays["heartbeats"][process_ind, 1])
        return noted - 1 if noted else None

    def note_written(self, process_ind: int, written: bool) -> None:
        """Note whether the last write of this process (a checkpoint, the best model, metrics) reached the disk."""
        self._arrays["heartbeats"][process_ind, 2] = not written

    @property
    def unsaved(self) -> list[int]:
        """Return the indices of the processes whose last write failed: a run that ends so is not done."""
        return np.flatnonzero(self._arrays["heartbeats"][:, 2]).tolist()

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {**{name: self._arrays[name][:, 0].tolist() for name in COUNTS}, "scores": self._arrays["scores"].tolist(),
                "limiter": self._limiter()}

    def load_state_dict(self, state: dict[str, Any], with_rows: bool) -> None:
        """Continue the counts of a run; the limiter's own only when the replay came back too. The number of actors may differ.

        With another ratio of samples to inserts nobody is behind or ahead: it holds from here on.
        """
        self._arrays["scores"][:] = state["scores"]
        for name in COUNTS[:None if with_rows else -len(LIMITER)]:
            counts, values = self._arrays[name], state[name]
            if name == "updates":
                values = [max(values)] * len(counts)  # learners run in step
            counts[:, 0] = 0
            counts[0, 0] = sum(values[len(counts):])
            counts[:len(values), 0] += values[:len(counts)]
        if with_rows and self.params.samples_per_insert is not None and state.get("limiter", self._limiter()) != self._limiter():
            self._arrays["sampled"][:, 0] = 0
            self._arrays["sampled"][0, 0] = max(int(self._sample_deficit()), 0)

    def _limiter(self) -> list[float | None]:
        return [self.params.samples_per_insert, self.params.learn_start]
