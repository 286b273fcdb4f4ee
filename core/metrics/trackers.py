"""Send the logger's records to experiment trackers: Weights & Biases and MLflow, each off unless a project is named.

Trackers are foreign code and may wait for a network, so each runs in a thread of the logger. A tracker that is too slow
or fails loses periods, which are counted; it blocks neither the logger nor the run.
"""

import math
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from core.common.console import log_to_stderr
from core.common.foreign_code import described
from core.common.settings import dotted
from core.runtime.log_buffers import Record
from core.runtime.options import RunOptions

MAX_WAITING_PERIODS = 500  # that a tracker may be behind
MAX_PARAM_CHARACTERS = 500  # of an MLflow parameter


class WandbTracker:
    """A run of Weights & Biases. WANDB_MODE=offline keeps it in the run's log folder until `wandb sync`."""

    def __init__(self, options: RunOptions):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # sends nothing that was not asked for
        import wandb

        self._run = wandb.init(
            project=options.logger.wandb,
            name=options.signature,
            id=options.signature,
            resume="allow",
            dir=str(options.log_folder),
            config=options.to_dict(),
        )
        # wandb's own step may not decrease, and evaluations arrive late
        self._run.define_metric("*", step_metric="agent_steps")

    def write(self, records: list[Record]) -> None:
        steps: dict[int, dict[str, float]] = {}
        for record in sorted(records, key=lambda record: record.step):
            steps.setdefault(record.step, {"agent_steps": record.step})[record.name] = record.value
        for values in steps.values():
            self._run.log(values)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """A run of an MLflow experiment, stored in logs/mlflow.db unless MLFLOW_TRACKING_URI names a server.

    A continued run of the framework continues its MLflow run, which is found by the tag `signature`.
    """

    def __init__(self, options: RunOptions):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        database = f"sqlite:///{options.log_folder.parent.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or database)
        name, signature = options.logger.mlflow, options.signature
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                self._client.create_experiment(name)
            except Exception:  # unless a run that began at the same time has made it
                if self._client.get_experiment_by_name(name) is None:
                    raise
            experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id
        runs = self._client.search_runs([experiment_id], filter_string=f"tags.signature = '{signature}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        run = self._client.create_run(experiment_id, run_name=signature, tags={"signature": signature})
        self._run_id = run.info.run_id
        params = [Param(key, str(value)[:MAX_PARAM_CHARACTERS]) for key, value in dotted(options.to_dict()).items()]
        self._client.log_batch(self._run_id, params=params)

    def write(self, records: list[Record]) -> None:
        metrics = [
            self._metric(record.name, record.value, int(record.time * 1_000), record.step)
            for record in records
            if math.isfinite(record.value)
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


Tracker = WandbTracker | MlflowTracker


class TrackerThread:
    """The thread that makes and calls a tracker. `errors` counts the periods that were lost."""

    def __init__(self, name: str, make: Callable[[], Tracker]):
        self.errors = 0
        self._name, self._make = name, make
        self._periods: queue.SimpleQueue[list[Record] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, records: list[Record]) -> None:
        """Queue the records of a period without waiting."""
        if self._periods.qsize() < MAX_WAITING_PERIODS:
            self._periods.put(records)
        else:
            self.errors += 1

    def end(self) -> None:
        """Let the tracker finish once it has the periods that wait."""
        self._periods.put(None)

    def join(self, timeout: float) -> None:
        """Wait at most this many seconds until the tracker has finished."""
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
        """Return the function's result, or None after an exception. The first exception is reported."""
        try:
            return function(*arguments)
        except Exception as error:
            self.errors += 1
            if self.errors == 1:
                log_to_stderr(
                    f"warning: {self._name} failed ({described(error)}); training goes on, losses are counted"
                )
            return None


def make_tracker_threads(options: RunOptions) -> list[TrackerThread]:
    """Return a thread for each tracker for which the options name a project."""
    trackers: dict[str, Callable[[RunOptions], Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}
    return [
        TrackerThread(name, partial(make, options))
        for name, make in trackers.items()
        if getattr(options.logger, name) is not None
    ]
