"""The measuring program for GPU machines does its work at a toy size on the CPU."""

from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.gpu import ROW, TOY, full_memory, measure, per_second
from core.resident import Refreshed
from utils import validation
from utils.command_line import read_options


def toy(root):
    return read_options([*ROW, *TOY, "--device", "cpu", "--actor.device", "cpu", "--root", str(root)])


def test_every_part_is_measured(root):
    rates = measure(toy(root), seconds=0.05, rounds=1, say=lambda line: None)
    assert list(rates) == ["emulator", "inference, eager", "updates, float32, eager", "updates, bf16, eager"]
    assert all(rate > 0 for each in rates.values() for rate in each)


def test_the_memory_that_updates_are_measured_on_is_full_and_its_windows_are_sound(root):
    options = toy(root)
    spec = validation.environment_spec(options)
    memory = full_memory(options, spec, options.make_agent(spec))
    resident = memory.Resident(memory, torch.device("cpu"))
    assert Refreshed(resident).get(0.0) is resident and memory.size() >= options.memory.capacity
    resident.plan(1)
    window = resident.sample(64)[0].window
    assert not window.lasts[0].any() and (window.discounts == (~window.lasts).float()).all()
    np.testing.assert_array_equal(window.firsts[1:], window.lasts[:-1])


def test_a_rate_counts_what_was_done_while_it_was_measured(monkeypatch):
    clock = [100.0]

    def work():
        clock[0] += 0.5
        return 7

    monkeypatch.setattr("benchmarks.gpu.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert per_second(work, 10.0, torch.device("cpu")) == 14.0 and clock[0] == 100.0 + 5 * 0.5 + 10.0
