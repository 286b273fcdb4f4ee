"""Every option of a run, typed: what all processes are given, and the sections that belong to processes and engines.

The sections `agent`, `env`, `memory` and `model` belong to the classes that a row of CONFIGS chooses, and stand beside
these classes. utils/options.py holds the rows, the lines to edit, and the look-up of classes.
"""

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_core import to_jsonable_python

from core.acting.validated_env import JointActionsEnv, ValidatedEnv
from core.agent import Agent, AgentParams
from core.common.foreign_code import foreign_code
from core.common.settings import frozen_dataclass
from core.env import Env, EnvParams
from core.memory import Memory, MemoryParams
from core.model import Model, ModelParams
from core.runtime.run_state import RateLimiterParams
from core.specs import EnvSpec, MultiDiscrete
from core.trajectory.frame_compression import StorageParams


@frozen_dataclass
class ActorParams:
    """Options of every actor process."""

    chunk_length: int = Field(default=8, ge=1, le=10_000)
    """Steps of each environment that are published together; of unrolls and R2D2, agent options say how many."""
    parameter_pull_period: int = Field(default=100, ge=1, le=10**9)
    """Agent steps of this actor between pulls of newer parameters (Ape-X: 100)."""
    env_threads: int = Field(default=1, ge=1, le=256)
    """Emulator threads of each split of an actor's environments."""
    num_env_splits: int = Field(default=1, ge=1, le=256)
    """Splits of an actor's environments that take turns. Of 2, one steps while actions for the other are computed."""
    device: str = "cpu"
    """Device of the actor's network: cpu, cuda, cuda:1; auto is cuda if there is a GPU."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Run the actor's network as a CUDA graph; auto does where its device is a GPU."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Precision of the actor's network; auto is what learner.precision auto is on the actor's device."""
    niceness: int = Field(default=10, ge=0, le=19)
    """Niceness of the actor's process, so that a learner that has work goes first where cores are few."""


@frozen_dataclass
class LearnerParams:
    """Options of every learner process."""

    threads: int = Field(default=0, ge=0, le=1_024)
    """Torch threads of a learner; 0 is OMP_NUM_THREADS or, if that is not set, all cores where there are at most 4. Of
    more, it is those that actors leave, at least half. A sampling thread that computes targets takes one of them."""
    prefetch: int = Field(default=2, ge=0, le=256)
    """Batches that a thread samples ahead; 0 samples in the learner's own thread, as the inline engine always does."""
    batches_per_sample: int = Field(default=1, ge=1, le=1_024)
    """Batches drawn from the memory at once; more are cheaper where updates take little."""
    replay_device: Literal["cpu", "learner"] = "cpu"
    """Device that batches are drawn on; with `learner` the replay is copied to the learner's device."""
    updates_per_graph_launch: int = Field(default=1, ge=1, le=1_024)
    """Updates that Python launches at once; more than 1 needs replay_device learner."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Run updates as a CUDA graph; auto does with replay_device learner where possible."""
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    """Precision of networks; auto is tf32 on a GPU, and on a CPU bf16 for images of 42x42 and more if it is native."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which several learners send gradients; bfloat16 halves the bytes and rounds to 8 bits."""
    compile: Literal["auto", "yes", "no"] = "no"
    """Compile updates on a CPU. auto does for one learner on vectors and images below 42x42, without an LSTM, in runs
    of 40,000 updates or more (PPO, PQN: minibatches), and not on engine inline."""
    microbatch_on_oom: bool = False
    """Split a batch that exceeds GPU memory, and add the gradients of its parts."""
    publish_period: int = Field(default=10, ge=1, le=10**9)
    """Updates between publications of the parameters."""
    max_nonfinite_updates: int = Field(default=10, ge=1, le=10**9)
    """Updates in a row with a non-finite loss before the run is given up."""
    sync_check_period: int = Field(default=1_000, ge=0, le=10**9)
    """Updates between comparisons of the states of several learners; 0 compares the number of updates alone."""
    checkpoint_period: float = Field(default=60.0, gt=0, le=1e9)
    """Seconds between checkpoints, not on engine inline; one more is written at the end."""
    checkpoint_steps: int = Field(default=0, ge=0, le=10**12)
    """Agent steps between further checkpoints, beside those of checkpoint_period; 0 makes none of them."""
    checkpoint_keep: int = Field(default=2, ge=1, le=10_000)
    """Newest checkpoints that are kept."""
    checkpoint_replay: bool = False
    """Store the replay in checkpoints too, for an exact continuation; files are large."""


