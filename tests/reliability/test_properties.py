"""Arbitrary input is accepted or refused with exit code 2 or 3, and never ends in a traceback."""

import contextlib
import io
import json

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.checkpoint import model_file, run_checkpoint
from core.checkpoint.run_checkpoint import CheckpointError
from utils import run_registry
from utils.config import rows
from utils.config.command_line import read_options
from utils.config.rows import declared, flatten
from utils.options import CONFIGS, Options

QUICK = settings(
    derandomize=True,
    deadline=None,
    max_examples=100,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
BASE, _ = rows.from_row(rows.find_row("dqn-cartpole"))
NAMES = sorted(set(declared(BASE)) - {"root"})  # root decides where files are made
REPLAY = ("--config", "replay-minatar-breakout", "--env_type", "catch", "--game", "catch")

texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
numbers = st.one_of(st.integers(), st.floats(), st.integers(-3, 3))
values = st.one_of(
    texts, numbers.map(str), st.sampled_from(["", "-", "none", "nan", "inf", "1e999", "-1", "0", "[]", "true"])
)
SOME_RULE_SETTINGS = (
    "lambda_batch_multiplier",
    "lambda_batches",
    "alfa_annealing_factor",
    "dist_function",
    "sample_strategy",
    "on_full",
    "elite_batch_size",
)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)


