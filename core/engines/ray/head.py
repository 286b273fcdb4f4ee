"""A thread that queries the head of a Ray cluster, because a call to a head that is gone never returns."""

import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

from core.engines.ray.placement import Needs, Nodes, alive_nodes, free_resources

PERIOD = 2.0  # seconds between two queries
# Seconds that one call of `silence` adds at most, because time in which main itself was stopped does not count.
MAX_SILENCE_STEP = 1.0


class Answer(NamedTuple):
    """The newest answer of the head."""

    time: float  # of the query, in monotonic seconds
    nodes: Nodes  # those that are alive
    bundles: dict[int, str]  # number of a bundle of the placement group -> id of its node, of bundles that have one
    free: Needs  # what each node has left, by its id


class Head:
    """Query nodes and bundles until `close`. `answer` is None before the first answer."""

    def __init__(self, placement_group: Any):
        self.answer: Answer | None = None
        self._placement_group, self._closed = placement_group, threading.Event()
        self._last_answer: Answer | None = None
        self._last_check, self._silence = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._query, name="head", daemon=True)
        self._thread.start()

    def silence(self) -> float:
        """Return the seconds without an answer, as counted at the calls of this method."""
        now = time.monotonic()
        self._silence += min(now - self._last_check, MAX_SILENCE_STEP)
        if self.answer is not self._last_answer:
            self._silence = 0.0
        self._last_answer, self._last_check = self.answer, now
        return self._silence

    def close(self) -> None:
        """End the thread. Must be called before Ray is shut down, because Ray would start again for a query."""
        self._closed.set()
        self._thread.join(timeout=1.0)

    def _query(self) -> None:
        from ray.util import placement_group_table

        while not self._closed.is_set():
            begin = time.monotonic()
            with suppress(Exception):  # the errors for a head that is gone vary; its silence is what counts
                nodes = alive_nodes()
                table = {} if self._placement_group is None else placement_group_table(self._placement_group)
                bundle_nodes = table.get("bundles_to_node_id", {})
                bundles = {number: node for number, node in bundle_nodes.items() if node in nodes}
                free = {node: left for node, left in free_resources().items() if node in nodes}
                self.answer = Answer(begin, nodes, bundles, free)
            self._closed.wait(PERIOD)
