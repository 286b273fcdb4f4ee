"""Ray engine: the same single-processes as Ray actors, on this machine or on the nodes of a cluster.

Logger, learner and evaluator stay on the node of main and open its shared memory; so do actors that Ray places there. Actors elsewhere
send their chunks to the ingest (core/engines/ray/trajectory_server.py). Ray starts every process, finds it a place, and tells when it
died; what a death means for the run is decided as on the local engine, and Ray is asked for another. (Ray's own `max_restarts` would not
do: the run must know of a new life before it begins, to count it, and to end the episodes that the last one left open.)
"""

import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch

from core.engines import run_end
from core.engines.local import ALLOCATOR, LocalEngine
from core.engines.ray.cluster import Cluster, ClusterError
from core.engines.ray.head import Answer, Head
from core.engines.ray.placement import PlacementReservation, at
from core.engines.ray.process_handle import KILL_TIMEOUT, RayProcessHandle
from core.engines.supervisor import Place
from core.runtime.context import Context, Process

WAIT_TOLD = 2.0      # seconds of waiting for room until that is said
class RayEngine(LocalEngine):
    """Supervises calls of Ray actors in place of processes."""

    def __init__(self, context: Context, processes: Mapping[str, Process]):
        super().__init__(_on_rays_device(context), processes)
        self._params = self._options.ray
        self._answer: Answer | None = None  # the newest of the head whose nodes were looked at
        self._without_actors: dict[int, float] = {}  # learner -> since when none of its actors has a place
        self._needs = {str(place): self._resources(place.role) for place in self._places}
        self._waiting: set[Place] = set()  # processes that were told to have no place now

    @staticmethod
    def problems(options: Any) -> list[str]:
        """What can be known before anything is started."""
        found = []
        if importlib.util.find_spec("ray") is None:
            found.append('engine=ray needs a package that is not installed: pip install -e ".[ray]"')
        if options.ray.address is not None and "://" in options.ray.address:
            found.append(f"ray.address={options.ray.address} must be host:port of the head, or auto: main runs on a node of the cluster")
        count, gpus = options.num_learners, options.ray.learner_gpus
        if options.mode == 1 and count > 1 and gpus is not None and gpus <= 0.5 and options.device != "cpu" and torch.cuda.is_available():
            found.append(f"num_learners={count} need a GPU each, and with ray.learner_gpus={gpus:g} two could get the same: take more than "
                         "0.5 (what is left is for ray.actor_gpus), or device=cpu")
        return found + _without_share(options)

    def run(self, roles: list[tuple[str, int]]) -> int:
        """Run to the end. Returns the exit code, 2 when the cluster cannot be had or cannot hold the run."""
        try:
            cluster = Cluster(self._params, self._needs, ALLOCATOR)
        except ClusterError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        try:
            self._cluster, self._room = cluster, PlacementReservation(self._needs, cluster.home, cluster.alone)
            with closing(Head(self._room.group)) as self._head:
                return super().run(roles)
        except ClusterError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        finally:
            cluster.close()

    def _run(self) -> None:
        self._wait_for_room()
        if self._signals:
            return self._end()
        self._arguments = self._prepared(self._cluster)
        super()._run()

    # start ------------------------------------------------------------------------------------------------------------
    def _resources(self, role: str) -> dict[str, float]:
        params, on_gpu = self._params, self._options.device.startswith("cuda")
        if role == "actor":
            return {"CPU": params.actor_cpus, "GPU": params.actor_gpus}
        if role in ("learner", "tester"):
            return {"CPU": params.learner_cpus, "GPU": float(on_gpu) if params.learner_gpus is None else params.learner_gpus}
        return {"CPU": params.evaluator_cpus if role == "evaluator" else 0.0, "GPU": 0.0}

    def _prepared(self, cluster: Cluster) -> tuple[Any, ...]:
        """What every worker is given, stored once."""
        import ray

        from core.engines.ray.code_version import code
        from core.engines.ray.remote_context import RemoteRunInfo
        from core.engines.ray.trajectory_server import TrajectoryServer
        context, ingest, facts = ray.put(self._context), None, None
        if not cluster.alone and self._context.memories:
            memory = self._context.memories[0]
            facts = RemoteRunInfo(self._options, self._context.spec, self._context.roles, memory.layout, memory.window, code())
            ingest = ray.remote(TrajectoryServer).options(num_cpus=0, scheduling_strategy=at(cluster.home), max_restarts=-1,
                                                max_concurrency=100 + 2 * self._params.chunks_in_flight * self._options.num_actors).remote(
                self._context, self._params.parameters_period, os.getpid())  # no reference: Ray says at every start that it may get lost
        return cluster.home, os.getpid(), [context], ray.put(facts), ingest  # in a list Ray leaves it to the worker to open it

    def _wait_for_room(self) -> None:
        """Until the run has all it needs, a signal comes, or `ray.place_timeout` is over: then raises ClusterError."""
        started, limit, told = time.monotonic(), self._params.place_timeout, False
        while not self._room.kept(0.1) and not self._signals:
            waited, answer = time.monotonic() - started, self._head.answer
            lacking = None if answer is None else self._room.lacks(answer.nodes)
            if self._head.silence() > self._params.head_timeout:
                raise ClusterError(self._no_answer())
            if limit is not None and waited > limit:
                raise ClusterError(f"{lacking}; no such node joined within ray.place_timeout={limit:g} s" if lacking else
                                   f"the run found no room within ray.place_timeout={limit:g} s: it needs {self._room} in all, and "
                                   "other jobs of the cluster hold them")
            if not told and waited > WAIT_TOLD:
                told = True
                self._say(f"waits for nodes that join: {lacking}" if lacking else f"waits for room on the cluster: {self._room} in all")

    def _start(self, place: Place) -> None:
        self._run_state.reset_heartbeat(self._process_ind(place))
        arguments = (self._processes[place.role], *self._arguments, place.threads)
        place.process = place.failure = RayProcessHandle(self._worker(place), arguments)
        place.started = time.monotonic()

    def _worker(self, place: Place) -> Any:
        import ray

        from core.engines.ray.worker import Worker
        return ray.remote(Worker).options(**self._room.place(str(place))).remote(place.role, place.index)

    # supervise --------------------------------------------------------------------------------------------------------
    def _wait(self, places: list[Place]) -> None:
        import ray
        ray.wait([place.process.next for place in places], timeout=0.1)

    def _supervise(self) -> None:
        super()._supervise()
        if self._head.silence() > self._params.head_timeout:
            self._say(f"{self._no_answer()}: the run ends")
            self._give_up(run_end.TRAINING_FAILED)
        answer = self._head.answer
        if answer is not None and answer is not self._answer:
            self._name_changes(answer)
            self._answer = answer
        self._end_without_actors()

    def _no_answer(self) -> str:
        where = "of Ray on this machine" if self._cluster.alone else f"of the Ray cluster at ray.address={self._params.address}"
        return f"the head {where} did not answer for {self._params.head_timeout:g} s (ray.head_timeout)"

    def _name_changes(self, answer: Answer) -> None:
        """Name the nodes that came and went since the answer before."""
        before = answer.nodes if self._answer is None else self._answer.nodes
        for change, these in (("was lost", before.keys() - answer.nodes), ("joined", answer.nodes.keys() - before)):
            for node in these:
                address = (before | answer.nodes)[node]["NodeManagerAddress"]
                self._say(f"node {address} ({node[:8]}) {change}, the cluster has {len(answer.nodes)} now")

    def _unplaced(self, place: Place) -> bool:
        """Return True if Ray was asked for this process and no node has room for it, as the head said since."""
        life, answer = place.process, self._head.answer
        if life.placed or answer is None or answer.time < life.asked:
            return False
        return not self._room.has_node(str(place), answer.bundles)

    def _hang_reason(self, place: Place) -> str | None:
        """A process whose node was lost may have no place: the run goes on without it, and its time to start begins with its place."""
        if not self._unplaced(place):
            self._waiting.discard(place)
            return super()._hang_reason(place)
        place.started = time.monotonic()
        if place not in self._waiting:
            self._waiting.add(place)
            self._say(f"{place} has no place now; the run goes on, and Ray starts it when a node has room")
        return None

    def _end_without_actors(self) -> None:
        """End the run when a learner has had no actor for `ray.learner_timeout`, because all learners wait for that one."""
        limit, now = self._params.learner_timeout, time.monotonic()
        for learner in range(self._options.num_learners if self._options.mode == 1 else 0):
            actors = [place for place in self._places if place.role == "actor" and place.index % self._options.num_learners == learner]
            if not all(place in self._waiting for place in actors):
                self._without_actors.pop(learner, None)
            elif limit is not None and now - self._without_actors.setdefault(learner, now) > limit and not self._run_state.stopped:
                self._say(f"learner {learner} has no actor: none of its {len(actors)} had a place for {limit:g} s (ray.learner_timeout); "
                          "the run ends")
                self._give_up(run_end.TRAINING_FAILED)

    def _handle_exit(self, place: Place, reason: str | None = None) -> None:
        place.process.kill()  # Ray keeps the process of a worker that failed or is done
        super()._handle_exit(place, reason)

    def _exit_reason(self, place: Place) -> str:
        return place.process.death

    # end --------------------------------------------------------------------------------------------------------------
    def _await(self, places: list[Place], limit: float | None = None) -> None:
        for place in places:
            if place in self._alive() and not place.process.placed:
                place.process.kill()
                place.ended = True
        super()._await(places, limit)


    def _kill(self, places: list[Place]) -> None:
        import ray
        for place in places:
            place.process.kill()
            place.ended = True
        if waiting := [place.process.next for place in places]:
            ray.wait(waiting, num_returns=len(waiting), timeout=KILL_TIMEOUT)


def _without_share(options: Any) -> list[str]:
    """Of a GPU, though a process is to compute there: Ray would not tell it which."""
    if not torch.cuda.is_available():
        return []
    devices = [("device", options.device, "ray.learner_gpus", options.ray.learner_gpus)]
    if options.mode == 1:
        devices.append(("actor.device", options.actor.device, "ray.actor_gpus", options.ray.actor_gpus))
    return [f"{name}={device} and {share}=0: Ray gives GPUs to who has a share of one; give one, as --{share} 0.5, or take {name}=cpu"
            for name, device, share, amount in devices if device != "cpu" and amount == 0]


def _on_rays_device(context: Context) -> Context:
    """Ray shows a process only the GPU it gave it."""
    def shown(device: str) -> str:
        return "cuda:0" if device.startswith("cuda") else device

    options = context.options
    actor = dataclasses.replace(options.actor, device=shown(options.actor.device))
    return dataclasses.replace(context, options=dataclasses.replace(options, device=shown(options.device), actor=actor))
