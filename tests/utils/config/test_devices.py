"""Options that name devices, or need one, are validated before anything is allocated."""

import re
import shlex

import pytest

from core.agents.dqn import DQN
from core.memories.prioritized import PrioritizedMemory
from utils.config import memory_budget
from utils.config.command_line import read_options

RESIDENT = ("--learner.replay_device", "learner")


class Own(DQN):
    """It does not inherit `supports_cuda_graphs`."""


class OwnRule(PrioritizedMemory):
    """A rule that the device's replay of its base does not know."""

    def update_priorities(self, keys, priorities):
        super().update_priorities(keys, priorities / 2)


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize(
    "words", [(*RESIDENT, "--learner.cuda_graph", "on"), ("--learner.precision", "tf32"), ("--actor.cuda_graph", "on")]
)
def test_what_needs_cuda_is_refused_with_the_available_devices(refuse, no_cuda, words):
    for device in ("auto", "cpu"):
        told = refuse("--config", "dqn-cartpole", "--device", device, *words)
        of, none = ("actor.device", "cpu") if words[0] == "--actor.cuda_graph" else ("device", device)
        assert f"needs a CUDA device and {of}='{none}' is none; this machine has cpu" in told


@pytest.mark.parametrize(
    "words",
    [
        RESIDENT,
        (*RESIDENT, "--learner.cuda_graph", "auto"),
        (*RESIDENT, "--learner.cuda_graph", "off", "--learner.updates_per_graph_launch", "3"),
        ("--learner.precision", "bf16"),
        ("--learner.precision", "auto"),
    ],
)
def test_other_options_run_without_cuda(root, no_cuda, words):
    assert read_options(["--config", "dqn-cartpole", *words, "--root", str(root)]).device == "cpu"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--config", "dqn-cartpole", "--learner.updates_per_graph_launch", "2"),
            "learner.updates_per_graph_launch=2 needs learner.replay_device=learner",
        ),
        (
            ("--config", "dqn-cartpole", "--learner.cuda_graph", "on", "--learner.microbatch_on_oom", "true"),
            "captured batches have one size",
        ),
        (
            (
                "--config",
                "td3-pendulum",
                *RESIDENT,
                *shlex.split("--learner.cuda_graph on --learner.updates_per_graph_launch 3"),
            ),
            "learner.updates_per_graph_launch=3 must be a multiple of 2",
        ),
        (
            ("--config", "td3-pendulum", "--learner.cuda_graph", "on"),
            "learner.updates_per_graph_launch=1 must be a multiple of 2",
        ),
        (
            ("--config", "dqn-cartpole", "--learner.cuda_graph", "on", "--num_learners", "2", "--num_actors", "2"),
            "on is for one learner",
        ),
        (("--config", "impala-cartpole", *RESIDENT), "memory_type could be shared or prioritized"),
        (
            ("--config", "dqn-cartpole", *RESIDENT, "--memory_type", "tests.utils.config.test_devices:OwnRule"),
            "test_devices:OwnRule cannot be on the learner's device",
        ),
        (
            shlex.split(
                "--config dqn-cartpole --agent_type tests.utils.config.test_devices:Own --learner.cuda_graph on"
            ),
            "agent_type=tests.utils.config.test_devices:Own does not itself set supports_cuda_graphs; "
            "agent_type could be dqn or rainbow or",
        ),
        (
            shlex.split("--config dqn-cartpole --agent_type tests.utils.config.test_devices:Own --learner.compile yes"),
            "learner.compile=yes: agent_type=tests.utils.config.test_devices:Own does not itself set",
        ),
        (
            ("--config", "dqn-cartpole", *RESIDENT, "--learner.microbatch_on_oom", "true"),
            "needs learner.replay_device=cpu",
        ),
        (
            ("--config", "dqn-cartpole", *RESIDENT, "--learner.updates_per_graph_launch", "200"),
            "12800 samples of a batch times",
        ),
        (
            ("--config", "dqn-cartpole", "--actor.num_env_splits", "3"),
            "actor.num_env_splits=3 must divide num_envs_per_actor=8",
        ),
        (
            ("--config", "dqn-cartpole", "--actor.num_env_splits", "0", "--num_envs_per_actor", "0"),
            "actor.num_env_splits=0 must be at least 1",
        ),
        (("--config", "dqn-cartpole", "--actor.device", "cuda:9"), "actor.device='cuda:9' is not on this machine"),
        (("--config", "dqn-cartpole", "--learner.precision", "half"), "must be one of auto, float32, tf32, bf16"),
    ],
)
def test_incompatible_options_are_refused(refuse, words, told):
    assert told in refuse(*words)


def on_a_gpu(monkeypatch, free):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: free)


def test_a_replay_that_does_not_fit_on_the_gpu_is_refused(refuse, monkeypatch):
    free = 8 << 30
    on_a_gpu(monkeypatch, free)
    words = ("--config", "dqn-breakout", "--device", "cuda", *RESIDENT)
    monkeypatch.setattr("utils.config.memory_budget.available_bytes", lambda: 1 << 40)
    told = refuse(*words)
    needed, free_told, fitting = (
        int(figure.replace(",", "")) for figure in re.findall(r"([\d,]+) (?:bytes|are free|would fit)", told)
    )
    assert needed >= 10**6 * 84 * 84 + memory_budget.DEVICE_BYTES > free == free_told
    assert read_options([*words, "--memory.capacity", str(fitting - 5_000)]).memory.capacity == fitting - 5_000
    assert refuse(*words, "--memory.capacity", str(fitting + 20_000))


def test_the_fullest_gpu_of_several_learners_counts(refuse, monkeypatch):
    on_a_gpu(monkeypatch, 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("utils.config.memory_budget.available_bytes", lambda: 1 << 40)
    words = ("--config", "dqn-breakout", "--num_learners", "2", "--num_actors", "2", "--device", "cuda", *RESIDENT)
    for full in ("cuda:0", "cuda:1"):
        monkeypatch.setattr(
            memory_budget, "free_bytes", lambda device, full=full: (8 if str(device) == full else 100) << 30
        )
        assert f"{8 << 30:,} are free on {full}" in refuse(*words)


def test_a_gpu_config_warns_where_there_is_no_gpu(no_cuda, capsys, monkeypatch):
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 64 << 30)
    assert read_options(["--config", "dqn-pong-gpu"]).device == "cpu"
    assert "device=auto is cpu, where learner.replay_device=learner is slow" in capsys.readouterr().err
    read_options(["--config", "dqn-pong-gpu", "--device", "cpu"])
    assert capsys.readouterr().err == ""


def test_on_a_cpu_the_device_replay_counts_as_main_memory(refuse, monkeypatch, no_cuda):
    monkeypatch.setattr("utils.config.memory_budget.available_bytes", lambda: 12 << 30)
    words = ("--config", "dqn-breakout", "--device", "cpu")
    assert read_options(words).memory.capacity == 1_000_000
    assert "would fit" in refuse(*words, *RESIDENT)
    assert memory_budget.copied_bytes(read_options(words), None, None) == 0


def test_learners_on_other_nodes_need_no_gpu_here(monkeypatch, refuse):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    words = ("--config", "dqn-cartpole", "--engine", "ray", "--num_learners", "2", "--num_actors", "2")
    words += ("--device", "cuda", "--ray.address", "10.0.0.1:6379")
    assert read_options(words).learners_at_home == range(1)
    assert "need a GPU each and this machine has 1" in refuse(*words, "--ray.learner_placement", "pack")
    assert "ray.learner_cpus=0 leaves the nodes" in refuse(*words, "--ray.learner_cpus", "0")
