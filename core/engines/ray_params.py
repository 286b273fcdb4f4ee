"""Settings of the Ray engine; Ray itself is imported only by a run that uses it."""

from dataclasses import dataclass

from core.settings import setting


@dataclass(frozen=True)
class RayParams:
    """CPUs and GPUs are Ray's logical resources: they decide where processes go, not what they may use."""

    address: str | None = None                               # host:port of a cluster's head, or auto; None: of this machine alone
    actor_cpus: float = setting(1.0, low=0)                  # a process
    actor_gpus: float = setting(0.0, low=0)
    learner_cpus: float = setting(1.0, low=0)
    learner_gpus: float | None = setting(None, low=0)        # None: 1 where device is a GPU
    evaluator_cpus: float = setting(1.0, low=0)
    chunks_in_flight: int = setting(4, low=1)                # that an actor on another node may have sent and not seen stored
    parameters_period: float = setting(0.05, low=0)          # seconds, at the least, between versions that go to other nodes
    object_store_bytes: int = setting(128 << 20, low=80 << 20)  # of shared memory, for Ray on this machine
    connect_timeout: float = setting(20.0, above=0)          # seconds until a cluster must have answered
    place_timeout: float | None = setting(60.0, above=0)     # seconds to wait for room for the run; None: as long as it takes
    head_timeout: float = setting(20.0, above=0)             # seconds without an answer of the head after which the run saves and ends
    learner_timeout: float | None = setting(300.0, above=0)  # seconds without a place for any actor of a learner, likewise; None: never
