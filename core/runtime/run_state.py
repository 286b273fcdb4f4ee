"""Hold the state of a run in shared memory: counts, the pace of learning, and signals between processes.

Every counter has one writer and a cache line of its own, so no process takes a lock. A process and its supervisor
share the row of the process. A checkpoint keeps the counts, and none of the signals.
"""

import time
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.common.shared_arrays import CACHE_LINE, SharedArrays
from core.specs import ArraySpec

Result = TypeVar("Result")

REPLAY_COUNTS = ("inserted", "sampled")
COUNTS = ("agent_steps", "episodes", "updates", *REPLAY_COUNTS)
FLAGS = (
    "stopped",
    "interrupted",
    "checkpoints_requested",
    "checkpoints_written",
    "logger_may_end",
    "restarts",
    "lost_learner",
)
# Columns of a process: monotonic seconds, 1 + environment in foreign code, 0 or 1, processes that the row has had.
HEARTBEAT, ACTIVE_ENV, WRITE_FAILED, STARTS = 0, 1, 2, 3


class RunCounters:
    """Count the work of num_actors actors and num_learners learners.

    An *agent step* is one action of one environment. The last observation of an episode is stored too, but is no agent
    step, because no action was taken there. `inserted` and `sampled` count the agent steps that the current replay
    received and gave; they restart with an empty replay.

    Actor i has its steps in the memory of learner i modulo num_learners. The sum of rows [learner::num_learners] of a
    count is therefore the learner's *total*: what it and its actors have done.
    """

    def __init__(self, num_actors: int, num_learners: int):
        of_actors = dict.fromkeys(("agent_steps", "episodes", "inserted"), num_actors)
        sizes = of_actors | dict.fromkeys(("updates", "sampled", "replay_steps"), num_learners)
        arrays = {name: ArraySpec((size, CACHE_LINE), "int64") for name, size in sizes.items()}
        self._num_learners = num_learners
        self._arrays = SharedArrays({**arrays, "scores": ArraySpec((CACHE_LINE,), "float64")})

    @property
    def agent_steps(self) -> int:
        return self._sum("agent_steps")

    @property
    def episodes(self) -> int:
        return self._sum("episodes")

    @property
    def inserted(self) -> int:
        return self._sum("inserted")

    @property
    def sampled(self) -> int:
        return self._sum("sampled")

    @property
    def updates(self) -> int:
        """Return the updates of one learner; several learners update in lockstep."""
        return int(self._arrays["updates"][:, 0].max())

    def _sum(self, name: str) -> int:
        """Return a count of the whole run."""
        return int(self._arrays[name][:, 0].sum())

    def count_agent_steps(self, actor: int, agent_steps: int, episodes: int = 0) -> None:
        """Count agent steps that an actor stored in the replay, and the episodes that they ended."""
        self._arrays["agent_steps"][actor, 0] += agent_steps
        self._arrays["inserted"][actor, 0] += agent_steps
        self._arrays["episodes"][actor, 0] += episodes

    def count_update(self, learner: int, samples: int, updates: int = 1) -> None:
        """Count updates of a learner and the agent steps that they learned from."""
        self._arrays["updates"][learner, 0] += updates
        self._arrays["sampled"][learner, 0] += samples

    # several nodes (core/engines/ray/learner_host.py) -----------------------------------------------------------------
    def totals(self) -> list[dict[str, int]]:
        """Return every count's total for each learner."""
        rows = range(self._num_learners)
        return [{name: int(self._arrays[name][row :: self._num_learners, 0].sum()) for name in COUNTS} for row in rows]

    def set_totals(self, learner: int, totals: Mapping[str, int]) -> None:
        """Take over the totals of a learner on another node, or at a start those of its own."""
        for name, total in totals.items():
            self._set_total(self._arrays[name][:, 0], learner, total)

    def _set_total(self, counts: np.ndarray, learner: int, total: int) -> None:
        """Set a learner's total: its first row takes what its other rows lack."""
        rows = counts[learner :: self._num_learners]
        rows[0] = total - int(rows[1:].sum())

    @property
    def remote_replay_steps(self) -> int:
        """Return the steps that memories on other nodes hold."""
        return self._sum("replay_steps")

    def record_replay_steps(self, learner: int, steps: int) -> None:
        """Record the size of a memory on another node. Only home calls this."""
        self._arrays["replay_steps"][learner, 0] = steps

    def set_sampled(self, samples: int) -> None:
        """Set the samples of the whole run; learner 0 counts all of them."""
        self._arrays["sampled"][:, 0] = 0
        self._arrays["sampled"][0, 0] = samples

    @property
    def scores(self) -> tuple[float, float] | None:
        """Return the mean returns of the last and of the best evaluation, or None before the first evaluation."""
        count, last, best = self._arrays["scores"][:3]
        return (float(last), float(best)) if count else None

    @property
    def evaluations(self) -> int:
        return int(self._arrays["scores"][0])

    @property
    def evaluated_at(self) -> int:
        """Return the agent steps at which the last evaluation began; 0 before the first."""
        return int(self._arrays["scores"][3])

    def record_evaluation(self, score: float, best: float = float("-inf"), agent_steps: int = 0) -> None:
        """Record the mean return of an evaluation that began at `agent_steps`. Only the evaluator calls this.

        `best` is the score of the best model on disk, which can be newer than the restored checkpoint.
        """
        self._arrays["scores"][1:4] = score, max(score, best, *(self.scores or ())), agent_steps
        self._arrays["scores"][0] += 1

    def scores_row(self) -> list[float]:
        """Return everything about evaluations, as `set_scores_row` takes it."""
        row: list[float] = self._arrays["scores"].tolist()
        return row

    def set_scores_row(self, row: list[float]) -> None:
        """Take over what another node knows of evaluations."""
        self._arrays["scores"][:] = row

    def state_dict(self, totals: Mapping[int, Mapping[str, int]] | None = None) -> dict[str, Any]:
        """Return the counts and scores, with these totals of learners on other nodes, which the mirror has late."""
        counts = {name: self._arrays[name][:, 0].copy() for name in COUNTS}
        for learner, of_learner in (totals or {}).items():
            for name, total in of_learner.items():
                self._set_total(counts[name], learner, total)
        return {**{name: values.tolist() for name, values in counts.items()}, "scores": self.scores_row()}

    def load_state_dict(self, state: dict[str, Any], with_replay: bool) -> None:
        """Restore the counts of a checkpoint, which may be of another number of actors and learners.

        Without the replay, `inserted` and `sampled` start at 0.
        """
        self.set_scores_row(state["scores"])
        for name in COUNTS if with_replay else COUNTS[: -len(REPLAY_COUNTS)]:
            counts, values = self._arrays[name], state[name]
            if name == "updates":
                values = [max(values)] * len(counts)  # learners update in lockstep
            counts[:, 0] = 0
            counts[0, 0] = sum(values[len(counts) :])
            counts[: len(values), 0] += values[: len(counts)]


