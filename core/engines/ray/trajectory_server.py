"""The ingest: on the learner's node, the one writer of the rings of all actors on other nodes, and their source of news."""

import asyncio
import time
from typing import Any

import numpy as np
import ray

from core.common.processes import idle_delays
from core.engines import process_main
from core.engines.ray.connection import News
from core.runtime.context import Context
from core.trajectory.chunk_codec import ChunkFormat
from core.trajectory.writer import ChunkWriter

Records = list[tuple[dict[str, float], int]]


class Sender:
    """An actor on another node, in its present life."""

    def __init__(self, life: int):
        self.life, self.turn = life, asyncio.Lock()  # chunks are stored in the order they were sent
        self.writer: ChunkWriter | None = None
        self.bytes = self.steps = 0
        self.reported = time.monotonic()


class StaleSender(RuntimeError):
    """An actor that another has replaced."""


class TrajectoryServer:
    """Methods run interleaved on one thread; each answers with News."""

    def __init__(self, context: Context, parameters_period: float, main: int):
        process_main.end_with(main)
        self._context, self._period, memory = context, parameters_period, context.memories[0]
        self._format = ChunkFormat(memory.layout, memory.window.length)
        self._senders: dict[int, Sender] = {}
        self._version, self._offered, self._parameters = 0, float("-inf"), list[Any]()

    def __repr__(self) -> str:
        return "ingest"

    async def hello(self, index: int) -> tuple[int, News]:
        """A new life of this actor, which has shown no sign of it yet; what its last one still has on the way is refused."""
        last = self._senders.get(index)
        self._senders[index] = Sender(last.life + 1 if last else 0)
        self._context.run_state.reset_heartbeat(self._context.process_ind("actor", index))  # of its last life's chunks
        return self._senders[index].life, self._news(index, [])

    async def put(self, index: int, life: int, buffer: np.ndarray, records: Records) -> News:
        """Store a chunk once its ring has room."""
        sender = self._sender(index, life)
        async with sender.turn:
            if await self._room(index, life):
                steps, episodes = self._store(index, sender, buffer)
                self._context.counters.count_agent_steps(index, steps, episodes)
                self._count(index, sender, len(buffer), steps)
        self._beat(index)
        return self._news(index, records)

    async def listen(self, index: int, life: int, records: Records) -> News:
        """For an actor that has nothing to send."""
        self._sender(index, life)
        self._beat(index)
        return self._news(index, records)

    def _sender(self, index: int, life: int) -> Sender:
        sender = self._senders.get(index)
        if sender is None or sender.life != life:
            raise StaleSender(f"actor {index} was replaced by another, or the ingest was")
        return sender

    async def _room(self, index: int, life: int) -> bool:
        """Wait as a writer beside the learner would. False: the run was stopped meanwhile."""
        delays, sender = idle_delays(), self._sender(index, life)
        while sender.writer is not None and not (sender.writer.has_room() or self._context.rate_limiter.is_warming_up):
            if self._context.run_state.stopped:
                return False
            self._beat(index)
            await asyncio.sleep(next(delays))
            self._sender(index, life)
        return True

    def _store(self, index: int, sender: Sender, buffer: np.ndarray) -> tuple[int, int]:
        """Agent steps and ends of episodes in it. The writer is made with the first chunk: it ends what the last life left open."""
        chunk = self._format.unpack(buffer)
        if sender.writer is None:
            memory, number = self._context.memory_of(index)
            sender.writer = memory.writer(number)
        return sender.writer.store(chunk), int(chunk.fields["last"][:-1].sum())

    def _count(self, index: int, sender: Sender, num_bytes: int, steps: int) -> None:
        sender.bytes, sender.steps = sender.bytes + num_bytes, sender.steps + steps
        if sender.steps and time.monotonic() - sender.reported >= self._context.options.actor.log_period:
            self._context.report("actor", index, {"bytes_per_agent_step": sender.bytes / sender.steps})
            sender.bytes, sender.steps, sender.reported = 0, 0, time.monotonic()

    def _news(self, index: int, records: Records) -> News:
        context, counters = self._context, self._context.counters
        for values, step in records:
            context.logs.write(context.process_ind("actor", index), values, step)
        self._offer()
        return News(counters.agent_steps, counters.inserted, counters.sampled, context.run_state.stopped, self._version, self._parameters)

    def _beat(self, index: int) -> None:
        self._context.run_state.heartbeat(self._context.process_ind("actor", index))

    def _offer(self) -> None:
        """Put the newest version where every node can fetch it once."""
        if self._context.parameters.version > self._version and time.monotonic() - self._offered >= self._period:
            self._version, values = self._context.parameters.read()
            self._parameters, self._offered = [ray.put(values)], time.monotonic()
