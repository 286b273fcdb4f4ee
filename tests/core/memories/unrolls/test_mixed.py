"""Mixed batches draw from several replay strategies, which the replay list names."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from core.memories.unrolls.mixed import DEFAULT, MixedMemory, MixedParams
from tests.core.tapes import CODED_FEATURES, CodedActor, check_coded_unrolls, coded_features, coded_spec, unroll_memory

QUEUE = '{"type": "queue", "capacity": 1, "sample_ratio": 0.5}'
ALGORITHMS = '[{"type":"queue","capacity":1,"sample_ratio":0.5},{"type":"standard","capacity":1000,"sample_ratio":0.5}]'
CUSTOM = (
    '{"type":"custom","capacity":1000,"sample_ratio":0.5,"dist_function":"ln_norm","p":2,"sample_strategy":"elite_sampling",'
    '"insert_strategy":"elite_insertion","lambda_batch_multiplier":6,"alfa_annealing_factor":2.0,'
    '"elite_sampling_strategy":"strategy3","elite_batch_size":20}'
)
PLATFORM = (
    '[{"type": "queue", "capacity": 1, "sample_ratio": 0.5}, {"type": "standard", '
    '"capacity": 1000, "sample_ratio": '
    "0.5}]",
    '[{"type": "custom", "capacity": 1000, "sample_ratio": 0.5, '
    '"dist_function":"ln_norm", "sample_strategy":"elite_sampling", '
    '"lambda_batch_multiplier":6, "alfa_annealing_factor":2.0} ,{"type": "queue", "capacity": 1, "sample_ratio": 0.5}]',
)


def make(*items: dict, batch_size: int = 8, num_actors: int = 1, num_envs: int = 2, seed: int = 0):
    params = MixedParams(json.dumps(items))
    assert MixedMemory.problems(params, batch_size) == []
    memory = unroll_memory(
        MixedMemory,
        params,
        coded_spec((2,), 4),
        batch_size=batch_size,
        extras=CODED_FEATURES,
        num_actors=num_actors,
        num_envs=num_envs,
        seed=seed,
    )
    memory.features_of = coded_features
    return memory, [CodedActor(memory, actor) for actor in range(num_actors)]


def problems(text: str, batch_size: int = 32) -> list[str]:
    return MixedMemory.problems(MixedParams(text), batch_size)


# batches ----------------------------------------------------------------------------------------------------------
LISTS = [
    {"queue": 0.5, "standard": 0.5},
    {"queue": 0.125, "standard": 0.875},
    {"reservoir": 0.5, "queue": 0.5},
    {"elite": 0.5, "queue": 0.5},
    {"attentive": 0.25, "queue": 0.75},
    {"queue": 1.0},
    {"standard": 1.0},
    {"elite": 0.3, "queue": 0.3, "standard": 0.4},
    {"reservoir": 0.2, "attentive": 0.2, "custom": 0.2, "queue": 0.2, "elite": 0.2},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratios", "batch_size", "overflow"),
    [
        *((ratios, 11, "keep_latest") for ratios in LISTS),
        *((ratios, *case) for ratios in (LISTS[0], LISTS[-1]) for case in ((8, "block"), (11, "keep_oldest"))),
    ],
)
def test_every_batch_has_its_strategies_shares(ratios, batch_size, overflow):
    items = [{"type": kind, "capacity": batch_size, "sample_ratio": ratio} for kind, ratio in ratios.items()]
    for item in items:
        item |= {"on_full": overflow} if item["type"] == "queue" else {}
    memory, actors = make(*items, batch_size=batch_size, num_actors=2)
    generator, given, dry, replayed = np.random.default_rng(0), [], 0, set()
    for round_ in range(120):
        for _ in range(16 if round_ // 20 % 2 else 2):
            actors[generator.integers(2)].step()
        batch = memory.sample(batch_size)
        dry += batch is None
        if batch is None:
            continue
        unrolls = check_coded_unrolls(memory.layout, batch.window)
        fresh = batch.fresh.numpy()
        assert len(unrolls) == len(fresh) == len(batch.weights) == len(batch.keys.env_ids) == batch_size
        exact = ratios.get("queue", 0) * batch_size
        assert abs(fresh.sum() - exact) < 1 and (fresh.sum() == exact or exact % 1)
        given += [unroll for unroll, first in zip(unrolls, fresh) if first]
        replayed |= {unroll for unroll, first in zip(unrolls, fresh) if not first}
    everything = {unroll for actor in actors for unroll in actor.unrolls()}
    assert dry and len(given) == len(set(given)) and {*given} | replayed <= everything
    if "queue" in ratios:
        for stream in range(4):
            serials = [serial for other, serial in given if other == stream]
            assert serials == sorted(serials) and serials
            assert overflow != "block" or serials == list(range(0, 4 * len(serials), 4))
        statistics = memory.statistics()
        held = sum(int(held.fresh.sum()) for held in memory._pending)
        assert (
            statistics["queue_inserted"] == len(given) + held + statistics["queue_size"] + statistics["queue_dropped"]
        )
        assert overflow != "block" or statistics["queue_dropped"] == 0
    assert (len(replayed) > 8) == (set(ratios) != {"queue"})


def test_the_parts_of_a_batch_come_from_their_strategies():
    memory, (actor,) = make(
        {"type": "reservoir", "capacity": 100, "sample_ratio": 0.5},
        {"type": "queue", "capacity": 4, "sample_ratio": 0.25},
        {"type": "standard", "capacity": 2, "sample_ratio": 0.25},
        batch_size=40,
    )
    counts = Counter()
    for _ in range(40):
        actor.write(5)
        batch = memory.sample(40)
        if batch is None:
            continue
        unrolls, fresh = check_coded_unrolls(memory.layout, batch.window), batch.fresh.numpy()
        newest = set(actor.unrolls()[-2:])
        counts.update(
            "fresh" if first else "newest" if unroll in newest else "old" for unroll, first in zip(unrolls, fresh)
        )
        assert all(fresh[:10]) and set(unrolls[10:20]) <= newest  # those in the rings first, then the copies
    assert (
        counts["fresh"] == counts.total() / 4
        and counts["newest"] >= counts.total() / 4
        and counts["old"] > counts.total() / 3
    )


def test_an_unsampled_memory_counts_dropped_unrolls():
    memory, (actor,) = make(
        {"type": "queue", "capacity": 2, "sample_ratio": 0.5}, {"type": "standard", "capacity": 30, "sample_ratio": 0.5}
    )
    actor.write(100)  # has_room is not consulted before min_replay_size
    batch = memory.sample(8)
    assert batch is not None and batch.fresh.sum() == 4
    statistics = memory.statistics()
    assert (
        statistics["queue_inserted"] == 200 and statistics["queue_dropped"] == 196 and statistics["standard_size"] == 30
    )
    for _ in range(200):
        actor.step()
        memory.sample(8)
    assert actor.serial > 500


def test_a_list_without_a_queue_never_blocks_actors():
    memory, (actor,) = make({"type": "standard", "capacity": 4, "sample_ratio": 1.0})
    assert all(actor.step() for _ in range(400))


@pytest.mark.parametrize("ratios", LISTS)
def test_sampling_continues_exactly_from_a_state(ratios):
    items = [{"type": kind, "capacity": 10, "sample_ratio": ratio} for kind, ratio in ratios.items()]
    memory, (actor,) = make(*items)
    for _ in range(30):
        actor.write(1)
        memory.sample(8)
    resumed, (successor,) = make(*items, seed=6)
    resumed.load_state_dict(memory.state_dict())
    successor.serial = actor.serial
    for _ in range(12):
        expected, found = memory.sample(8), resumed.sample(8)
        assert (expected is None) == (found is None)
        if found is not None:
            assert check_coded_unrolls(memory.layout, found.window) == check_coded_unrolls(
                memory.layout, expected.window
            )
            assert found.fresh.equal(expected.fresh) and (found.keys.step_ids == expected.keys.step_ids).all()
        for other in (actor, successor):
            other.write(1)
    assert resumed.statistics() == memory.statistics() and resumed.unread() == memory.unread()


def test_copies_held_for_an_unfinished_batch_survive_a_restart(monkeypatch):
    items = (
        {"type": "queue", "capacity": 4, "on_full": "keep_oldest", "sample_ratio": 0.5},
        {"type": "standard", "capacity": 4, "sample_ratio": 0.5},
    )
    memory, (actor,) = make(*items)
    actor.write(2)
    with monkeypatch.context() as patch:  # the writer was too fast for the other strategy
        memory._ingest()
        patch.setattr(memory.trajectories, "still_valid", lambda streams, serials: np.zeros(len(serials), bool))
        assert memory.sample(8) is None
    resumed, (successor,) = make(*items)
    resumed.load_state_dict(memory.state_dict())
    successor.serial = actor.serial
    for other, writer in ((memory, actor), (resumed, successor)):
        writer.write(3)
        batch = other.sample(8)
        unrolls = check_coded_unrolls(other.layout, batch.window)
        assert [unroll for unroll, first in zip(unrolls, batch.fresh) if first] == actor.unrolls()[:4]
        writer.write(3)
        other._ingest()
        assert other.statistics()["queue_size"] == 4  # all slots are in use again


def test_a_state_holds_plain_values_and_tensors_only(tmp_path):
    memory, (actor,) = make(
        {"type": "queue", "capacity": 4, "on_full": "keep_oldest", "sample_ratio": 0.5},
        {"type": "elite", "capacity": 9, "sample_ratio": 0.5},
    )
    actor.write(9)
    memory.sample(8)
    torch.save(memory.state_dict(), tmp_path / "state")
    resumed, _ = make(
        {"type": "queue", "capacity": 4, "on_full": "keep_oldest", "sample_ratio": 0.5},
        {"type": "elite", "capacity": 9, "sample_ratio": 0.5},
    )
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert resumed.statistics() == memory.statistics()


# the replay list --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", [ALGORITHMS, f"[{CUSTOM}, {QUEUE}]", *PLATFORM, DEFAULT])
def test_replay_lists_of_the_replaced_systems_are_accepted(text):
    assert problems(text) == []
    assert {part.ratio for part in MixedMemory.components(MixedParams(text))} == {0.5}


def test_every_key_of_the_list_reaches_its_strategy():
    part, queue = MixedMemory.components(MixedParams(f"[{CUSTOM.replace('ln_norm', 'kl_div')}, {QUEUE}]"))
    params = part.params
    assert (params.capacity, params.dist_function, params.p, params.sample_strategy) == (
        1000,
        "kl_div",
        2,
        "elite_sampling",
    )
    assert (params.insert_strategy, params.lambda_batch_multiplier, params.alfa_annealing_factor) == (
        "elite_insertion",
        6,
        2.0,
    )
    assert (params.elite_sampling_strategy, params.elite_batch_size, queue.params.capacity) == ("strategy3", 20, 1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("attentive", ("newest", "attentive_sampling")),
        ("elite", ("elite_insertion", "elite_sampling")),
        ("custom", ("newest", "uniform")),
    ],
)
def test_short_names_select_custom_with_their_strategies(kind, expected):
    (part,) = MixedMemory.components(MixedParams(json.dumps([{"type": kind, "sample_ratio": 1}])))
    assert (part.params.insert_strategy, part.params.sample_strategy) == expected
    assert part.params.lambda_batch_multiplier == {"attentive": 4, "elite": 6, "custom": 1}[kind]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", ["not a JSON list"]),
        ("queue", ["not a JSON list"]),
        ("[{]", ["not a JSON list"]),
        ("[" * 100_000, ["not a JSON list"]),
        ("{}", ["must be a JSON list"]),
        ("[]", ["must be a JSON list"]),
        ("3", ["must be a JSON list"]),
        ("null", ["must be a JSON list"]),
        ("[1, 2]", ["must be a JSON list"]),
        (f"[[{QUEUE}]]", ["must be a JSON list"]),
        (CUSTOM, ["must be a JSON list"]),
        (
            '[{"type": "fifo", "sample_ratio": 1}]',
            ["item 1: type='fifo' must be one of queue, standard, reservoir, attentive, elite, custom"],
        ),
        ('[{"type": ["queue"], "sample_ratio": 1}]', ["item 1: type=['queue'] must be one of"]),
        ('[{"type": {"a": {}}, "sample_ratio": 1}]', ["item 1: type={'a': {}} must be one of"]),
        ('[{"sample_ratio": 1}]', ["item 1: type=None must be one of"]),
        (
            "[{}]",
            ["item 1: type=None must be one of", "item 1: sample_ratio=None must be greater than 0 and at most 1"],
        ),
        ('[{"type": "queue"}]', ["item 1: sample_ratio=None must be greater than 0"]),
        (
            '[{"type": "queue", "size": 3, "sample_ratio": 1}]',
            ["item 1: queue has no setting 'size'; it has sample_ratio, capacity, on_full"],
        ),
        (
            f'[{QUEUE}, {{"type": "standard", "sample_ratio": 0.5, "p": 2}}]',
            ["item 2: standard has no setting 'p'; it has sample_ratio, capacity"],
        ),
        (f"[{QUEUE}]", ["sample ratios must sum to 1, not 0.5"]),
        (f'[{QUEUE}, {{"type": "standard", "sample_ratio": 0.6}}]', ["sample ratios must sum to 1, not 1.1"]),
        ('[{"type": "queue", "sample_ratio": 0}]', ["item 1: sample_ratio=0 must be greater", "sum to 1, not 0"]),
        (
            '[{"type": "queue", "sample_ratio": -1}, {"type": "standard", "sample_ratio": 2}]',
            ["item 1: sample_ratio=-1", "item 2: sample_ratio=2"],
        ),
        ('[{"type": "queue", "sample_ratio": "1"}]', ["item 1: sample_ratio='1' must be"]),
        ('[{"type": "queue", "sample_ratio": true}]', ["item 1: sample_ratio=True must be"]),
        ('[{"type": "queue", "sample_ratio": NaN}]', ["item 1: sample_ratio=nan must be"]),
        ('[{"type": "queue", "sample_ratio": [1]}]', ["item 1: sample_ratio=[1] must be"]),
        ('[{"type": "queue", "capacity": 0, "sample_ratio": 1}]', ["item 1: capacity=0 must be at least 1"]),
        ('[{"type": "queue", "capacity": -3, "sample_ratio": 1}]', ["item 1: capacity=-3 must be at least 1"]),
        ('[{"type": "queue", "capacity": 1.5, "sample_ratio": 1}]', ["item 1: capacity=1.5 must be a valid integer"]),
        (
            '[{"type": "queue", "capacity": "many", "sample_ratio": 1}]',
            ["item 1: capacity='many' must be a valid integer"],
        ),
        ('[{"type": "queue", "capacity": true, "sample_ratio": 1}]', ["item 1: capacity=True must be a valid integer"]),
        ('[{"type": "queue", "capacity": null, "sample_ratio": 1}]', ["item 1: capacity=None must be a valid integer"]),
        (
            '[{"type": "queue", "capacity": {"a": [1]}, "sample_ratio": 1}]',
            ["item 1: capacity={'a': [1]} must be a valid integer"],
        ),
        (f'[{{"type": "queue", "capacity": {10**400}, "sample_ratio": 1}}]', ["must be at most 10000000"]),
        (
            '[{"type": "queue", "on_full": "drop", "sample_ratio": 1}]',
            ["item 1: on_full='drop' must be one of block, keep_latest"],
        ),
        ('[{"type": "queue", "on_full": 3, "sample_ratio": 1}]', ["item 1: on_full=3 must be one of block"]),
        ('[{"type": "custom", "p": "two", "sample_ratio": 1}]', ["item 1: p='two' must be a valid number"]),
        (f'[{{"type": "custom", "p": {10**400}, "sample_ratio": 1}}]', ["must be a valid number"]),
        ('[{"type": "custom", "p": Infinity, "sample_ratio": 1}]', ["item 1: p=inf must be finite"]),
        (
            '[{"type": "custom", "dist_function": "l2", "sample_ratio": 1}]',
            ["dist_function='l2' must be one of ln_norm, cos_dist, kl_div"],
        ),
        (
            '[{"type": "elite", "elite_sampling_strategy": "strategy9", "sample_ratio": 1}]',
            ["must be one of strategy1, strategy2"],
        ),
        (
            '[{"type": "attentive", "lambda_batch_multiplier": 0.5, "sample_ratio": 1}]',
            ["lambda_batch_multiplier=0.5 must be at least 1"],
        ),
        (f"[{QUEUE}, {QUEUE}]", ["there can be one queue only"]),
        (
            '[{"type": "queue", "sample_ratio": 0.99}, {"type": "standard", "sample_ratio": 0.01}]',
            ["0.01 is no unroll of a batch of 32"],
        ),
        ('[{"type": "queue", "on_full": "keep_oldest", "sample_ratio": 1}]', ["capacity=1 is below 32"]),
        (
            '[{"type": "fifo", "sample_ratio": 2}, '
            '{"type": "queue", "capacity": 0, "size": 1, "on_full": 5, "sample_ratio": 0.5}]',
            [
                "item 1: type='fifo'",
                "item 1: sample_ratio=2",
                "item 2: queue has no setting 'size'",
                "item 2: capacity=0",
                "item 2: on_full=5 must be one of block",
                "sample ratios must sum to 1, not 2.5",
            ],
        ),
    ],
)
def test_every_mistake_in_a_list_is_reported_in_a_sentence(text, sentences):
    found = problems(text)
    assert len(found) == len(sentences) and all(problem.startswith("memory.replay_parameters: ") for problem in found)
    for sentence in sentences:
        assert any(sentence in problem for problem in found), found


BASE = "from core.memories.unrolls.unroll_memory import ReplayStrategy as Base\n"


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("absent_package", "import nothing_at_all_here", "ModuleNotFoundError: No module named 'nothing_at_all_here'"),
        ("syntax_error", "def f(:", "SyntaxError: "),
        ("undefined_name", "class S(Undefined): pass", "NameError: name 'Undefined' is not defined"),
        ("no_strategy", "class S:\n    class Params: pass", "TypeError: S must be a ReplayStrategy"),
        ("no_class", "S = 3", "TypeError: issubclass"),
        ("plain_params", f"{BASE}class S(Base):\n    class Params: pass", "and its Params a dataclass"),
        ("no_params", f"{BASE}class S(Base): pass", "AttributeError: "),
        (
            "no_state",
            f"{BASE}from dataclasses import dataclass\nclass S(Base):\n"
            "    insert = draw = None\n    @dataclass\n    class Params: pass",
            "TypeError: S must define load_state_dict, state_dict",
        ),
        (".relative", "", "TypeError: the 'package' argument is required"),
        (
            "failing_params",
            f"{BASE}from dataclasses import dataclass\nclass S(Base):\n"
            "    insert = draw = state_dict = load_state_dict = None\n"
            "    @dataclass\n    class Params:\n        size: int",
            "the settings of failing_params:S are refused: TypeError: ",
        ),
    ],
)
def test_a_strategy_of_your_own_that_fails_is_one_sentence(name, code, reason, tmp_path, monkeypatch):
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = problems(json.dumps([{"type": f"{name}:S", "sample_ratio": 1.0}]))
    assert problem.startswith("memory.replay_parameters: item 1: ") and reason in problem


@pytest.mark.parametrize("text", ["[]", f"[{QUEUE}]", "not JSON"])
def test_a_memory_with_an_invalid_list_is_not_made(text):
    with pytest.raises(ValueError):
        MixedMemory.components(MixedParams(text))


@pytest.mark.parametrize("ratios", [[1 / 3] * 3, [0.1] * 10, [0.333333, 0.333333, 0.333334], [0.7, 0.2, 0.1], [1]])
def test_ratios_sum_to_one_within_floating_point_error(ratios):
    assert problems(json.dumps([{"type": "standard", "sample_ratio": ratio} for ratio in ratios])) == []
