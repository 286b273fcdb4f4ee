"""Ray engine: the same single-processes as Ray actors, on this machine or on the nodes of a cluster.

Logger, learner and evaluator stay on the node of main and open its shared memory; so do actors that Ray places there. Actors elsewhere
send their chunks to the ingest (core/engines/ray_ingest.py). Where a process goes, and that a dead one starts again, is up to Ray;
what its death means for the run is decided as on the local engine.
"""

import dataclasses
import importlib.util
import pickle
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from core.context import Context
from core.engines import exit_codes
from core.engines.inline import Process
from core.engines.local import ALLOCATOR, LocalEngine, Place
from core.engines.ray_cluster import Cluster, ClusterError, check_room

NODES_PERIOD = 2.0   # seconds between looks at the nodes
KILL_TIMEOUT = 10.0  # seconds until a killed process is gone


class RayEngine(LocalEngine):
    """Supervises calls of Ray actors in place of processes."""

    def __init__(self, context: Context, processes: Mapping[str, Process]):
        super().__init__(_on_rays_device(context), processes)
        self._params, self._nodes, self._looked = self._options.ray, dict[str, str](), 0.0
        self._needs = {str(place): self._resources(place.role) for place in self._places}
        self._workers: dict[Place, Any] = {}
        self._waiting: set[Place] = set()  # processes that were told to have no place now

    @staticmethod
    def problems(options: Any) -> list[str]:
        """What can be known before anything is started."""
        found = []
        if importlib.util.find_spec("ray") is None:
            found.append('engine=ray needs a package that is not installed: pip install -e ".[ray]"')
        if options.ray.address is not None and "://" in options.ray.address:
            found.append(f"ray.address={options.ray.address} must be host:port of the head, or auto: main runs on a node of the cluster")
        return found

    def run(self, roles: list[tuple[str, int]]) -> int:
        """Run to the end. Returns the exit code, 2 when the cluster cannot be had or cannot hold the run."""
        try:
            cluster = Cluster(self._params, self._needs, ALLOCATOR)
        except ClusterError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        try:
            check_room(self._needs, cluster.home)
            self._arguments = self._prepared(cluster)
            return super().run(roles)
        except ClusterError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        finally:
            cluster.close()

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
        from core.engines.ray_ingest import Ingest
        from core.engines.ray_link import Facts
        context, self._home = pickle.dumps(self._context), self._at(cluster.home)
        ingest, facts = None, None
        if not cluster.alone and self._context.memory is not None:
            memory = self._context.memory
            facts = Facts(self._options, self._context.spec, self._context.roles, memory.layout, memory.window)
            ingest = ray.remote(Ingest).options(num_cpus=0, scheduling_strategy=self._home, max_restarts=-1,
                                                max_concurrency=100 + 2 * self._params.chunks_in_flight * self._options.num_actors).remote(
                context, self._params.parameters_period)
        return cluster.home, ray.put(context), ray.put(facts), ingest

    @staticmethod
    def _at(node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        return NodeAffinitySchedulingStrategy(node, soft=False)

    def _start(self, place: Place) -> None:
        """A new worker; or, when Ray replaces the dead one itself, the next call of it."""
        self._clock.forget_beat(self._process_ind(place))
        if place not in self._workers:
            self._workers[place] = self._worker(place)
        worker = self._workers[place]
        where = worker.where.remote()
        reference = worker.run.remote(self._processes[place.role], *self._arguments, place.threads)
        place.process = place.failure = Life(worker, reference, where)
        place.started = time.monotonic()

    def _worker(self, place: Place) -> Any:
        import ray
        from core.engines.ray_worker import Worker
        forgiven = 0 if place.role in ("learner", "tester") else self._options.supervisor.max_restarts
        need = self._resources(place.role)
        return ray.remote(Worker).options(
            num_cpus=need["CPU"], num_gpus=need["GPU"], max_restarts=forgiven, max_task_retries=0,
            scheduling_strategy="SPREAD" if place.role == "actor" else self._home).remote(place.role, place.index)

    # supervise --------------------------------------------------------------------------------------------------------
    def _wait(self, places: list[Place]) -> None:
        import ray
        ray.wait([place.process.reference for place in places], timeout=0.1)

    def _supervise(self) -> None:
        super()._supervise()
        if time.monotonic() - self._looked >= NODES_PERIOD:
            self._looked = time.monotonic()
            self._look_at_nodes()

    def _look_at_nodes(self) -> None:
        """Name those that came and went."""
        import ray
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        for change, these in (("was lost", self._nodes.keys() - nodes), ("joined", nodes.keys() - self._nodes)):
            for node in these if self._nodes else ():
                self._say(f"node {(self._nodes | nodes)[node]} ({node[:8]}) {change}, the cluster has {len(nodes)} now")
        self._nodes = nodes

    def _silent(self, place: Place) -> str | None:
        """A process that has no place cannot start. At the beginning that ends the run; later it goes on without."""
        if place.process.placed:
            self._waiting.discard(place)
            return super()._silent(place)
        waited = time.monotonic() - place.started
        if not place.restarts and waited > self._params.place_timeout:
            raise ClusterError(f"{place} found no room within ray.place_timeout={waited:.0f} s: other jobs of the cluster hold its CPUs or GPUs")
        if place.restarts and waited > NODES_PERIOD and place not in self._waiting:
            self._waiting.add(place)
            self._say(f"{place} has no place now; the run goes on, and Ray starts it when a node has room")
        return None

    def _bury(self, place: Place, reason: str | None = None) -> None:
        if reason is not None or place.process.failed:  # its process still runs: Ray replaces those only that died
            place.process.end()
            self._workers.pop(place, None)
        super()._bury(place, reason)

    def _death(self, place: Place) -> str:
        return place.process.death

    # end --------------------------------------------------------------------------------------------------------------
    def _await(self, places: list[Place], limit: float | None = None) -> None:
        for place in places:
            if place in self._alive() and not place.process.placed:
                place.process.end()
                place.ended = True
        super()._await(places, limit)


class Life:
    """One call of a worker's `run`, as the supervisor looks at processes."""

    def __init__(self, worker: Any, reference: Any, where: Any):
        self.reference, self._worker, self._where = reference, worker, where
        self._exitcode: int | None = None
        self._failure: tuple[str, str] | None = None
        self._place: tuple[int, str] | None = None
        self.failed, self.death = False, ""

    @property
    def placed(self) -> bool:
        """Ray has started its process."""
        import ray
        if self._place is None and ray.wait([self._where], timeout=0)[0]:
            try:
                self._place = ray.get(self._where)
            except ray.exceptions.RayError:  # it died meanwhile, which `exitcode` tells
                self._place = (0, "?")
        return self._place is not None

    @property
    def pid(self) -> str:
        return "{} on {}".format(*self._place) if self.placed and self._place else "not placed"

    @property
    def exitcode(self) -> int | None:
        """None while it runs; 0: done."""
        import ray
        if self._exitcode is None and ray.wait([self.reference], timeout=0)[0]:
            self._exitcode = self._conclude()
        return self._exitcode

    def _conclude(self) -> int:
        from ray.exceptions import RayError, RayTaskError
        import ray
        try:
            ray.get(self.reference)
            return exit_codes.DONE
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            self.failed, self._failure = True, (f"{type(cause).__name__}: {cause}", str(error))
            return exit_codes.of(cause)
        except RayError as error:
            self.death = "died: " + " ".join(str(error).split())
            return exit_codes.TRAINING_FAILED

    def poll(self) -> bool:
        """Whether it sent an error before it ended."""
        return self._failure is not None

    def recv(self) -> tuple[str, str]:
        if self._failure is None:
            raise EOFError
        return self._failure

    def kill(self) -> None:
        self.end()

    def end(self) -> None:
        """For good: Ray does not start it again."""
        import ray
        ray.kill(self._worker, no_restart=True)

    def join(self) -> None:
        import ray
        ray.wait([self.reference], timeout=KILL_TIMEOUT)


def _on_rays_device(context: Context) -> Context:
    """Ray shows a process only the GPU it gave it."""
    if not context.options.device.startswith("cuda:"):
        return context
    return dataclasses.replace(context, options=dataclasses.replace(context.options, device="cuda"))
