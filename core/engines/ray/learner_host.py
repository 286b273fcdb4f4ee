"""The host of a learner on another node than home: the process that owns what main owns for the learners at home.

It allocates the learner's memory and this node's parameters, counters, run state and log rings. The learner, and those
of its actors that Ray places on this node, open them as they would open main's. The host is also the trajectory server
of this learner's actors elsewhere.

The *mirror* keeps counters and run state equal to home's. Every value in them has one writer, as at home: a process of
this node, or the mirror, which writes what other nodes own.

- To home: the totals of this learner and its actors, the rows of their processes, and their log records.
- From home: the totals of all other learners, scores, flags (stop, checkpoint requests), and how often the supervisor
  has started each process.

Monotonic clocks of two machines differ, and their system clocks may. Therefore ages are sent in place of times.
"""

import asyncio
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray

from core.checkpoint.run_checkpoint import CheckpointError
from core.common.console import log_to_stderr
from core.common.exit_codes import TRAINING_FAILED
from core.common.processes import set_process_name
from core.distributed.learner_group import Rendezvous
from core.engines.ray.cluster import Sweeper
from core.engines.ray.remote_context import RemoteRunInfo
from core.engines.ray.trajectory_server import PIECE_BYTES, NodeReport, RunSnapshot, TrajectoryServer
from core.engines.ray.worker import Host, WritableCopy, check_code
from core.memory import Memory
from core.runtime.context import Context
from core.runtime.log_buffers import LogRings, Record
from core.runtime.parameter_store import ParameterStore
from core.runtime.run_state import RunCounters, RunState

PERIOD = 0.05  # seconds between two exchanges with home


class HostPlan(NamedTuple):
    """The parts of main's context that a host needs."""

    run_info: RemoteRunInfo
    make_memory: Callable[[], Memory]
    num_parameters: int
    run: RunSnapshot
    rendezvous: Rendezvous
    resume_from: Path | None
    initial_weights: Path | None
    token: Path  # a file that exists on nodes which see the run's folder


class LearnerHost(TrajectoryServer):
    """A Ray actor. `prepare` must be called first, then `mirror`, which ends with the process."""

    def __init__(self, learner: int, plan: HostPlan, home: Any):
        """Do nothing yet, because Ray reports an error of a method better.

        Args:
            plan: what main has decided.
            home: handle of the trajectory server at home.
        """
        self._learner, self._plan, self._home = learner, plan, home
        self._exchanging = asyncio.Lock()
        self._sweeper: Sweeper | None = None  # of this node's own folder, if it does not see the run's

    def __repr__(self) -> str:
        return f"host of learner {self._learner}"

    async def prepare(self) -> Host:
        """Allocate everything, and return how processes of this node reach it.

        Raises:
            CodeMismatchError: this node has another version of the project.
            MemoryError: this node has too little memory.
        """
        set_process_name(f"host {self._learner}")
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        check_code(self._plan.run_info.code, address)
        # In a thread, because files may have to be fetched, and Ray's calls would block this one's event loop.
        context = await asyncio.to_thread(self._make_context)
        super().__init__(context)
        self._mirror = Mirror(context, self._learner)
        self._mirror.restore(self._plan.run)
        return Host(ray.get_runtime_context().get_node_id(), os.getpid(), [ray.put(WritableCopy(context))], None)

    def _make_context(self) -> Context:
        plan, info = self._plan, self._plan.run_info
        context = Context(
            info.options,
            info.spec,
            info.roles,
            {self._learner: plan.make_memory()},
            ParameterStore(plan.num_parameters),
            RunCounters(info.options.num_actors, info.options.num_learners),
            RunState(len(info.roles)),
            LogRings(len(info.roles)),
            plan.resume_from,
            plan.initial_weights,
            rendezvous=plan.rendezvous,
        )
        return context if plan.token.exists() else self._with_own_folder(context)

    def _with_own_folder(self, context: Context) -> Context:
        """Return the context of a node that does not see the run's folder: files are fetched from home and sent there.

        The folder is removed by `close`, and otherwise by its sweeper when this process ends.
        """
        root = Path(tempfile.mkdtemp(prefix="learner_host_"))
        self._sweeper = Sweeper(str(root))
        resume_from = context.resume_from
        if resume_from is not None:
            resume_from = root / resume_from.name
            resume_from.mkdir()
            for name in ("manifest.json", f"learner_{self._learner}.pt", f"memory_{self._learner}.pt"):
                fetch_file(self._home, name, resume_from / name)
        options = dataclasses.replace(context.options, root=str(root))
        send = partial(send_home, self._home)
        return dataclasses.replace(context, options=options, resume_from=resume_from, send_home=send)

    async def mirror(self) -> None:
        """Exchange with home until this process ends. End it if home is silent for `ray.learner_timeout`.

        Ray restarts the server at home, so its errors are tried again. One that home itself raised is logged once. Any
        other error ends the process too, because nobody at home reads the result of this call.
        """
        limit, last_answer, logged = self._context.options.ray.learner_timeout, time.monotonic(), False
        while True:
            try:
                await asyncio.wait_for(self.exchange_with_home(), limit)
                last_answer = time.monotonic()
            except (ray.exceptions.RayError, TimeoutError) as error:
                if isinstance(error, ray.exceptions.RayTaskError) and not logged:
                    logged = True
                    log_to_stderr(
                        f"home refuses the reports of learner {self._learner}'s node, which tries on: {error}"
                    )
                if limit is not None and time.monotonic() - last_answer >= limit:
                    log_to_stderr(f"learner {self._learner}'s node ends: home was silent for {limit:g} s")
                    os._exit(TRAINING_FAILED)
            except Exception as error:
                log_to_stderr(f"learner {self._learner}'s node ends: {error!r}")
                os._exit(TRAINING_FAILED)
            await asyncio.sleep(PERIOD)

    async def exchange_with_home(self) -> None:
        """Send a report, and take over the answer."""
        async with self._exchanging:
            self._mirror.follow(await self._home.exchange.remote(self._mirror.report()))

    def close(self) -> None:
        """Remove this node's own folder."""
        if self._sweeper is not None:
            self._sweeper.close()


