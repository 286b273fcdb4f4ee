"""The launcher of the Ray engine: Ray starts every process, finds a node for it, and tells when it ended.

Ray's own `max_restarts` is not used, because the supervisor must know of a successor before it starts: the supervisor
counts it and ends the episodes that its predecessor left open.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from core.common.console import log_to_stderr
from core.common.files import TEMPORARY
from core.engines.launcher import ExitStatus, Launcher, ProcessHandle, ReportedError
from core.engines.ray.cluster import Answer, Cluster, ClusterError, Head, Nodes
from core.engines.ray.learner_host import HostPlan, LearnerHost
from core.engines.ray.placement import (
    PlacementReservation,
    learner_groups,
    learners_with_room,
    node_affinity,
    number_with_room,
)
from core.engines.ray.remote_context import RemoteRunInfo
from core.engines.ray.trajectory_server import TrajectoryServer, snapshot
from core.engines.ray.worker import Host, Worker, WritableCopy, code_digests
from core.engines.run_end import exit_code_of
from core.runtime.context import Context, Process

COLLECT_TIMEOUT = 2.0  # seconds for the last answers of other nodes
KILL_TIMEOUT = 10.0  # seconds that a killed process may take to end
QUIET_WAIT = 2.0  # seconds of waiting for resources before a message says so


class RayLauncher(Launcher):
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
        self._hosts: dict[int, Host] = {}  # by learner
        self._learner_hosts: list[Any] = []  # handles of those on other nodes
        self._run_info: Any = None  # for every worker on another node than its host, stored in Ray once
        self._handles: dict[tuple[str, int], RayProcessHandle] = {}  # newest process of each role and index
        self._without_node: set[tuple[str, int]] = set()  # those of which a message has said so
        self._last_answer: Answer | None = None  # of the head, whose nodes have been compared
        # Learners all of whose actors lack a node -> monotonic seconds since when.
        self._without_actors: dict[int, float] = {}

    @property
    def address(self) -> str:
        """This node's address in the cluster; loopback if all learners are at home."""
        if len(self._context.memories) == self._options.num_learners:
            return super().address
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    # start ------------------------------------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Wait for the resources of the run. Raises ClusterError after `ray.placement_timeout`."""
        self._await_resources()
        if not self._context.run_state.interrupted:
            self._make_hosts()

    def _await_resources(self) -> None:
        begin, limit, logged = time.monotonic(), self._params.placement_timeout, False
        while not self._reservation.is_ready(0.1) and not self._context.run_state.interrupted:
            waited, answer = time.monotonic() - begin, self._head.answer
            lack = None if answer is None else self._reservation.lack(answer.nodes)
            if self._head.silence() > self._params.head_timeout:
                raise ClusterError(self.head_is_silent())
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

    def _make_hosts(self) -> None:
        """Make this process the host of the learners at home, and start one for each learner on another node.

        Trajectory servers are started if actors may be on other nodes.
        """
        context, memories = self._context, self._context.memories
        home = Host(self._cluster.home, os.getpid(), [ray.put(WritableCopy(context))], None)
        info = None
        if not self._cluster.is_local and memories:
            info = RemoteRunInfo(
                self._options, context.spec, context.roles, memories[0].layout, memories[0].window, code_digests()
            )
            server_options = ray.remote(TrajectoryServer).options(
                num_cpus=0,
                scheduling_strategy=node_affinity(self._cluster.home),
                max_restarts=-1,
                max_concurrency=self._max_calls(),
            )
            # The context goes by value, because Ray warns at every start that an actor's argument by reference may
            # get lost.
            home = home._replace(server=server_options.remote(context, os.getpid()))
        self._run_info = ray.put(info)
        self._hosts = dict.fromkeys(memories or [0], home)
        if info is not None and len(memories) < self._options.num_learners:
            self._start_hosts(info, home.server)

    def _start_hosts(self, info: RemoteRunInfo, home: Any) -> None:
        """Start a host on the node of each learner that is not at home. Raises ClusterError if one cannot start."""
        context, begin, handles = self._context, time.monotonic(), dict[int, Any]()
        self._options.log_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=TEMPORARY, dir=self._options.log_folder) as token:
            for learner, make_memory in enumerate(context.memory_makers):
                if learner not in context.memories:
                    plan = HostPlan(
                        info,
                        make_memory,
                        context.parameters.size,
                        snapshot(context),
                        context.rendezvous,
                        context.resume_from,
                        context.initial_weights,
                        Path(token.name),
                    )
                    options = self._reservation.host_options(f"learner {learner}")
                    host_class = ray.remote(LearnerHost).options(max_concurrency=self._max_calls(), **options)
                    handles[learner] = host_class.remote(learner, plan, home)
            answers = {handle.prepare.remote(): learner for learner, handle in handles.items()}
            while answers and not context.run_state.interrupted:
                for answer in ray.wait(list(answers), timeout=0.1)[0]:
                    learner = answers.pop(answer)
                    self._hosts[learner] = self._host_of(learner, answer)._replace(server=handles[learner])
                if self._head.silence() > self._params.head_timeout:
                    raise ClusterError(self.head_is_silent())
                if time.monotonic() - begin > (limit := self._options.supervisor.start_timeout):
                    names = ", ".join(f"learner {learner}" for learner in answers.values())
                    raise ClusterError(f"no process on the node of {names} within supervisor.start_timeout={limit:g} s")
        self._learner_hosts = list(handles.values())
        for handle in self._learner_hosts:
            handle.mirror.remote()

    def _host_of(self, learner: int, answer: Any) -> Host:
        """Return the host of this answer. Raises ClusterError if it could not be made."""
        try:
            host: Host = ray.get(answer)
        except RayTaskError as error:
            raise ClusterError(f"learner {learner} cannot be on its node: {error.cause}") from None
        except RayError as error:
            raise ClusterError(f"the node of learner {learner} was lost: {' '.join(str(error).split())}") from None
        return host

    def _max_calls(self) -> int:
        """Return the calls that a trajectory server may have under way."""
        return 100 + 2 * self._params.chunks_in_flight * self._options.num_actors

    def start(self, role: str, index: int, threads: int) -> "RayProcessHandle":
        name = f"{role} {index}"
        worker = ray.remote(Worker).options(**self._reservation.actor_options(name)).remote(role, index)
        learner = index % self._options.num_learners if role in ("actor", "learner") else 0
        arguments = (self._processes[role], self._hosts[learner], self._run_info, threads)
        has_begun = partial(self._context.run_state.has_started, self._context.process_ind(role, index))
        handle = RayProcessHandle(worker, arguments, partial(self._node_is_missing, name), has_begun)
        self._handles[role, index] = handle
        return handle

    # observe ----------------------------------------------------------------------------------------------------------
    def wait(self, waitables: list[Any]) -> None:
        ray.wait(waitables, timeout=0.1)

    def check(self) -> str | None:
        """Report nodes and processes that Ray lost or found. Return why the run must end, or None if it can go on."""
        if self._head.silence() > self._params.head_timeout:
            return self.head_is_silent()
        if (answer := self._head.answer) is not None and answer is not self._last_answer:
            if self._last_answer is not None:
                self._log_node_changes(self._last_answer.nodes, answer.nodes)
            self._last_answer = answer
        without_node = {key for key, handle in self._handles.items() if handle.lacks_node()}
        for role, index in sorted(without_node - self._without_node):
            self._log(f"{role} {index} has no place now; the run goes on, and Ray starts it when a node has room")
        self._without_node = without_node
        return self._learner_without_actors()

    def room_for_learners(self) -> int:
        """Return how many more learners, each with its actors, an elastic run could have now.

        They must find room beside the run, and `learners_of_next_part` must count as many.
        """
        if (answer := self._head.answer) is None:
            return 0
        count, most = self._options.num_learners, self._options.supervisor.elastic
        more = learner_groups(self._options, range(count, most))
        nodes = {node: {"Resources": free} for node, free in answer.free.items()}
        beside = number_with_room(more, self._cluster.home, nodes, [name for group in more for name in group])
        return max(min(beside, self._learners_with_room(most, answer) - count), 0)

    def learners_of_next_part(self, most: int) -> int | None:
        """Return the learners with which an elastic run goes on, at most this many; None if the head is silent.

        The room is that of empty nodes, because those of this run are about to become empty. If others hold it, the
        next part does not start, and the one after it has a learner less.
        """
        answer = self._head.fresh_answer(self._params.head_timeout)
        return None if answer is None else max(self._learners_with_room(most, answer), 1)

    def _learners_with_room(self, most: int, answer: Answer) -> int:
        return learners_with_room(self._options, self._context.roles, most, self._cluster.home, answer.nodes)

    def collect(self) -> None:
        """Let every host on another node send its last report, within COLLECT_TIMEOUT."""
        self._await_hosts([host.exchange_with_home.remote() for host in self._learner_hosts])

    def close(self) -> None:
        """Let the hosts remove their folders. The engine closes the cluster, and all processes with it."""
        self._await_hosts([host.close.remote() for host in self._learner_hosts])

    def _await_hosts(self, answers: list[Any]) -> None:
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=COLLECT_TIMEOUT)

    def _node_is_missing(self, name: str, requested_at: float) -> bool:
        """Return True if the head has answered since `requested_at` that no node has room for this process."""
        answer = self._head.answer
        if answer is None or answer.time < requested_at:
            return False
        return not self._reservation.has_node(name, answer.bundles)

    def head_is_silent(self) -> str:
        """Return a sentence that says so."""
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


