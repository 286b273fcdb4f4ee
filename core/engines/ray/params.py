"""Settings of the Ray engine; Ray itself is imported only by a run that uses it."""


from pydantic import Field

from core.common.settings import frozen_dataclass


@frozen_dataclass
class RayParams:
    """CPUs and GPUs are Ray's logical resources: they decide where processes go, not what they may use."""

    address: str | None = None
    """Address host:port of a cluster's head, or auto; None uses this machine alone."""
    actor_cpus: float = Field(default=1.0, ge=0, le=1_024)
    """CPUs that Ray reserves for an actor."""
    actor_gpus: float = Field(default=0.0, ge=0, le=64)
    """GPUs that Ray reserves for an actor."""
    learner_cpus: float = Field(default=1.0, ge=0, le=1_024)
    """CPUs that Ray reserves for a learner."""
    learner_gpus: float | None = Field(default=None, ge=0, le=64)
    """GPUs that Ray reserves for a learner; None is 1 where device is a GPU, else 0."""
    evaluator_cpus: float = Field(default=1.0, ge=0, le=1_024)
    """CPUs that Ray reserves for the evaluator."""
    chunks_in_flight: int = Field(default=4, ge=1, le=1_024)
    """Chunks that an actor on another node may have sent and not yet seen stored."""
    parameters_period: float = Field(default=0.05, ge=0, le=1e6)
    """Seconds between versions of the parameters that go to other nodes, at the least."""
    object_store_bytes: int = Field(default=128 << 20, ge=80 << 20, le=10**13)
    """Bytes of shared memory for Ray's object store on this machine."""
    connect_timeout: float = Field(default=20.0, ge=0.1, le=86_400)
    """Seconds within which a cluster must answer."""
    place_timeout: float | None = Field(default=60.0, ge=0.1, le=1e9)
    """Seconds to wait for room for the run; None waits without a limit."""
    head_timeout: float = Field(default=20.0, gt=0, le=1e6)
    """Seconds without an answer of the head after which the run saves and ends."""
    learner_timeout: float | None = Field(default=300.0, gt=0, le=1e9)
    """Seconds without a place for any actor of a learner after which the run saves and ends; None waits without a
    limit."""
