"""The Ray engine: every single-process is a Ray actor, on this machine or on the nodes of a cluster.

Logger, evaluator and learner 0 stay on the node of main and open its shared memory, as do actors that Ray places there.
A learner on another node has a host there (core/engines/ray/learner_host.py), whose shared memory it opens. Actors on
other nodes than their learner's send their chunks to its trajectory server (core/engines/ray/trajectory_server.py).
"""

import dataclasses
import importlib.util
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch

from core.common.console import log_to_stderr
from core.common.exit_codes import TRAINING_FAILED
from core.engines.ray.cluster import Cluster, ClusterError, Head
from core.engines.ray.placement import PlacementReservation, process_needs
from core.engines.run_end import resume_command_hint
from core.engines.supervisor import Supervisor
from core.runtime.context import Context, Process


class RayEngine:
    """Run the processes of a context on a Ray cluster."""

    def __init__(self, context: Context, processes: Mapping[str, Process]):
        self._context, self._processes = _on_visible_devices(context), processes
        # Set by `run` if the run goes on from its checkpoint with this number of learners (supervisor.elastic).
        self.next_learners: int | None = None

    @staticmethod
    def problems(options: Any) -> list[str]:
        """Return what is wrong with the options, as far as can be known before a start."""
        errors = []
        if len(options.learners_at_home) < options.num_learners and not options.ray.learner_cpus:
            errors.append(
                "ray.learner_cpus=0 leaves the nodes of learners to chance: give them CPUs, or take "
                "ray.learner_placement=pack"
            )
        if importlib.util.find_spec("ray") is None:
            errors.append('engine=ray needs a package that is not installed: pip install -e ".[ray]"')
        if options.ray.address is not None and "://" in options.ray.address:
            errors.append(
                f"ray.address={options.ray.address} must be host:port of the head, or auto: main runs on a "
                "node of the cluster"
            )
        count, gpus = options.num_learners, options.ray.learner_gpus
        errors += _elastic_problems(options)
        on_gpu = options.device != "cpu" and torch.cuda.is_available()
        if options.mode == 1 and count > 1 and on_gpu and gpus is not None and gpus <= 0.5:
            errors.append(
                f"num_learners={count} need a GPU each, and with ray.learner_gpus={gpus:g} two could get the "
                "same: take more than 0.5 (what is left is for ray.actor_gpus), or device=cpu"
            )
        return errors + _devices_without_share(options)

    def run(self) -> int:
        """Run to the end. Returns the exit code of the program: 2 if the cluster cannot hold the run."""
        context, options = self._context, self._context.options
        needs = process_needs(options, context.roles)
        try:
            with closing(Cluster(options.ray, needs)) as cluster:
                from core.engines.ray.launcher import RayLauncher  # imports Ray, whose variables the cluster has set

                groups = _groups(context)
                reservation = PlacementReservation(needs, cluster.home, cluster.is_local, groups)
                with closing(Head(reservation.group)) as head:
                    launcher = RayLauncher(context, self._processes, cluster, reservation, head)
                    return self._supervise(launcher)
        except ClusterError as error:
            log_to_stderr(f"error: {error}")
            return error.exit_code

    def _supervise(self, launcher: Any) -> int:
        """Run all processes to their end, then set `next_learners`. Returns the exit code of the program."""
        options, supervisor = self._context.options, Supervisor(self._context, launcher)
        try:
            exit_code = supervisor.run()
        except ClusterError:
            if options.supervisor.elastic and options.resume is not None and options.num_learners > 1:
                self.next_learners = launcher.learners_of_next_part(options.num_learners - 1)
            raise
        if supervisor.next_learners is not None:
            self.next_learners = launcher.learners_of_next_part(supervisor.next_learners)
            if self.next_learners is None:
                log_to_stderr(f"supervisor: {launcher.head_is_silent()}; {resume_command_hint(options)}")
                return TRAINING_FAILED
        return exit_code


def _elastic_problems(options: Any) -> list[str]:
    """Return what stands against an elastic run with these options."""
    most, count, errors = options.supervisor.elastic, options.num_learners, []
    if most and (options.ray.address is None or options.ray.learner_placement == "pack"):
        errors.append(
            f"supervisor.elastic={most} is for learners on several nodes: it needs ray.address and "
            "ray.learner_placement=spread"
        )
    if most and count > most:
        errors.append(f"num_learners={count} is more than supervisor.elastic={most}, the largest number of learners")
    if most and options.num_actors % count:
        errors.append(
            f"supervisor.elastic needs as many actors for every learner: num_actors={options.num_actors} must be a "
            f"multiple of num_learners={count}"
        )
    if most and options.learner.checkpoint_replay:
        errors.append(
            "supervisor.elastic excludes learner.checkpoint_replay: a group of another size starts with empty memories"
        )
    return errors


def _groups(context: Context) -> list[list[str]]:
    """Return the name of each learner that has a node of its own, with those of its actors."""
    count = context.options.num_learners if context.options.mode == 1 else 0
    return [
        [f"learner {learner}", *(f"actor {index}" for index in range(learner, context.options.num_actors, count))]
        for learner in range(count)
        if learner not in context.memories
    ]


def _devices_without_share(options: Any) -> list[str]:
    """Return an error for each option that puts a process on a GPU without a share of one: Ray would show it none."""
    if not torch.cuda.is_available():
        return []
    devices = [("device", options.device, "ray.learner_gpus", options.ray.learner_gpus)]
    if options.mode == 1:
        devices.append(("actor.device", options.actor.device, "ray.actor_gpus", options.ray.actor_gpus))
    return [
        f"{name}={device} and {share}=0: Ray shows a GPU only to a process with a share of one; give one, as "
        f"--{share} 0.5, or take {name}=cpu"
        for name, device, share, amount in devices
        if device != "cpu" and amount == 0
    ]


def _on_visible_devices(context: Context) -> Context:
    """Return the context with cuda:0 in place of other GPUs, because a process sees only the GPU that Ray gave it."""

    def visible(device: str) -> str:
        return "cuda:0" if device.startswith("cuda") else device

    options = context.options
    actor = dataclasses.replace(options.actor, device=visible(options.actor.device))
    options = dataclasses.replace(options, device=visible(options.device), actor=actor)
    return dataclasses.replace(context, options=options)