@frozen_dataclass
class EvaluatorParams:
    """Options of the evaluator process."""

    period: float = Field(default=60.0, gt=0, le=1e9)
    """Seconds between starts of evaluations."""
    steps: int = Field(default=0, ge=0, le=10**12)
    """Agent steps between evaluations; 0 leaves it to period."""
    episodes: int = Field(default=10, ge=1, le=100_000)
    """Episodes of an evaluation."""
    num_envs: int = Field(default=10, ge=1, le=10_000)
    """Episodes that the evaluator plays side by side."""
    max_steps: int = Field(default=27_000, ge=1, le=10**9)
    """Agent steps after which an episode of an evaluation counts as truncated, unless the environment ends it first."""
    niceness: int = Field(default=5, ge=0, le=19)
    """Niceness of the evaluator's process, so that training goes first."""
    record_every: int = Field(default=0, ge=0, le=10**9)
    """Evaluations from one video in logs/<signature>/videos to the next; 0 records none."""
    record_steps: int = Field(default=3_000, ge=1, le=1_000_000)
    """Agent steps of a recorded episode, at most."""


@frozen_dataclass
class LoggerParams:
    """Options of the logger process."""

    period: float = Field(default=2.0, gt=0, le=1e9)
    """Seconds between reports of actors and learner, lines in the metrics files, and progress lines."""
    steps: int = Field(default=0, ge=0, le=10**12)
    """Agent steps between reports of actors and learner, and lines in the metrics files; 0 goes by `period`."""
    wandb: str | None = None
    """Weights & Biases project that also receives the metrics; None is off."""
    mlflow: str | None = None
    """MLflow experiment that also receives the metrics; None is off."""
    tracker_timeout: float = Field(default=30.0, ge=0.01, le=86_400)
    """Seconds that all trackers together may take at the end of a run that is not interrupted."""


@frozen_dataclass
class VideoParams:
    """Options of recorded videos."""

    format: Literal["mp4", "gif"] = "mp4"
    """Format of the video file."""
    fps: float | None = Field(default=None, ge=0.01, le=1_000)
    """Pictures a second; None plays in real time, by the environment's render_fps."""
    overlay: bool = False
    """Draw score, step and action under the picture."""
    panel: bool = False
    """Draw beside the picture the network's input and curves of the agent's values."""


@frozen_dataclass
class SupervisorParams:
    """Deadlines and restarts of the processes that the engines `local` and `ray` start."""

    heartbeat_timeout: float = Field(default=60.0, ge=1, le=1e6)
    """Seconds without a heartbeat after which a process counts as dead; tenfold if a learner saves or restores."""
    start_timeout: float = Field(default=180.0, ge=1, le=1e6)
    """Seconds that a process may take to its first heartbeat; ten times that for a learner that restores."""
    max_restarts: int = Field(default=5, ge=0, le=1_000_000)
    """Restarts of one actor, evaluator or logger within restart_window, or of lost learners in an elastic run. Then the
    run saves and ends."""
    restart_window: float = Field(default=3600.0, gt=0, le=1e9)
    """Seconds after which a restart no longer counts."""
    stop_timeout: float = Field(default=12.0, ge=0.1, le=86_400)
    """Seconds that processes have to end once interrupted; ten times that while a learner saves its replay."""
    finish_timeout: float = Field(default=900.0, ge=0.1, le=1e6)
    """Seconds for the last evaluation of a run that finished."""
    elastic: int = Field(default=0, ge=0, le=256)
    """Largest number of learners of an elastic run, which goes on with fewer after a node is lost and with more after
    one joins; 0 is off (engine ray, with ray.address)."""


@frozen_dataclass
class RayParams:
    """Options of the engine `ray`.

    CPUs and GPUs are Ray's logical resources: they decide where processes go, not what they may use.
    """

    address: str | None = None
    """Address host:port of a cluster's head, or auto; None uses this machine alone."""
    learner_placement: Literal["spread", "pack"] = "spread"
    """Nodes of several learners: spread gives each a node with its memory and actors, pack leaves all on main's."""
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
    placement_timeout: float | None = Field(default=60.0, ge=0.1, le=1e9)
    """Seconds to wait until Ray reserves the resources of the run; None waits without a limit."""
    head_timeout: float = Field(default=20.0, gt=0, le=1e6)
    """Seconds without an answer of the head after which the run saves and ends."""
    learner_timeout: float | None = Field(default=300.0, gt=0, le=1e9)
    """Seconds that a learner may be without any placed actor before the run saves and ends. The node of a learner ends
    after as long without contact to the main node. None waits without a limit."""


