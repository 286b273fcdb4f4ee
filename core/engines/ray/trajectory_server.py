"""The trajectory server: on the node of a learner, the one writer of the rings of this learner's actors elsewhere.

Every answer carries the status of the run, so actors need no other call. The server at home is also what the nodes of
other learners (core/engines/ray/learner_host.py) exchange counts and files with.
"""

import asyncio
import os
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import ray

from core.common.files import TEMPORARY, sync_folder
from core.common.processes import idle_delays
from core.engines.ray.remote_context import Records, RunStatus
from core.engines.ray.worker import end_with
from core.runtime.context import Context
from core.runtime.log_buffers import Record
from core.runtime.run_state import ProcessState
from core.trajectory.writer import Chunk, ChunkWriter

PIECE_BYTES = 8 << 20  # of a checkpoint's file, sent at once, so that neither side holds a replay twice


class NodeReport(NamedTuple):
    """The values that a learner's node sends home."""

    learner: int
    totals: dict[str, int]
    replay_steps: int
    processes: dict[int, ProcessState]  # by process_ind
    records: dict[int, list[Record]]  # by process_ind; their times are ages in seconds
    number: int  # of the records; a report that repeats them has the same


class RunSnapshot(NamedTuple):
    """The values that home sends back to a learner's node."""

    totals: list[dict[str, int]]  # of every learner
    scores: list[float]
    flags: list[int]
    starts: dict[int, float]  # of the node's processes, by process_ind


def snapshot(context: Context, processes: Iterable[int] = ()) -> RunSnapshot:
    """Return what the learner's node that has these processes must know of the run. Called at home."""
    counters, run_state = context.counters, context.run_state
    starts = {process_ind: run_state.starts(process_ind) for process_ind in processes}
    return RunSnapshot(counters.totals(), counters.scores_row(), run_state.flags(), starts)


def accept(context: Context, report: NodeReport) -> None:
    """Take over what a learner's node has reported. Called at home."""
    context.counters.set_totals(report.learner, report.totals)
    context.counters.record_replay_steps(report.learner, report.replay_steps)
    for process_ind, state in report.processes.items():
        context.run_state.set_process_state(process_ind, state)
    now = context.logs.now()
    for process_ind, records in report.records.items():
        context.logs.append(process_ind, [record._replace(time=now - record.time) for record in records])


class Sender:
    """An actor on another node. A successor of the actor has the next generation."""

    def __init__(self, generation: int):
        self.generation = generation
        self.lock = asyncio.Lock()  # chunks are stored in the order in which they were sent
        self.writer: ChunkWriter | None = None
        self.bytes = self.steps = 0  # since the last report
        self.reported = time.monotonic()


class StaleSenderError(RuntimeError):
    """The sender has been replaced by a successor."""


