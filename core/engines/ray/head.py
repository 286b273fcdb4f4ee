"""Questions to the head of a Ray cluster, asked in a thread of their own: a call to a head that is gone never returns."""

import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

PERIOD = 2.0        # seconds between two questions
LONGEST_TICK = 1.0  # seconds that one look adds to the silence at most: time in which main itself was stopped does not count


class Answer(NamedTuple):
    """What the head said last."""

    time: float                   # when it was asked, in monotonic seconds
    nodes: dict[str, dict]        # Ray's entry of each node that is up, by its id
    bundles: dict[int, str]       # number of each part of the placement group -> id of the node that has it


class Head:
    """Asks for nodes and for the places of a placement group's parts until it is closed. `answer` is None before the first answer."""

    def __init__(self, group: Any):
        self.answer: Answer | None = None
        self._group, self._closed = group, threading.Event()
        self._seen: Answer | None = None
        self._looked, self._silence = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._ask, name="head", daemon=True)
        self._thread.start()

    def silence(self) -> float:
        """Return the seconds without an answer, counted between calls of this method."""
        now = time.monotonic()
        self._silence = 0.0 if self.answer is not self._seen else self._silence + min(now - self._looked, LONGEST_TICK)
        self._seen, self._looked = self.answer, now
        return self._silence

    def close(self) -> None:
        """Ask no more. Must be called before Ray is shut down, because Ray would start anew for a question."""
        self._closed.set()
        self._thread.join(timeout=1.0)

    def _ask(self) -> None:
        while not self._closed.is_set():
            started = time.monotonic()
            with suppress(Exception):  # what Ray raises for a head that is gone differs with the moment; the silence is what counts
                self.answer = Answer(started, *self._state())
            self._closed.wait(PERIOD)

    def _state(self) -> tuple[dict[str, dict], dict[int, str]]:
        import ray
        from ray.util import placement_group_table
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        table = {} if self._group is None else placement_group_table(self._group)
        return nodes, {number: node for number, node in table.get("bundles_to_node_id", {}).items() if node in nodes}
