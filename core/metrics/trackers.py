"""Experiment trackers as further readers of the logger's stream: Weights & Biases and MLflow, each off unless a project is named.

They are other people's code and may wait for a network, so a thread of the logger feeds them: a tracker that falls behind or fails
loses periods, which are counted, and keeps neither the logger nor the run.
"""

import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from core.common.settings import dotted
from core.runtime.log_buffers import Record
from core.runtime.options import RunOptions

WAITING_PERIODS = 500  # that a tracker may be behind


class Tracker(Protocol):
    """Made, fed and closed by one thread. Whatever it raises is reported once and counted."""

    def write(self, records: list[Record]) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it on the disk, in the run's log folder, until `wandb sync`."""

    def __init__(self, options: RunOptions):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing leaves this machine but what was asked for
        import wandb
        self._run = wandb.init(project=options.logger.wandb, name=options.signature, id=options.signature, resume="allow",
                               dir=str(options.log_folder), config=options.to_dict())
        self._run.define_metric("*", step_metric="agent_steps")  # evaluations come late: its own step may not go back

    def write(self, records: list[Record]) -> None:
        for step, values in by_step(records).items():
            self._run.log({"agent_steps": step, **values})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """A run of an MLflow experiment; without MLFLOW_TRACKING_URI in logs/mlflow.db. A continued run continues there too."""

    def __init__(self, options: RunOptions):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient
        self._metric = Metric
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{options.log_folder.parent.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=place)
        name = options.logger.mlflow
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = self._client.search_runs([number], filter_string=f"tags.signature = '{options.signature}'", max_results=1)
        self._run_id = (found[0] if found else
                        self._client.create_run(number, run_name=options.signature, tags={"signature": options.signature})).info.run_id
        if not found:
            params = [Param(key, str(value)[:500]) for key, value in dotted(options.to_dict()).items()]
            for start in range(0, len(params), 100):  # of a request
                self._client.log_batch(self._run_id, params=params[start:start + 100])

    def write(self, records: list[Record]) -> None:
        metrics = [self._metric(record.name, record.value, int(record.time * 1_000), record.step)
                   for record in records if math.isfinite(record.value)]
        for start in range(0, len(metrics), 1_000):
            self._client.log_batch(self._run_id, metrics=metrics[start:start + 1_000])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class TrackerThread:
    """The thread in which a tracker lives. `errors` counts periods that it lost."""

    def __init__(self, name: str, make: Callable[[], Tracker]):
        self.errors = 0
        self._name, self._make = name, make
        self._periods: queue.Queue[list[Record] | None] = queue.Queue(WAITING_PERIODS)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, records: list[Record]) -> None:
        """Never waits."""
        try:
            self._periods.put_nowait(records)
        except queue.Full:
            self.errors += 1

    def close(self, timeout: float) -> None:
        """Let it finish, for so many seconds at most."""
        try:
            self._periods.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        tracker = self._guarded(self._make)
        while (records := self._periods.get()) is not None:
            if tracker is None:
                self.errors += 1
            else:
                self._guarded(tracker.write, records)
        if tracker is not None:
            self._guarded(tracker.close)

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            self.errors += 1
            if self.errors == 1:
                print(f"warning: {self._name} failed ({type(error).__name__}: {error}); training goes on, losses are counted",
                      file=sys.stderr)
            return None


def feeders(options: RunOptions) -> list[TrackerThread]:
    """One for each tracker that the options name a project for."""
    makers: dict[str, Callable[[RunOptions], Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}
    return [TrackerThread(name, partial(make, options)) for name, make in makers.items() if getattr(options.logger, name) is not None]


def by_step(records: Iterable[Record]) -> dict[int, dict[str, float]]:
    """step -> name -> value, steps in order."""
    found: dict[int, dict[str, float]] = {}
    for record in sorted(records, key=lambda record: record.step):
        found.setdefault(record.step, {})[record.name] = record.value
    return found
