"""Options of the Ray engine. This module does not import Ray, which only a run with engine=ray needs."""

from dataclasses import dataclass

from core.common.settings import setting


@dataclass(frozen=True)
class RayParams:
    """Options of the Ray engine.

    CPUs and GPUs are Ray's logical resources: they decide where processes run, not what they use.
    """

    address: str | None = None  # Address host:port of a cluster's head, or auto; None uses this machine alone.
    actor_cpus: float = setting(1.0, low=0, high=1_024)  # CPUs that Ray reserves for an actor.
    actor_gpus: float = setting(0.0, low=0, high=64)  # GPUs that Ray reserves for an actor.
    learner_cpus: float = setting(1.0, low=0, high=1_024)  # CPUs that Ray reserves for a learner.
    learner_gpus: float | None = setting(None, low=0, high=64)  # GPUs that Ray reserves for a learner; None is 1 where device is a GPU,
                                                                # else 0.
    evaluator_cpus: float = setting(1.0, low=0, high=1_024)  # CPUs that Ray reserves for the evaluator.
    chunks_in_flight: int = setting(4, low=1, high=1_024)  # Chunks that an actor on another node may have sent and not yet seen stored.
    parameters_period: float = setting(0.05, low=0, high=1e6)  # Seconds between versions of the parameters that go to other nodes, at the
                                                               # least.
    object_store_bytes: int = setting(128 << 20, low=80 << 20, high=10**13)  # Bytes of shared memory for Ray's object store on this
                                                                             # machine.
    connect_timeout: float = setting(20.0, low=0.1, high=86_400)  # Seconds within which a cluster must answer.
    place_timeout: float | None = setting(60.0, low=0.1, high=1e9)  # Seconds to wait for room for the run; None waits without a limit.
    head_timeout: float = setting(20.0, above=0, high=1e6)  # Seconds without an answer of the head after which the run saves and ends.
    learner_timeout: float | None = setting(300.0, above=0, high=1e9)  # Seconds without a place for any actor of a learner after which the
                                                                       # run saves and ends; None waits without a limit.