class RayProcessHandle(ProcessHandle):
    """The process of one Ray actor. The actor is first asked for its node, and, once it has answered, to run."""

    def __init__(
        self,
        worker: Any,
        arguments: tuple[Any, ...],
        node_is_missing: Callable[[float], bool],
        has_begun: Callable[[], bool],
    ):
        """Ask Ray for the process.

        Args:
            worker: handle of the Ray actor, a `Worker`.
            arguments: those of `Worker.run`.
            node_is_missing: takes the time of this request and returns True if no node has had room for it since
                then.
            has_begun: returns True once the process has sent a heartbeat.
        """
        self._worker, self._arguments = worker, arguments
        self._node_is_missing, self._has_begun = node_is_missing, has_begun
        self._requested_at = self._kill_deadline = time.monotonic()
        self._pending = worker.pid_and_address.remote()  # the call that Ray answers next
        self._pid_and_address: tuple[int, str] | None = None
        self._lost_reason = ""  # why the process could not be reached
        self._status: ExitStatus | None = None

    @property
    def pid(self) -> int | str:
        return "{} on {}".format(*self._pid_and_address) if self._pid_and_address else "without a node"

    @property
    def waitable(self) -> Any:
        """The reference of the next answer, which is there at the end of the process or before."""
        return self._pending

    def has_process(self) -> bool:
        self.poll()
        return self._pid_and_address is not None

    def lacks_node(self) -> bool:
        """Return True if the head has said since the request that no node has room."""
        return not self.has_process() and self._status is None and self._node_is_missing(self._requested_at)

    def poll(self) -> ExitStatus | None:
        if self._status is None and ray.wait([self._pending], timeout=0)[0]:
            self._status = self._read_answer()
        return self._status

    def _read_answer(self) -> ExitStatus | None:
        """Read the answer that is there. Returns the status of a process that has ended, else None."""
        try:
            answer = ray.get(self._pending)
        except RayTaskError as error:
            if self._lost_reason:
                return ExitStatus(reason=self._lost_reason)
            cause = error.cause if isinstance(error.cause, BaseException) else error
            reported = ReportedError.of(cause, str(error))
            return ExitStatus(error=reported, run_exit_code=exit_code_of(cause, self._has_begun()))
        except ActorUnavailableError as error:
            # The process or its node is out of reach. The head will find out which; until then it may place nothing
            # there.
            self._lost_reason = self._lost_reason or _one_line(error)
            self._pending = self._worker.pid_and_address.remote()
            return None
        except RayError as error:
            return ExitStatus(reason=_one_line(error))
        if self._lost_reason:  # the process can be reached again, but its work was lost
            return ExitStatus(reason=self._lost_reason)
        if self._pid_and_address is not None:
            return ExitStatus(done=True)
        self._pid_and_address, self._pending = answer, self._worker.run.remote(*self._arguments)
        return None

    def kill(self) -> None:
        ray.kill(self._worker)
        self._kill_deadline = time.monotonic() + KILL_TIMEOUT

    def join(self) -> None:
        """Wait until the killed process has ended, at most KILL_TIMEOUT after `kill`."""
        ray.wait([self._pending], timeout=max(self._kill_deadline - time.monotonic(), 0.0))

    def clean_up(self) -> None:
        """End the process, because Ray keeps that of an actor whose call has failed or returned."""
        self.kill()


def _one_line(error: Exception) -> str:
    """Return Ray's reason on one line, without its advice."""
    return "died: " + " ".join(str(error).partition("Some common causes")[0].split())
