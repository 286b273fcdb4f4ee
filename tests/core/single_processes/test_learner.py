"""The learner slices batches, computes features by published weights and averages statistics."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.agent import LearnerOutput
from core.agents.dqn import DQN
from core.agents.impala import Impala
from core.checkpoint.run_checkpoint import CheckpointError
from core.distributed.learner_group import SingleLearner
from core.learning.updates import EagerMetricAccumulator
from core.memories.prioritized import PrioritizedMemory
from core.memories.uniform import UniformMemory
from core.memories.unrolls.mixed import MixedMemory
from core.memories.unrolls.queue import QueueMemory
from core.runtime.parameter_store import ParameterStore
from core.runtime.run_state import RunCounters, RunState
from core.single_processes.learner import _Learner, _make_updater, _precomputes, feature_source
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import Batch, SampleIds, Window, slice_batch
from tests.core.agents.unrolls import Table, random_unrolls, table_agent
from tests.reliability.test_inline import train
from utils.config import memory_budget
from utils.config.command_line import read_options
from utils.config.validation import environment_spec


def numbered_batch(size, fresh=True):
    """Return windows of T + 1 = 3 steps in which every element identifies its window."""
    number = torch.arange(size)
    rows = number.expand(3, -1)
    return Batch(
        Window(
            rows[..., None],
            rows % 2 == 0,
            rows % 3 == 0,
            rows,
            rows.float(),
            rows / 10,
            {"logits": rows[..., None] + 0.5},
            (number[:, None] * 2, number * 3),
        ),
        SampleIds(np.arange(size), np.arange(size) + 100),
        number / 4,
        number % 2 == 0 if fresh else None,
    )


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("part", [slice(0, 3), slice(3, 6), slice(6, 9)])
def test_a_slice_has_every_field_of_its_windows(part, fresh):
    batch = numbered_batch(7, fresh)
    some = slice_batch(batch, part)
    chosen = list(range(7))[part]
    assert len(some.weights) == len(chosen)
    expected = numbered_batch(7, fresh)
    for name in Window._fields[:6]:
        assert torch.equal(getattr(some.window, name), getattr(expected.window, name)[:, chosen]), name
    assert torch.equal(some.window.extras["logits"], expected.window.extras["logits"][:, chosen])
    assert [state.tolist() for state in some.window.states] == [
        [[2 * number] for number in chosen],
        [3 * number for number in chosen],
    ]
    assert some.keys.env_ids.tolist() == chosen and some.keys.step_ids.tolist() == [100 + number for number in chosen]
    assert some.weights.tolist() == [number / 4 for number in chosen]
    assert (some.fresh is None) == (not fresh) and (
        not fresh or some.fresh.tolist() == [number % 2 == 0 for number in chosen]
    )


# features ---------------------------------------------------------------------------------------------------------
def feature_context(store, make_agent, precision="auto"):
    options = SimpleNamespace(actor=SimpleNamespace(precision=precision))
    spec = EnvSpec("any", ArraySpec((84, 84), "uint8"), 4, Discrete(3), is_image=True, max_value=255.0)
    return SimpleNamespace(
        options=options, spec=spec, parameters=store, make_agent=make_agent, device_of_actor=lambda _: "cpu"
    )


@pytest.fixture
def source():
    """Return the learner's network, the parameter store, the feature function and a window.

    Nothing is published yet.
    """
    batch, logits, values = random_unrolls(seed=1, length=3, streams=4)
    logits, values = logits.astype(np.float32), values.astype(np.float32)
    agent = table_agent(Impala, logits, values)
    store = ParameterStore(ParameterStore.size_of(agent.model))
    context = feature_context(store, lambda *_: table_agent(Impala, 0 * logits, 0 * values))
    return agent.model, store, feature_source(context, agent), batch.window


def test_features_use_published_weights_not_current_ones(source):
    model, store, features_of, window = source
    published = model.logits.detach().clone()
    expected = published[window.observations[:-1, :, 0]]  # [T, B, F]
    assert torch.equal(features_of(window), expected)  # a resumed run chooses its first batch before it publishes
    store.publish(model)
    assert torch.equal(features_of(window), expected)
    model.logits.data.add_(1.0)
    assert torch.equal(features_of(window), expected)
    store.publish(model)
    assert torch.equal(features_of(window), expected + 1)
    assert torch.equal(model.logits, published + 1)


def test_features_do_not_use_the_learners_random_state(source):
    _, _, features_of, window = source
    before = torch.get_rng_state()
    features_of(window)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_feature_network_leaves_the_learners_random_state_alone():
    def make_agent(*_):
        spec = SimpleNamespace(action=None)
        return Impala(Impala.Params(), spec, lambda: Table(torch.rand(1, 4).numpy(), np.zeros(1)))

    agent, before = make_agent(), torch.get_rng_state()
    _ = agent.model
    torch.set_rng_state(before)
    feature_source(feature_context(None, make_agent), agent)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("asked", "expected"), [("auto", "bf16"), ("float32", "float32"), ("bf16", "bf16")])
def test_features_are_computed_in_the_actors_precision(asked, expected, monkeypatch):
    """Elite replay compares them with those that actors stored."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    precisions = []

    def make_agent(device="cpu", precision="float32"):
        precisions.append(precision)
        return Impala(Impala.Params(), SimpleNamespace(action=None), lambda: Table(np.zeros((1, 4)), np.zeros(1)))

    feature_source(feature_context(None, make_agent, asked), make_agent())
    assert precisions == ["float32", expected]


# checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("may_sample", "starved", "marks"),
    [(True, False, ["wait", "sample"]), (True, True, ["wait", "wait"]), (False, False, ["wait"])],
)
def test_time_without_a_batch_counts_as_what_held_it_up(may_sample, starved, marks):
    """Sampling that takes long, a memory without windows, or the rate limiter."""
    found = list[str]()
    learner = SimpleNamespace(
        context=SimpleNamespace(
            run_state=SimpleNamespace(stopped=False, checkpoint_due=False),
            options=SimpleNamespace(updates=None, batch_size=1),
            rate_limiter=SimpleNamespace(can_sample=lambda samples: may_sample),
        ),
        group=SingleLearner(),
        checker=SimpleNamespace(updates=0),
        batches=SimpleNamespace(get=lambda timeout: None, starved=starved),
        profile=SimpleNamespace(mark=found.append),
        updater=SimpleNamespace(updates_per_call=1),
        agent=SimpleNamespace(samples_per_window=1),
    )
    assert next(_Learner.learn(learner)) is False and found == marks


def test_failed_checkpoints_are_counted():
    reported = []

    def fail(index):
        raise CheckpointError("no space left on device")

    learner = object.__new__(_Learner)
    learner.write_parts, learner.checkpoint_errors, learner.group = fail, 0, SingleLearner()
    learner.context = SimpleNamespace(
        counters=RunCounters(1, 1),
        run_state=RunState(1),
        publishes=lambda index: False,
        process_ind=lambda role, index: 0,
        report=lambda role, index, values: reported.append(values),
    )
    for _ in range(3):
        list(learner.save(learner.group))
    assert reported == [{"checkpoint_errors": 1.0}, {"checkpoint_errors": 2.0}, {"checkpoint_errors": 3.0}]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (torch.zeros(()), "'Tensor' object has no attribute 'state_dict'"),
        (SimpleNamespace(state_dict=lambda: {"scale": np.float32(1)}), "agent.mine.scale is a float32"),
    ],
)
def test_a_part_that_no_checkpoint_can_hold_ends_a_run_before_its_first_update(
    part, message, tmp_path, monkeypatch, capfd
):
    parts, learn, updates = DQN.checkpoint_parts, DQN.learn, []
    monkeypatch.setattr(DQN, "checkpoint_parts", lambda self: {**parts(self), "mine": part})
    monkeypatch.setattr(DQN, "learn", lambda self, batch: (updates.append(batch), learn(self, batch))[1])
    words = ("--config", "dqn-cartpole", "--engine", "inline", "--rate_limiter.min_replay_size", "100")
    with pytest.raises(AssertionError):  # the exit code is not 0
        train(tmp_path, *words, "--updates", "1")
    assert message in capfd.readouterr().err and not updates


# statistics -------------------------------------------------------------------------------------------------------
def test_statistics_are_means_over_applied_updates():
    statistics, losses = EagerMetricAccumulator(), torch.tensor([1.0, 4.0, 100.0, 7.0])
    for number, skipped in enumerate([False, False, True, False]):
        statistics.add(LearnerOutput({"loss": losses[number], "count": torch.tensor(number)}, None, skipped))
    assert statistics.take() == {"loss": 4.0, "count": pytest.approx(4 / 3), "nonfinite_updates": 1.0}
    assert losses.tolist() == [1.0, 4.0, 100.0, 7.0]
    assert statistics.take() == {"nonfinite_updates": 1.0}
    statistics.add(LearnerOutput({"loss": losses[0]}, None))
    assert statistics.take() == {"loss": 1.0, "nonfinite_updates": 1.0}


def test_only_strategies_that_use_priorities_receive_them():
    assert PrioritizedMemory.__new__(PrioritizedMemory).takes_priorities
    for rule in (UniformMemory, QueueMemory, MixedMemory):
        assert not rule.__new__(rule).takes_priorities, rule


# targets computed ahead --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--config", "dqn-pong"), True),
        (("--config", "rainbow-pong"), True),
        (("--config", "r2d2-pong"), True),
        (("--config", "dqn-pong", "--engine", "inline"), False),
        (("--config", "dqn-pong", "--learner.prefetch", "0"), False),
        (("--config", "dqn-pong", "--agent.target_update_period", "99"), False),
        (("--config", "dqn-minatar-breakout"), False),
        (("--config", "dqn-cartpole"), False),
        (("--config", "ppo-pong"), False),
    ],
)
def test_targets_of_large_images_are_computed_ahead(root, words, expected, monkeypatch):
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 1 << 40)
    options = read_options(["--root", str(root), *words])
    spec = environment_spec(options)
    assert _precomputes(SimpleNamespace(options=options, spec=spec), options.make_agent(spec)) is expected


def test_the_first_batches_are_sampled_when_the_replay_is_warm(root):
    options = read_options(["--root", str(root), "--config", "dqn-cartpole", "--learner.compile", "no"])
    spec, sizes = environment_spec(options), []
    limiter, agent = SimpleNamespace(is_warming_up=True), options.make_agent(spec)
    agent.init_learner()
    context = SimpleNamespace(options=options, spec=spec, device_of=lambda index: "cpu", rate_limiter=limiter)

    def sample(size):
        sizes.append(size)
        return numbered_batch(size, fresh=False)

    memory = SimpleNamespace(sample=sample, window=agent.window, takes_priorities=False)
    source, _ = _make_updater(context, agent, memory, 0, [])
    with closing(source) as batches:
        assert batches.get(timeout=0.2) is None and sizes == []
        limiter.is_warming_up = False
        assert len(batches.get(timeout=5).weights) == options.batch_size and sizes
