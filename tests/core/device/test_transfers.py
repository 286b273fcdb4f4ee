"""Tensors are copied in place; every process sets its threads and flushes denormal numbers."""

import shlex
import threading

import pytest
import torch

from core.device.torch_runtime import upload_all, use_threads
from utils.config.command_line import read_options
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context

TINY = 1e-39  # float32's normal numbers begin at 1.2e-38


@pytest.fixture
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(before)


def halved():
    return (torch.full((4,), TINY) / 2).tolist()


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot")
def test_denormals_are_zero_here_and_in_threads_started_later(threads_as_before):
    assert halved() != [0.0] * 4
    use_threads(1)
    found = []
    thread = threading.Thread(target=lambda: found.extend(halved()))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == 1 and halved() == found == [0.0] * 4


def test_an_inline_run_restores_the_denormal_setting(tmp_path, threads_as_before):
    context, agent = create_context(
        read_options(
            [
                "--config",
                "dqn-cartpole",
                "--root",
                str(tmp_path),
                *shlex.split(
                    "--engine inline --num_actors 1 --num_envs_per_actor 2 --rate_limiter.min_replay_size 20 "
                    "--agent.batch_size 4 --updates 3 --evaluator.episodes 1 --evaluator.max_steps 3 "
                    "--memory.capacity 500"
                ),
            ]
        )
    )
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict)) == 0
    assert halved() != [0.0] * 4


def test_tensors_of_all_types_are_copied_into_those_that_were_there():
    sources = [torch.arange(6).view(2, 3), torch.rand(4)[::2], torch.tensor([True, False]), torch.zeros(0)]
    targets = [torch.zeros_like(source) for source in sources]
    addresses = [target.data_ptr() for target in targets]
    upload_all(sources, targets)
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
    assert [target.data_ptr() for target in targets] == addresses
