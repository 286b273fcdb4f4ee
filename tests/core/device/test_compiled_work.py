"""Recorded and compiled updates equal eager ones, and what is missing is said in a sentence."""

import copy
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from core.device import recorded_work
from core.device.recorded_work import WARM_UP, CompiledCallable, is_recording, missing_compiler, record
from core.learning.optimizer import Optimizer, OptimizerParams
from core.learning.updates import GraphedUpdate, StagedBatches
from tests.core.distributed.test_two_learners import flat
from tests.core.learning.test_precision import AGENTS, make_agent, make_batches
from tests.selection import slow_except

CPU = torch.device("cpu")


def without_compiler(graph, tensors, cache, threads):
    """Run the recorded operators as they are, in place of compiling them."""

    def run():
        with torch.no_grad():
            graph(*tensors)

    return run


def trained(name, count, compiled, state=None, **settings):
    """Return the state, metrics and last priorities after updates on 12 batches in turns."""
    agent = make_agent(name, **settings)
    if state is not None:
        agent.load_state_dict(copy.deepcopy(state))
    batches = make_batches(agent, name, 12)
    updates = GraphedUpdate(agent, StagedBatches(CPU), capture=False, compiled=compiled)
    torch.manual_seed(1)
    for update in range(count):
        output = updates(batches[update % len(batches)])
    return agent.state_dict(), updates.statistics(), output.priorities


def is_called_from_cpp(cache):
    """Return True if compiled work calls its loops and operators from C++, False if from Python."""
    assert any(cache.rglob("*.so"))
    return any("CppWrapperCodeCache" in path.read_text() for path in cache.rglob("*.py"))


def assert_alike(found, expected, atol):
    (state, means, priorities), (true_state, true_means, true_priorities) = found, expected
    state, true_state = flat(state), flat(true_state)
    assert state.keys() == true_state.keys()
    for name, tensor in true_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=atol, atol=atol, msg=name)
    assert means == pytest.approx(true_means, rel=1e-3, abs=1e-5)
    assert (priorities is None) == (true_priorities is None)
    if priorities is not None:
        torch.testing.assert_close(priorities, true_priorities, rtol=1e-3, atol=10 * atol)


def test_work_that_reads_a_value_names_the_option_without_which_it_runs(tmp_path):
    total = torch.zeros(3)

    def read_values():
        total.add_(torch.nn.functional.one_hot((total + 1).long(), 100).sum())

    work = CompiledCallable(read_values, 1, tmp_path)
    for _ in range(WARM_UP):
        work()
    with pytest.raises(RuntimeError) as caught:
        work()
    assert "learner.compile no runs it" in caught.value.__notes__[0]


# Adam's first steps divide a gradient by itself: with a large epsilon, steps are nearly proportional to gradients, and
# rounding errors do not grow.
SMOOTH = {"optimizer_eps": 1.0}


QUICK = "dqn", "impala"  # to record the others takes long, so they are recorded once, after a resume
# Compiled below, or the work of others together.
CONTAINED = "sac", "ppo", "iqn, munchausen", "r2d2", "quantiles, munchausen", "ddpg, soft target"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", slow_except(QUICK, [name for name in AGENTS if name not in CONTAINED]))
def test_recorded_updates_equal_eager_ones_also_after_a_resume(name, monkeypatch, tmp_path):
    monkeypatch.setattr(recorded_work, "_compile", without_compiler)
    recorded = lambda work, cycle: CompiledCallable(work, cycle, tmp_path)  # noqa: E731
    first = again = trained(name, 16, None, **SMOOTH)
    if name in QUICK:
        first = trained(name, 16, recorded, **SMOOTH)
        assert_alike(first, again, 1e-5)
    assert_alike(trained(name, 12, recorded, first[0], **SMOOTH), trained(name, 12, None, again[0], **SMOOTH), 1e-5)


