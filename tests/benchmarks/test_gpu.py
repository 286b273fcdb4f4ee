"""The GPU benchmark runs at a toy size on the CPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.gpu import CASES, ceiling, full_memory, measure, per_second, run, words_of
from utils.config import validation
from utils.config.command_line import read_options


def toy(root, case="dqn"):
    return read_options([*words_of(case, toy=True), "--root", str(root)])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "dqn of 32"])  # whose toy is that of dqn
def test_every_part_of_every_case_is_measured(root, case):
    options = toy(root, case)
    rates = measure(options, seconds=0.05, rounds=1)
    assert list(rates) == ["emulator", "inference, eager", "updates, float32, eager", "updates, bf16, eager"]
    assert all(rate > 0 for rate in rates.values())
    assert ceiling(options, {**rates, "emulator": 1e-9}) == ("emulator", 1e-9)


@pytest.mark.parametrize("case", CASES)
def test_gpu_cases_use_their_configs_with_graphed_updates(case, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("utils.config.memory_budget.free_bytes", lambda device: 80 << 30)
    monkeypatch.setattr("utils.config.memory_budget.available_bytes", lambda: 128 << 30)
    options = read_options(words_of(case, toy=False))
    assert options.device == options.actor.device == "cuda" and options.learner.cuda_graph == "on"
    assert ("deep" in case) == (options.learner.replay_device == "cpu")


def test_a_run_is_measured_once_its_learner_keeps_up(monkeypatch, root):
    def row(time, steps, ratio):
        return {
            "time": time,
            "step": steps,
            "values": {
                "global/samples_per_insert": ratio,
                "global/agent_steps": steps,
                "global/frames": 4 * steps,
                "global/updates": 10 * time,
            },
        }

    rows = [row(second, 100 * second, 8.0 if second > 12 else 1.0) for second in range(21)]
    monkeypatch.setattr("benchmarks.gpu.train", lambda seconds, *words: rows)
    found = run(toy(root), (), 10.0, 5.0)
    assert found == {
        "agent_steps a second": 100.0,
        "frames a second": 400.0,
        "updates a second": 10.0,
        "bytes of the GPU in use": 0,
    }
    with pytest.raises(SystemExit, match="had not caught up"):
        run(toy(root), (), 10.0, 17.0)


def test_the_measured_replay_is_full_and_its_windows_are_valid(root):
    options = toy(root)
    spec = validation.environment_spec(options)
    memory = full_memory(options, spec, options.make_agent(spec))
    resident = memory.device_class(memory, torch.device("cpu"))
    assert resident.refresh() and memory.size() >= options.memory.capacity
    resident.plan(1)
    window = resident.sample(64)[0].window
    assert not window.lasts[0].any() and (window.discounts == (~window.lasts).float()).all()
    np.testing.assert_array_equal(window.firsts[1:], window.lasts[:-1])


def test_a_rate_counts_the_work_within_its_own_time(monkeypatch):
    clock = [100.0]

    def work():
        clock[0] += 0.5
        return 7

    monkeypatch.setattr("benchmarks.gpu.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert per_second(work, 10.0, torch.device("cpu")) == 14.0 and clock[0] == 100.0 + 5 * 0.5 + 10.0