class Mirror:
    """The mirror on the node of a learner."""

    def __init__(self, context: Context, learner: int):
        self._context, self._learner = context, learner
        self._processes = [
            process_ind
            for process_ind, (role, index) in enumerate(context.roles)
            if role in ("actor", "learner") and index % context.options.num_learners == learner
        ]
        self._unconfirmed: dict[int, list[Record]] = {}  # records that home has not confirmed
        self._number = 0  # of these records

    def restore(self, run: RunSnapshot) -> None:
        """Take over everything at the start, this learner's own counts too."""
        self.follow(run)
        self._context.counters.set_totals(self._learner, run.totals[self._learner])

    def report(self) -> NodeReport:
        """Return the next report. Records of one that `follow` has not confirmed are sent again."""
        context, now = self._context, self._context.logs.now()
        self._number += not self._unconfirmed
        for process_ind in () if self._unconfirmed else self._processes:
            records, dropped = context.logs.drain_process(process_ind)
            if dropped:
                log_to_stderr(f"{dropped} log records of learner {self._learner}'s node were lost: home was silent")
            if records:
                self._unconfirmed[process_ind] = records
        return NodeReport(
            self._learner,
            context.counters.totals()[self._learner],
            context.memories[self._learner].size(),
            {process_ind: context.run_state.process_state(process_ind) for process_ind in self._processes},
            {
                process_ind: [record._replace(time=now - record.time) for record in records]
                for process_ind, records in self._unconfirmed.items()
            },
            self._number,
        )

    def follow(self, run: RunSnapshot) -> None:
        """Take over what home has answered to a report."""
        self._unconfirmed = {}
        for learner, totals in enumerate(run.totals):
            if learner != self._learner:
                self._context.counters.set_totals(learner, totals)
        self._context.counters.set_scores_row(run.scores)
        self._context.run_state.set_flags(run.flags)
        for process_ind, starts in run.starts.items():
            self._context.run_state.set_starts(process_ind, starts)


def send_home(server: Any, path: Path) -> None:
    """Move a file or folder of this node's checkpoint folder to that at home, piece by piece. Raises CheckpointError.

    Args:
        server: handle of the trajectory server at home.
        path: file or folder, which is removed here.
    """
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            name, offset = str(file.relative_to(path.parent)), 0
            with file.open("rb") as content:
                while (piece := content.read(PIECE_BYTES)) or not offset:
                    ray.get(server.write_piece.remote(name, offset, piece))
                    offset += len(piece) or 1
            file.unlink()
        ray.get(server.adopt.remote(path.name))
        if path.is_dir():
            path.rmdir()
    except (OSError, ray.exceptions.RayError) as error:
        raise CheckpointError(f"cannot send {path.name} to the node of main: {error}") from error


def fetch_file(server: Any, name: str, target: Path) -> None:
    """Copy a file of the checkpoint at home to `target`, piece by piece. Do nothing if home has none.

    Must not be called on the event loop of an asynchronous actor.
    """
    offset = 0
    # not by ray.get, which warns in every thread of an asynchronous actor
    while piece := server.read_piece.remote(name, offset).future().result():
        with open(target, "ab") as file:
            file.write(piece)
        offset += len(piece)