def outcome(words, root):
    """Return None if the words are accepted, else the exit code; assert that the output is an error message."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            assert isinstance(read_options([*words, "--root", str(root)]), Options)
    except SystemExit as exit:
        lines = printed.getvalue().splitlines()
        assert exit.code == 0 or (exit.code in (2, 3) and lines and lines[0].startswith("error: ")), (exit.code, lines)
        assert "Traceback" not in printed.getvalue()
        return exit.code
    return None


@pytest.mark.slow
@QUICK
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(NAMES), values).map(lambda pair: [f"--{pair[0]}", pair[1]]),
            st.tuples(st.sampled_from(NAMES), values).map(lambda pair: [f"--{pair[0]}={pair[1]}"]),
            st.one_of(texts, texts.map("--{}".format)).filter(lambda word: "root" not in word).map(lambda word: [word]),
        ),
        max_size=5,
    )
)
@example([["--agent"]])
@example([["--config"]])
@example([["--agent.", "1"]])
@example([["--game", ".:x"]])
@example([["--num_envs_per_actor", "1e18"]])
@example([["--model.hidden", "1e15"]])
@example([["--resume"], ["--mode", "2"]])
@example([["--agent_type", "os:path"]])
@example([["--env_type", "core.env:Env"]])
def test_arbitrary_words_are_accepted_or_refused(root, words):
    assert outcome(["--config", "dqn-cartpole", *(word for group in words for word in group)], root) in (None, 0, 2, 3)
    assert not list(root.iterdir())


@QUICK
@given(
    st.one_of(
        plain.map(json.dumps),
        texts,
        st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.sampled_from(["queue", "standard", "custom", "attentive", "elite", "reservoir"]),
                    "capacity": numbers,
                    "sample_ratio": numbers,
                },
                optional=dict.fromkeys(SOME_RULE_SETTINGS, plain),
            ),
            max_size=3,
        ).map(json.dumps),
    )
)
@example('[{"type": "standard", "capacity": 1e999, "sample_ratio": 1}]')
@example('[{"type": "standard", "capacity": 10, "sample_ratio": NaN}]')
@example('[{"type": "standard", "capacity": 1, "capacity": true, "sample_ratio": 1}]')
@example("[" * 100_000)
def test_arbitrary_replay_lists_are_accepted_or_refused(root, text):
    assert outcome([*REPLAY, f"--memory.replay_parameters={text}"], root) in (None, 2)
    assert not list(root.iterdir())


@QUICK
@given(st.dictionaries(st.one_of(st.sampled_from([*NAMES, "agent_type", "game"]), texts), plain, max_size=5))
@example({"game": 3})
@example({"agent.learning_rate": {"a": 1}})
@example({"model_type": None})
@example({"memory_type": ["shared"]})
@example({3: 4})
def test_arbitrary_configs_are_accepted_or_refused(root, settings):
    row = {**rows.find_row("dqn-cartpole"), **settings, "name": "fuzzed"}
    CONFIGS.append(row)
    try:
        assert outcome(["--config", "fuzzed"], root) in (None, 2)
    finally:
        CONFIGS.pop()
    assert not list(root.iterdir())


@pytest.mark.parametrize("row", [{}, {"name": None}, {"name": ["a"]}, {"name": "dqn-cartpole"}, "dqn-cartpole", None])
def test_configs_without_a_name_of_their_own_are_refused(root, row):
    CONFIGS.append(row)
    try:
        assert outcome(["--config", "dqn-cartpole"], root) == 2
    finally:
        CONFIGS.pop()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    path = run_checkpoint.save(folder / "c", {"agent": {"weight": torch.zeros(5)}}, 1, keep=1)
    model_file.save_weights(folder / "m.pth", {"weight": torch.zeros(5)}, {})
    return (
        path / "manifest.json",
        (path / "manifest.json").read_bytes(),
        folder / "m.pth",
        (folder / "m.pth").read_bytes(),
    )


def signed(content):
    """Return a manifest whose own checksum is right."""
    return {**content, "sha256": run_checkpoint._manifest_sha256(content)} if isinstance(content, dict) else content


entries = st.one_of(plain, st.fixed_dictionaries({"size": st.one_of(st.just(1), plain), "sha256": plain}))
manifests = st.one_of(
    st.binary(max_size=60),
    plain.map(lambda content: json.dumps(signed(content)).encode()),
    st.fixed_dictionaries(
        {
            "step": plain,
            "files": st.dictionaries(
                st.one_of(st.sampled_from(["agent.pt", "", ".", "..", "/", "../c/agent.pt", "manifest.json"]), texts),
                entries,
                max_size=3,
            ),
        }
    ).map(lambda content: json.dumps(signed(content)).encode()),
)


@QUICK
@given(manifests)
@example(b"[" * 100_000)
@example(json.dumps(signed({"files": {"a\0": {"size": 1, "sha256": ""}}})).encode())
@example(json.dumps(signed({"files": {"agent.pt": {"size": 1e999, "sha256": ""}}})).encode())
def test_arbitrary_manifests_raise_checkpoint_error(saved, content):
    manifest, original, *_ = saved
    manifest.write_bytes(content)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            state, _ = run_checkpoint.load(manifest.parent.parent)
        assert state == {}  # the manifest lists no files
    except CheckpointError as error:
        assert "manifest" in str(error) or "step_" in str(error)
    finally:
        manifest.write_bytes(original)


@QUICK
@given(st.integers(0, 2_000), st.binary(min_size=1, max_size=8))
def test_model_files_with_arbitrary_bytes_are_refused(saved, position, content):
    *_, path, original = saved
    position %= len(original)
    path.write_bytes(original[:position] + content + original[position + len(content) :])
    with contextlib.suppress(CheckpointError):
        weights, _ = model_file.load_weights(path)
        assert {name: tensor.shape for name, tensor in weights.items()} == {"weight": (5,)}


@pytest.mark.slow
@settings(QUICK, max_examples=40)
@given(
    st.one_of(
        st.binary(max_size=60),
        plain.map(lambda content: json.dumps(content).encode()),
        st.dictionaries(st.sampled_from(NAMES), plain, max_size=4).map(
            lambda options: json.dumps({"config": "dqn-cartpole", "options": options, "file": {}}).encode()
        ),
    )
)
@example(json.dumps({"config": 3, "options": {"agent_type": 5}, "file": []}).encode())
@example(json.dumps({"config": "dqn-cartpole", "options": {}, "file": {}}).encode())
def test_arbitrary_run_json_files_are_accepted_or_refused(tmp_path, content):
    folder = tmp_path / "logs" / "a_b"
    folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "models" / "a_b_checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / run_registry.RUN_FILE).write_bytes(content)
    assert outcome(["--resume", "a_b"], tmp_path) in (None, 2, 3)
    assert outcome(["--config", "dqn-cartpole", "--resume", "newest"], tmp_path) in (None, 2, 3)


def test_the_fuzzed_names_are_options():
    assert set(NAMES) < set(flatten(BASE)) and {"agent.learning_rate", "memory.capacity", "config", "device"} <= set(
        NAMES
    )