@frozen_dataclass
class RunOptions(ABC):
    """All options of a run.

    Options are names, numbers and sections only, so that they pickle. Classes are looked up on use.
    """

    config: str = "dqn-pong-small"
    """Row of `CONFIGS`, by name or number."""
    mode: Literal[1, 2] = 1
    """Mode 1 trains and mode 2 tests."""
    machine: str = "local"
    """First part of the run's signature, which names logs/<machine>_<timestamp>/."""
    timestamp: str | None = None
    """Second part of the signature. If None, now; in mode 2 that of the newest run of this row, game, agent and
    model."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """Seed of all random numbers."""
    engine: str = "local"
    """`local` starts processes, `inline` is one reproducible process, `ray` uses a cluster."""
    num_actors: int = Field(default=1, ge=1, le=4_096)
    """Number of processes that play."""
    num_envs_per_actor: int = Field(default=8, ge=0, le=65_536)
    """Environments that an actor steps together. 0 tries numbers out."""
    num_learners: int = Field(default=1, ge=1, le=256)
    """Number of processes that learn, each with a batch and a memory of its own."""
    device: str = "auto"
    """Learner's device: cpu, cuda (a GPU for each learner), cuda:1; auto is cuda if there is a GPU."""
    resume: str | None = None
    """Signature of the run to continue; `newest` is that of this row, game, agent and model."""
    model_file: str | None = None
    """Path of the weights to start from (mode 1) or to test (mode 2)."""
    render: bool = False
    """Show the games in a window (mode 2)."""
    record: bool = False
    """Write the games to a video file, mp4 by default (mode 2); in mode 1 see evaluator.record_every."""
    profile: bool = False
    """Report where actors and learner spend their time, under profile/ and in a table at the end."""
    profile_trace: int = Field(default=0, ge=0, le=10_000)
    """Learner updates that torch.profiler records; 0 records none."""
    episodes: int = Field(default=30, ge=1, le=1_000_000)
    """Number of episodes played (mode 2)."""
    check: bool = False
    """Print what this row is, needs and costs, try a few steps and end (mode 1)."""
    steps: int | None = Field(default=None, ge=1, le=10**15)
    """Agent steps after which the run stops; None sets no limit."""
    updates: int | None = Field(default=None, ge=1, le=10**15)
    """Learner updates after which the run stops; None sets no limit."""
    seconds: float | None = Field(default=None, gt=0, le=1e9)
    """Seconds after this start at which the run stops; a continued run does not keep it."""
    target_score: float | None = Field(default=None, ge=-1e12, le=1e12)
    """Mean return of an evaluation at which the run stops; None sets no limit."""

    agent_type: str = ""
    """Agent class: a name of utils/factory.py, or package.module:Class of your own."""
    env_type: str = ""
    """Environment class: a name of utils/factory.py, or package.module:Class of your own."""
    game: str = ""
    """Name of the game as the environment class knows it: pong, CartPole-v1."""
    memory_type: str = ""
    """Memory class: shared (uniform replay), prioritized, rollouts, queue, mixed, circular of utils/factory.py, or
    package.module:Class of your own."""
    model_type: str = ""
    """Model class: a name of utils/factory.py, or package.module:Class of your own."""
    root: str = ""
    """Folder of models/ and logs/."""

    agent: AgentParams = AgentParams()
    env: EnvParams = EnvParams()
    memory: MemoryParams = MemoryParams()
    model: ModelParams = ModelParams()
    replay: StorageParams = StorageParams()
    rate_limiter: RateLimiterParams = RateLimiterParams()
    actor: ActorParams = ActorParams()
    learner: LearnerParams = LearnerParams()
    evaluator: EvaluatorParams = EvaluatorParams()
    logger: LoggerParams = LoggerParams()
    video: VideoParams = VideoParams()
    supervisor: SupervisorParams = SupervisorParams()
    ray: RayParams = RayParams()

    # classes ----------------------------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def agent_class(self) -> type[Agent]: ...

    @property
    @abstractmethod
    def env_class(self) -> type[Env]: ...

    @property
    @abstractmethod
    def memory_class(self) -> type[Memory]: ...

    @property
    @abstractmethod
    def model_class(self) -> type[Model]: ...

    @abstractmethod
    def make_agent(self, spec: EnvSpec, device: str = "cpu", precision: str = "float32") -> Agent:
        """Return an agent whose networks are made on this device when the agent first uses them."""

    @property
    def batch_size(self) -> int:
        """The windows of a learner's batch. Where agent.batch_size is 0, one of each environment of the learner."""
        return self.agent.batch_size or self.num_actors // self.num_learners * self.num_envs_per_actor

    @property
    def samples_per_step(self) -> float:
        """The samples that are learnt from for each agent step stored."""
        limited = self.rate_limiter.samples_per_insert
        return (self.memory_class.samples_per_step(self.memory) or 1.0) if limited is None else limited

    def updates_of_run(self, samples_per_window: int) -> float | None:
        """Return the updates after which `steps` or `updates` end the run; None if neither is set.

        Args:
            samples_per_window: Steps of one window that the agent learns from.
        """
        limits: list[float] = [] if self.updates is None else [self.updates]
        if self.steps is not None:
            limits.append((self.steps - self._steps_without_updates) / self._steps_per_update(samples_per_window))
        return min(limits, default=None)

    def progress(self, agent_steps: int, updates: int, samples_per_window: int) -> float:
        """Return the share of the learning, 0 to 1, that is over before an update.

        The larger share counts if both `steps` and `updates` end the run; without either it is 0.

        Args:
            agent_steps: Agent steps of the run when the update is made. Those for which it is due do not count yet.
            updates: Updates made before.
            samples_per_window: Steps of one window that the agent learns from.
        """
        shares = [0.0] if self.updates is None else [updates / self.updates]
        if self.steps is not None:
            not_learnt = self._steps_without_updates + self._steps_per_update(samples_per_window)
            shares.append((agent_steps - not_learnt) / max(self.steps - self._steps_without_updates, 1))
        return min(max(shares), 1.0)

    @property
    def _steps_without_updates(self) -> int:
        """The agent steps at the start for which no update is due; 0 if `samples_per_insert` is None."""
        return 0 if self.rate_limiter.samples_per_insert is None else self.rate_limiter.min_replay_size

    def _steps_per_update(self, samples_per_window: int) -> float:
        """Return the agent steps for which there is one update."""
        return self.num_learners * self.batch_size * samples_per_window / self.samples_per_step

    @property
    def learners_at_home(self) -> range:
        """The learners whose memories are on the node of main."""
        on_cluster = self.engine == "ray" and self.ray.address is not None
        return range(1 if on_cluster and self.ray.learner_placement == "spread" else self.num_learners)

    # files ------------------------------------------------------------------------------------------------------------
    @property
    def signature(self) -> str:
        """The name of the run, which names its files and folders."""
        return f"{self.machine}_{self.timestamp}"

    @property
    def log_folder(self) -> Path:
        return Path(self.root) / "logs" / self.signature

    @property
    def model_path(self) -> Path:
        """The file of the weights that scored best in an evaluation."""
        return Path(self.root) / "models" / f"{self.signature}.pth"

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.root) / "models" / f"{self.signature}_checkpoints"

    @property
    def compile_cache(self) -> Path:
        """The folder of the compiler's files, which all runs share."""
        return Path(self.root) / ".cache" / "compiled"

    def to_dict(self) -> dict[str, Any]:
        """Return every option, nested as here, with lists in place of tuples, as JSON can carry them."""
        plain: dict[str, Any] = to_jsonable_python(dataclasses.asdict(self), fallback=str)
        return plain


def make_env(
    options: RunOptions, num_envs: int, *, training: bool, num_threads: int = 1, render_mode: str | None = None
) -> ValidatedEnv:
    """Construct the environment that the options name, whoever wrote its class."""
    with foreign_code("its constructor", may_lack_packages=True):
        env = options.env_class(
            options.env, options.game, num_envs, training=training, num_threads=num_threads, render_mode=render_mode
        )
    action = env.spec.action
    takes_joint_actions = (
        isinstance(action, MultiDiscrete)
        and not issubclass(MultiDiscrete, options.agent_class.actions)
        and action.num_joint_actions <= options.agent_class.max_joint_actions(options.agent)
    )
    return JointActionsEnv(env, num_envs) if takes_joint_actions else ValidatedEnv(env, num_envs)