class TrajectoryServer:
    """A Ray actor whose methods run interleaved on one thread."""

    def __init__(self, context: Context, main: int | None = None):
        """Serve the memories of this context.

        Args:
            context: shared memory of this node.
            main: process with which this one ends; None if that is not on this node.
        """
        if main is not None:
            end_with(main)
        self._context, self._period = context, context.options.ray.parameters_period
        self._senders: dict[int, Sender] = {}
        self._accepted: dict[int, int] = {}  # by learner: number of the records that are logged
        self._version, self._published, self._parameters = 0, float("-inf"), list[Any]()

    def __repr__(self) -> str:
        return "trajectory server"

    async def register(self, index: int) -> tuple[int, RunStatus]:
        """Return the generation of a new process of this actor. Later chunks of its predecessor are refused."""
        previous = self._senders.get(index)
        self._senders[index] = Sender(previous.generation + 1 if previous else 0)
        # A chunk of the predecessor may have counted as a heartbeat of the new process, which has shown none yet.
        self._context.run_state.reset_heartbeat(self._context.process_ind("actor", index))
        return self._senders[index].generation, self._status(index, [])

    async def put(self, index: int, generation: int, chunk: Chunk, records: Records) -> RunStatus:
        """Store a chunk once its ring has room. Drop it if the run stops before that."""
        sender = self._sender(index, generation)
        async with sender.lock:
            if await self._await_room(index, generation):
                steps, episodes = self._store(index, sender, chunk)
                self._context.counters.count_agent_steps(index, steps, episodes)
                self._report_bytes(index, sender, chunk.nbytes, steps)
        self._heartbeat(index)
        return self._status(index, records)

    async def report(self, index: int, generation: int, records: Records) -> RunStatus:
        """Take the records of an actor that has no chunk to send."""
        self._sender(index, generation)
        self._heartbeat(index)
        return self._status(index, records)

    # other nodes, at home ---------------------------------------------------------------------------------------------
    async def exchange(self, report: NodeReport) -> RunSnapshot:
        """Take over what the node of a learner reports, and return what it must know of the run."""
        if self._accepted.get(report.learner) == report.number:  # the answer was lost
            report = report._replace(records={})
        accept(self._context, report)
        self._accepted[report.learner] = report.number
        return snapshot(self._context, report.processes)

    async def write_piece(self, name: str, offset: int, piece: bytes) -> None:
        """Write a piece of a checkpoint's file, or of the file of a folder (folder/file), under a temporary name."""
        path = self._context.options.checkpoint_folder / f"{TEMPORARY}{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    async def adopt(self, name: str) -> None:
        """Give a file or folder, all pieces of which have come, its name. A checkpoint that is there already stays."""
        folder = self._context.options.checkpoint_folder
        if not (folder / name).is_dir():
            os.replace(folder / f"{TEMPORARY}{name}", folder / name)
            sync_folder(folder)

    async def read_piece(self, name: str, offset: int) -> bytes:
        """Return a piece of a file of the checkpoint that the run continues from; empty at the file's end."""
        assert self._context.resume_from is not None
        try:
            with open(self._context.resume_from / name, "rb") as file:
                file.seek(offset)
                return file.read(PIECE_BYTES)
        except FileNotFoundError:  # a run of another number of learners has no such file
            return b""

    # chunks -----------------------------------------------------------------------------------------------------------
    def _sender(self, index: int, generation: int) -> Sender:
        sender = self._senders.get(index)
        if sender is None or sender.generation != generation:
            raise StaleSenderError(f"actor {index} was replaced by another, or the trajectory server was")
        return sender

    async def _await_room(self, index: int, generation: int) -> bool:
        """Wait until the ring has room for a chunk. Return False if the run stops first.

        The actor itself asks the rate limiter, with the counters of the newest answer.
        """
        delays, sender = idle_delays(), self._sender(index, generation)
        while sender.writer is not None and not (sender.writer.has_room() or self._context.rate_limiter.is_warming_up):
            if self._context.run_state.stopped:
                return False
            self._heartbeat(index)
            await asyncio.sleep(next(delays))
            self._sender(index, generation)
        return True

    def _store(self, index: int, sender: Sender, chunk: Chunk) -> tuple[int, int]:
        """Write a chunk into the ring. Return its agent steps and the number of episodes that end in it."""
        if sender.writer is None:  # not made earlier, because it ends the episodes that a predecessor left open
            memory, number = self._context.memory_of(index)
            sender.writer = memory.writer(number)
        return sender.writer.store(chunk), int(chunk.fields["last"][:-1].sum())

    def _report_bytes(self, index: int, sender: Sender, num_bytes: int, steps: int) -> None:
        sender.bytes, sender.steps = sender.bytes + num_bytes, sender.steps + steps
        if sender.steps and time.monotonic() - sender.reported >= self._context.options.logger.period:
            self._context.report("actor", index, {"bytes_per_agent_step": sender.bytes / sender.steps})
            sender.bytes, sender.steps, sender.reported = 0, 0, time.monotonic()

    def _status(self, index: int, records: Records) -> RunStatus:
        """Log the records of an actor, publish new parameters if they are due, and return the status of the run."""
        context, counters = self._context, self._context.counters
        for values, step in records:
            context.logs.write(context.process_ind("actor", index), values, step)
        if context.parameters.version > self._version and time.monotonic() - self._published >= self._period:
            self._version, parameters = context.parameters.read()
            self._parameters, self._published = [ray.put(parameters)], time.monotonic()  # every node fetches them once
        totals = {"agent_steps": counters.agent_steps, "inserted": counters.inserted, "sampled": counters.sampled}
        return RunStatus(totals, context.run_state.flags(), self._version, self._parameters)

    def _heartbeat(self, index: int) -> None:
        self._context.run_state.heartbeat(self._context.process_ind("actor", index))
