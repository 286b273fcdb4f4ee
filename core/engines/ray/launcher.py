"""The launcher of the Ray engine: Ray starts every process, finds a node for it, and tells when it ended.

Ray's own `max_restarts` is not used, because the supervisor must know of a successor before it starts: the supervisor
counts it and ends the episodes that its predecessor left open.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from core.common.console import log_to_stderr
from core.engines.ray.cluster import Cluster, ClusterError
from core.engines.ray.head import Answer, Head
from core.engines.ray.placement import Nodes, PlacementReservation, node_affinity
from core.engines.ray.process_handle import RayProcessHandle
from core.runtime.context import Context, Process

QUIET_WAIT = 2.0  # seconds of waiting for resources before a message says so


class RayLauncher:
    """Start processes as Ray actors, and report the nodes and processes that Ray loses."""

    def __init__(
        self,
        context: Context,
        processes: Mapping[str, Process],
        cluster: Cluster,
        reservation: PlacementReservation,
        head: Head,
    ):
        self._context, self._processes = context, processes
        self._options, self._params = context.options, context.options.ray
        self._cluster, self._reservation, self._head = cluster, reservation, head
        self._arguments: tuple[Any, ...] = ()  # of every worker, stored in Ray once
        self._handles: dict[tuple[str, int], RayProcessHandle] = {}  # newest process of each role and index
        self._without_node: set[tuple[str, int]] = set()  # those of which a message has said so
        self._last_answer: Answer | None = None  # of the head, whose nodes have been compared
        # Learners all of whose actors lack a node -> monotonic seconds since when.
        self._without_actors: dict[int, float] = {}

    # start ------------------------------------------------------------------------------------------------------------
    def prepare(self, interrupted: Callable[[], bool]) -> None:
        """Wait for the resources of the run. Raises ClusterError after `ray.placement_timeout`."""
        self._await_resources(interrupted)
        if not interrupted():
            self._arguments = self._worker_arguments()

    def _await_resources(self, interrupted: Callable[[], bool]) -> None:
        begin, limit, logged = time.monotonic(), self._params.placement_timeout, False
        while not self._reservation.is_ready(0.1) and not interrupted():
            waited, answer = time.monotonic() - begin, self._head.answer
            lack = None if answer is None else self._reservation.lack(answer.nodes)
            if self._head.silence() > self._params.head_timeout:
                raise ClusterError(self._head_is_silent())
            if limit is not None and waited > limit:
                raise ClusterError(
                    f"{lack}; no such node joined within ray.placement_timeout={limit:g} s"
                    if lack
                    else f"the run found no room within ray.placement_timeout={limit:g} s: it needs "
                    f"{self._reservation} in all, "
                    "and other jobs of the cluster hold them"
                )
            if not logged and waited > QUIET_WAIT:
                logged = True
                self._log(
                    f"waits for nodes that join: {lack}"
                    if lack
                    else f"waits for room on the cluster: {self._reservation} in all"
                )

    def _worker_arguments(self) -> tuple[Any, ...]:
        """Store what every worker is given. Start the trajectory server if actors may be on other nodes."""
        import ray

        from core.engines.ray.code_version import code_digests
        from core.engines.ray.remote_context import RemoteRunInfo
        from core.engines.ray.trajectory_server import TrajectoryServer

        context, server, run_info = ray.put(self._context), None, None
        if not self._cluster.is_local and self._context.memories:
            memory = self._context.memories[0]
            run_info = RemoteRunInfo(
                self._options, self._context.spec, self._context.roles, memory.layout, memory.window, code_digests()
            )
            server_options = ray.remote(TrajectoryServer).options(
                num_cpus=0,
                scheduling_strategy=node_affinity(self._cluster.home),
                max_restarts=-1,
                max_concurrency=100 + 2 * self._params.chunks_in_flight * self._options.num_actors,
            )
            # The context goes by value, because Ray warns at every start that an actor's argument by reference may
            # get lost.
            server = server_options.remote(self._context, self._params.parameters_period, os.getpid())
        # In a list, Ray passes on the reference of the context, which only workers on the node of main can open.
        return self._cluster.home, os.getpid(), [context], ray.put(run_info), server

    def start(self, role: str, index: int, threads: int) -> RayProcessHandle:
        """Ask Ray for a process."""
        import ray

        from core.engines.ray.worker import Worker

        name = f"{role} {index}"
        worker = ray.remote(Worker).options(**self._reservation.actor_options(name)).remote(role, index)
        arguments = (self._processes[role], *self._arguments, threads)
        self._handles[role, index] = handle = RayProcessHandle(worker, arguments, partial(self._node_is_missing, name))
        return handle

    # observe ----------------------------------------------------------------------------------------------------------
    def wait(self, waitables: list[Any]) -> None:
        """Wait at most 0.1 s for one of these references."""
        import ray

        ray.wait(waitables, timeout=0.1)

    def check(self) -> str | None:
        """Report nodes and processes that Ray lost or found. Return why the run must end, or None if it can go on."""
        if self._head.silence() > self._params.head_timeout:
            return self._head_is_silent()
        if (answer := self._head.answer) is not None and answer is not self._last_answer:
            if self._last_answer is not None:
                self._log_node_changes(self._last_answer.nodes, answer.nodes)
            self._last_answer = answer
        for key, handle in self._handles.items():
            if not handle.lacks_node():
                self._without_node.discard(key)
            elif key not in self._without_node:
                self._without_node.add(key)
                name = " ".join(map(str, key))
                self._log(f"{name} has no place now; the run goes on, and Ray starts it when a node has room")
        return self._learner_without_actors()

    def close(self) -> None:
        """Do nothing: the engine closes the cluster, and all processes with it."""

    def _node_is_missing(self, name: str, requested_at: float) -> bool:
        """Return True if the head has answered since `requested_at` that no node has room for this process."""
        answer = self._head.answer
        if answer is None or answer.time < requested_at:
            return False
        return not self._reservation.has_node(name, answer.bundles)

    def _head_is_silent(self) -> str:
        at_address = f"the Ray cluster at ray.address={self._params.address}"
        cluster = "Ray on this machine" if self._cluster.is_local else at_address
        return f"the head of {cluster} did not answer for {self._params.head_timeout:g} s (ray.head_timeout)"

    def _log_node_changes(self, previous: Nodes, current: Nodes) -> None:
        for change, nodes in (("was lost", previous.keys() - current), ("joined", current.keys() - previous)):
            for node in nodes:
                address = (previous | current)[node]["NodeManagerAddress"]
                self._log(f"node {address} ({node[:8]}) {change}, the cluster has {len(current)} now")

    def _learner_without_actors(self) -> str | None:
        """Return why the run must end if all actors of a learner lack a node for long: all learners wait for it."""
        count, limit, now = self._options.num_learners, self._params.learner_timeout, time.monotonic()
        for learner in range(count if self._options.mode == 1 else 0):
            actors = [key for key in self._handles if key[0] == "actor" and key[1] % count == learner]
            if not self._without_node.issuperset(actors):
                self._without_actors.pop(learner, None)
            elif limit is not None and now - self._without_actors.setdefault(learner, now) > limit:
                return (
                    f"learner {learner} has no actor: none of its {len(actors)} had a place for {limit:g} s "
                    "(ray.learner_timeout)"
                )
        return None

    def _log(self, message: str) -> None:
        log_to_stderr(f"supervisor: {message}")