@pytest.mark.slow
def test_recorded_updates_in_bfloat16_follow_the_weights_of_both_networks(monkeypatch, tmp_path):
    """TD3's target moves in every other piece of the record only, so the pieces cannot share copies of its weights."""
    monkeypatch.setattr(recorded_work, "_compile", without_compiler)
    recorded = lambda work, cycle: CompiledCallable(work, cycle, tmp_path)  # noqa: E731
    settings = {"bf16": True, "target_update_period": 1, "learning_rate": 0.01, "smoothing_scale": 0.0}
    assert_alike(trained("td3", 16, recorded, **settings), trained("td3", 16, None, **settings), 1e-3)


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sac", "ppo")),
        *(
            pytest.param(name, marks=pytest.mark.learn)
            for name in ("dqn", "rainbow", "iqn", "r2d2", "ddpg", "d4pg", "td3", "impala", "impact", "pqn")
        ),
    ],
)
def test_compiled_updates_equal_eager_ones(name, tmp_path):
    # Rounding errors grow in IMPALA, which steps by the gradient of a sum.
    settings = {**SMOOTH, "learning_rate": 1e-5} if name == "impala" else SMOOTH
    compiled = trained(name, 100, lambda work, cycle: CompiledCallable(work, cycle, tmp_path), **settings)
    assert_alike(compiled, trained(name, 100, None, **settings), 1e-4)
    assert is_called_from_cpp(tmp_path) and "compile" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.learn
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
def test_compiled_updates_equal_eager_ones_after_a_resume(tmp_path):
    state, *_ = trained("dqn", 48, lambda work, cycle: CompiledCallable(work, cycle, tmp_path), **SMOOTH)
    found = trained("dqn", 52, lambda work, cycle: CompiledCallable(work, cycle, tmp_path), state, **SMOOTH)
    assert_alike(found, trained("dqn", 52, None, state, **SMOOTH), 1e-4)
    whole, *_ = trained("dqn", 100, None, **SMOOTH)
    for name, tensor in flat(whole).items():
        torch.testing.assert_close(flat(found[0])[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.learn
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
def test_compiled_updates_in_bfloat16_err_as_eager_ones(tmp_path):
    """Merged operators round at other places, so weights are compared with those in float32."""

    def weights(bf16, compiled):
        state, *_ = trained("iqn", 30, compiled, bf16=bf16, **SMOOTH)
        return torch.cat([tensor.flatten() for tensor in flat(state["model"]).values()])

    exact, eager = weights(False, None), weights(True, None)
    compiled = weights(True, lambda work, cycle: CompiledCallable(work, cycle, tmp_path))
    assert 0 < (compiled - exact).norm() < 3 * (eager - exact).norm()
    assert is_called_from_cpp(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
def test_only_operators_with_a_c_interface_are_called_from_cpp(monkeypatch, tmp_path):
    """Others have crashed where tensors share memory. So has _foreach_lerp with weights that are tensors."""
    headers = tmp_path / "headers"
    monkeypatch.setattr("torch._inductor.codecache._HEADER_DIR", str(headers))
    start, ends, weight, found = torch.randn(5), torch.randn(5), torch.tensor(0.3), torch.zeros(5)

    def work():
        found.copy_(torch._foreach_lerp([start], [ends], [weight])[0].cumsum(0))

    call = CompiledCallable(work, 1, tmp_path)
    for _ in range(5):
        found.zero_()
        call()
    torch.testing.assert_close(found, torch.lerp(start, ends, weight).cumsum(0))
    assert not is_called_from_cpp(tmp_path)
    assert not headers.exists()  # they would outlive the run in the folder of temporary files


def test_random_numbers_that_are_drawn_between_calls_do_not_repeat(monkeypatch, tmp_path):
    """PPO draws its minibatches so, and torch's compiler sets the global generator back when it ends."""

    def set_back(graph, tensors, cache, threads):
        state = torch.get_rng_state()
        time.sleep(0.3)
        torch.set_rng_state(state)
        return without_compiler(graph, tensors, cache, threads)

    monkeypatch.setattr(recorded_work, "_compile", set_back)
    total, drawn = torch.zeros(1), []
    call = CompiledCallable(lambda: total.add_(1), 1, tmp_path)
    torch.manual_seed(1)
    for _ in range(12):
        call()
        time.sleep(0.05)
        drawn.append(float(torch.rand(())))
    torch.manual_seed(1)
    assert drawn == [float(torch.rand(())) for _ in range(12)] and total == 12


def test_shared_memory_is_one_input_whose_views_see_every_change():
    both = torch.arange(6.0)
    first, second, alone = both[:2], both[2:].view(2, 2).t(), torch.ones(3)

    def work():
        first.add_(1)
        second.mul_(both[0])
        alone.add_(both.sum())

    graph, tensors = record(work)
    assert sorted(tensor.numel() for tensor in tensors) == [3, 6]
    after = [tensor.clone() for tensor in (both, alone)]
    work()
    expected = [both.clone(), alone.clone()]
    both.copy_(after[0]), alone.copy_(after[1])
    graph(*tensors)
    assert torch.equal(both, expected[0]) and torch.equal(alone, expected[1])


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "optimizer_eps": 1e-8}])
def test_a_recorded_step_of_adam_equals_torchs_own(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(recorded_work, "_compile", without_compiler)

    def stepped(compiled):
        torch.manual_seed(0)
        parameter, gradient = nn.Parameter(torch.randn(40)), torch.zeros(40)
        optimizer = Optimizer([parameter], OptimizerParams(learning_rate=0.01, clip_norm=0.0, **settings))
        parameter.grad = gradient

        def work():
            optimizer.apply(gradient.sum())

        call = CompiledCallable(work, 1, tmp_path) if compiled else work
        for update in range(20):
            gradient.copy_(torch.randn(40) * 10.0 ** (update % 5 - 3))
            if update == 11:
                gradient[3] = torch.nan  # which is skipped
            optimizer.plan(1)
            call()
        return parameter.detach()

    torch.testing.assert_close(stepped(True), stepped(False), rtol=1e-5, atol=1e-6)


def test_work_is_recorded_once_after_a_warm_up(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_work, "_compile", without_compiler)
    total, calls = torch.zeros(()), []

    def work():
        calls.append(is_recording())
        total.add_(len(calls) % 2)  # 1 and 0 in turns

    compiled = CompiledCallable(work, 2, tmp_path)
    for _ in range(20):
        compiled()
    assert calls == [False] * 6 + [True] * 2 and float(total) == 10 and not is_recording()


def test_the_recorded_call_waits_for_the_compiler_until_the_run_stops(tmp_path, monkeypatch):
    may_end, total, answers = threading.Event(), torch.zeros(()), [True, True, False]

    def compile_slowly(*arguments):
        assert may_end.wait(60)

    monkeypatch.setattr(recorded_work, "_compile", compile_slowly)
    compiled = CompiledCallable(lambda: total.add_(1), 1, tmp_path, keep_waiting=lambda: answers.pop(0))
    for _ in range(10):
        compiled()
    assert float(total) == 10 and not answers  # eager, and asked no more
    may_end.set()


def test_other_threads_can_call_modules_while_the_compiler_traces(tmp_path, monkeypatch):
    """A tracer replaces `nn.Module.__call__` in all threads: a run whose learner met it failed with a NameError."""
    from torch._inductor import compile_fx

    model, outputs = nn.Sequential(nn.Linear(2, 1)), []

    def traced(value):
        thread = threading.Thread(target=lambda: outputs.append(model(torch.ones(2))))
        thread.start()
        thread.join()
        return value

    def tracing(graph, tensors):
        torch.fx.symbolic_trace(traced)
        return graph

    monkeypatch.setattr(compile_fx, "compile_fx", tracing)
    compiled = CompiledCallable(lambda: None, 1, tmp_path)
    for _ in range(WARM_UP + 1):
        compiled()
    torch.testing.assert_close(outputs, [model(torch.ones(2))])


def test_what_cannot_be_compiled_stays_eager_with_its_reason(tmp_path, monkeypatch, capsys):
    from torch._inductor import compile_fx

    def failing(*arguments):
        raise OSError("the disk is full\nand more")

    monkeypatch.setattr(compile_fx, "compile_fx", failing)
    total = torch.zeros(())
    compiled = CompiledCallable(lambda: total.add_(1), 1, tmp_path)
    for _ in range(8):
        compiled()
    assert float(total) == 8
    begin, end = capsys.readouterr().err.splitlines()
    assert begin.startswith("updates are being compiled, ")
    assert end == "updates are not compiled: OSError: the disk is full"


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert missing_compiler() == "no C++ compiler (no-such-compiler) is installed"
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert missing_compiler() == "no C++ compiler (g++, clang++, c++) is installed"
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    assert missing_compiler().startswith("Python.h is missing")