@frozen_dataclass
class RateLimiterParams:
    """Options of the rate limiter: the samples per insert, and the step at which learning starts."""

    samples_per_insert: float | None = Field(default=8.0, gt=0, le=1e6)
    """Samples learnt from for each agent step stored (Nature DQN: 32 / 4), also of sequences: R2D2 learns from 80 of
    each window. Divided by the samples of an update, it is the updates for each agent step. None: no limit."""
    min_replay_size: int = Field(default=20_000, ge=1, le=10**10)
    """Agent steps that actors make before the first update."""
    error_buffer: int = Field(default=1_000, ge=1, le=10**10)
    """Agent steps that actors may run ahead of samples_per_insert."""


class RateLimiter:
    """Limit the samples that are learned from for each agent step stored, from `min_replay_size` on, as in Reverb.

    Learners wait until a whole batch is due. Actors wait once learners are `error_buffer` agent steps behind. If
    `samples_per_insert` is None, learners wait for `min_replay_size` only and actors never wait.
    """

    def __init__(self, params: RateLimiterParams, counters: RunCounters):
        self._params, self._counters = params, counters

    @property
    def is_warming_up(self) -> bool:
        """Return True while too few agent steps are stored to learn from."""
        return self._counters.inserted < self._params.min_replay_size

    def learning_steps(self, agent_steps: int) -> int:
        """Return how many of the run's agent steps came after `min_replay_size`."""
        return max(agent_steps - self._params.min_replay_size, 0)

    def can_insert(self) -> bool:
        """Return True if actors may store more agent steps."""
        ratio = self._params.samples_per_insert
        return ratio is None or self.is_warming_up or self._deficit(ratio) < self._params.error_buffer * ratio

    def can_sample(self, samples: int) -> bool:
        """Return True if learners may learn from that many samples."""
        ratio = self._params.samples_per_insert
        return not self.is_warming_up and (ratio is None or self._deficit(ratio) >= samples)

    def ratio(self) -> float:
        """Return the samples per insert since `min_replay_size`; 0 before."""
        inserted = self._counters.inserted - self._params.min_replay_size
        return self._counters.sampled / inserted if inserted > 0 else 0.0

    def _deficit(self, ratio: float) -> float:
        """Return the samples that learners are behind; negative if they are ahead."""
        return (self._counters.inserted - self._params.min_replay_size) * ratio - self._counters.sampled

    def state_dict(self) -> dict[str, Any]:
        return {"limiter": [self._params.samples_per_insert, self._params.min_replay_size]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with restored counters. If the checkpoint had other limits, the new ones hold from here on."""
        ratio, own = self._params.samples_per_insert, self.state_dict()["limiter"]
        if ratio is not None and state["limiter"] != own:  # what the new ones make due until here counts as sampled
            self._counters.set_sampled(max(int(self._deficit(ratio)) + self._counters.sampled, 0))


class ProcessState(NamedTuple):
    """The row of a process as another machine can read it, whose monotonic clock is another."""

    starts: float
    age: float | None  # seconds since the last heartbeat; None before the first
    active_env: float
    write_failed: float


class RunState:
    """Signals between the engine and num_processes processes of a run."""

    def __init__(self, num_processes: int):
        flags = ArraySpec((len(FLAGS), CACHE_LINE), "int64")
        processes = ArraySpec((num_processes, CACHE_LINE), "float64")
        self._arrays = SharedArrays({"flags": flags, "processes": processes})

    def _flag(self, name: str) -> int:
        return int(self._arrays["flags"][FLAGS.index(name), 0])

    def _set_flag(self, name: str, value: int) -> None:
        self._arrays["flags"][FLAGS.index(name), 0] = value

    @property
    def stopped(self) -> bool:
        return self._flag("stopped") != 0

    @property
    def interrupted(self) -> bool:
        """Return True if processes must save and exit at once. A finished run still plays its last evaluation."""
        return self._flag("interrupted") != 0

    def until_interrupted(self, work: Generator[bool, None, Result]) -> Generator[bool, None, Result | None]:
        """Yield what `work` yields, and return its result, or None if the run is interrupted before."""
        while not self.interrupted:
            try:
                yield next(work)
            except StopIteration as end:
                return cast(Result, end.value)
        return None

    def stop(self, interrupt: bool = False) -> None:
        """End the run. Nothing takes an interrupt back, because a signal may come within this call."""
        if interrupt:
            self._set_flag("interrupted", 1)
        self._set_flag("stopped", 1)

    @property
    def logger_may_end(self) -> bool:
        """Return True once every other process has sent its last report."""
        return self._flag("logger_may_end") != 0

    def end_logger(self) -> None:
        self._set_flag("logger_may_end", 1)

    @property
    def checkpoint_due(self) -> bool:
        return self._flag("checkpoints_requested") > self._flag("checkpoints_written")

    def request_checkpoint(self) -> None:
        """Ask the learners for a checkpoint. Only the engine calls this."""
        self._set_flag("checkpoints_requested", self._flag("checkpoints_requested") + 1)

    def confirm_checkpoint(self) -> None:
        """Answer all requests so far. Learner 0 calls this, even if the disk was full."""
        self._set_flag("checkpoints_written", self._flag("checkpoints_requested"))

    @property
    def restarts(self) -> int:
        return self._flag("restarts")

    def count_restart(self) -> None:
        self._set_flag("restarts", self.restarts + 1)

    @property
    def lost_learner(self) -> int | None:
        """Return the learner without which the run ends, or None."""
        return self._flag("lost_learner") - 1 if self._flag("lost_learner") else None

    def lose_learner(self, learner: int) -> None:
        """Tell the other learners that this one is lost. Only the supervisor calls this."""
        self._set_flag("lost_learner", 1 + learner)

    def heartbeat(self, process_ind: int) -> None:
        self._arrays["processes"][process_ind, HEARTBEAT] = time.monotonic()

    def has_started(self, process_ind: int) -> bool:
        return bool(self._arrays["processes"][process_ind, HEARTBEAT])

    def seconds_since_heartbeat(self, process_ind: int) -> float:
        """Return the seconds since the last heartbeat; 0 before the first."""
        last = float(self._arrays["processes"][process_ind, HEARTBEAT])
        return time.monotonic() - last if last else 0.0

    def reset_heartbeat(self, process_ind: int) -> None:
        """Forget all of a process, because a new one takes its place."""
        self._arrays["processes"][process_ind, :STARTS] = 0.0

    def count_start(self, process_ind: int) -> None:
        """Count a process that the supervisor is about to start, and forget all of its predecessor."""
        self.set_starts(process_ind, self.starts(process_ind) + 1)

    def activity_marker(self, process_ind: int) -> np.ndarray:
        """Return the cell [1] in which the environment of a process notes whose code runs (Env.set_activity_marker)."""
        return self._arrays["processes"][process_ind, ACTIVE_ENV : ACTIVE_ENV + 1]

    def active_env(self, process_ind: int) -> int | None:
        """Return the environment whose foreign code the process runs, or None."""
        marker = int(self._arrays["processes"][process_ind, ACTIVE_ENV])
        return marker - 1 if marker else None

    def record_write(self, process_ind: int, succeeded: bool) -> None:
        """Record whether the last write of this process (a checkpoint, the best model, metrics) reached the disk."""
        self._arrays["processes"][process_ind, WRITE_FAILED] = not succeeded

    @property
    def failed_writers(self) -> list[int]:
        """Return the indices of the processes whose last write failed. A run that ends with one is not complete."""
        return np.flatnonzero(self._arrays["processes"][:, WRITE_FAILED]).tolist()

    # several nodes (core/engines/ray/learner_host.py) -----------------------------------------------------------------
    def flags(self) -> list[int]:
        """Return all flags, as `set_flags` takes them."""
        flags: list[int] = self._arrays["flags"][:, 0].tolist()
        return flags

    def set_flags(self, flags: list[int]) -> None:
        """Take over the flags of home, where all of them are written."""
        self._arrays["flags"][:, 0] = flags

    def process_state(self, process_ind: int) -> ProcessState:
        """Return the row of a process."""
        last, active_env, write_failed, starts = self._arrays["processes"][process_ind, : STARTS + 1].tolist()
        return ProcessState(starts, time.monotonic() - last if last else None, active_env, write_failed)

    def set_process_state(self, process_ind: int, state: ProcessState) -> None:
        """Take over the row of a process on another node, unless it is that of a predecessor."""
        row = self._arrays["processes"][process_ind]
        if state.starts == row[STARTS]:
            row[HEARTBEAT] = 0.0 if state.age is None else time.monotonic() - state.age
            row[ACTIVE_ENV], row[WRITE_FAILED] = state.active_env, state.write_failed

    def starts(self, process_ind: int) -> float:
        """Return how many processes the supervisor has started for this row."""
        return float(self._arrays["processes"][process_ind, STARTS])

    def set_starts(self, process_ind: int, starts: float) -> None:
        """Take over the starts that home counts; a new process forgets its predecessor's row."""
        if starts != self.starts(process_ind):
            self.reset_heartbeat(process_ind)
            self._arrays["processes"][process_ind, STARTS] = starts


class Schedule:
    """Tell when periodic work is due: every `steps` agent steps or, if `steps` is 0, every `period` seconds."""

    def __init__(self, period: float, steps: int, agent_steps: int):
        self._period, self._steps = period, steps
        self.start(agent_steps)

    def start_period(self) -> None:
        """Begin a new interval of seconds; that of steps stays."""
        self._next_time = time.monotonic() + self._period

    def due(self, agent_steps: int) -> bool:
        return agent_steps >= self._next_steps if self._steps else time.monotonic() >= self._next_time

    def start(self, agent_steps: int) -> None:
        """Begin a new interval. With `steps`, it ends at their next multiple."""
        self.start_period()
        self._next_steps = (agent_steps // self._steps + 1) * self._steps if self._steps else 0
