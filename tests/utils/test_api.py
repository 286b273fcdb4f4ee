"""Models are trained, loaded and played from Python."""

import itertools
import json
import operator
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

from core.acting.validated_env import ValidatedEnv
from core.checkpoint import model_file
from core.checkpoint.run_checkpoint import CheckpointError
from core.evaluation.episodes import _next_seed
from tests.reliability.program import PROJECT
from tests.reliability.test_inline import RUNS, SMALL
from tests.reliability.test_inline import train as train_here
from utils import api, run_registry
from utils.api import TrainedRun, TrainingError, load, train
from utils.config import command_line, validation
from utils.errors import ConfigurationError

KINDS = {
    "dqn": RUNS["shared"],
    "rainbow": RUNS["rainbow"],
    "r2d2": RUNS["r2d2"],
    "impala": RUNS["impala with LSTM"],
    "sac": RUNS["sac"],
    "masks": RUNS["masks"],
    "pictures": ("--config", "dqn-minatar-breakout", *SMALL, "--env_type", "catch", "--game", "catch"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a run of each kind once."""
    made = {}

    def run(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp("runs")
            context = train_here(
                folder, *KINDS[kind], "--timestamp", "one", "--updates", "10", "--evaluator.max_steps", "60"
            )
            options = context.options
            files = options.log_folder, options.model_path, options.checkpoint_folder
            made[kind] = TrainedRun(options.signature, *files)
        return made[kind]

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_users_own_loop_scores_what_evaluate_does(kind, trained):
    """The recurrent state and the last reward are passed from step to step; random numbers have the same seed."""
    before = psutil.Process().children()
    policy = trained(kind).load()
    options = policy.options
    results = policy.evaluate(episodes=1, seed=5)
    policy = api.Policy(options, policy.agent, policy.metadata, seed=5)
    env = ValidatedEnv(options.env_class(options.env, options.game, 1, training=False), 1)
    timestep, state, total, length = env.reset(_next_seed(np.random.SeedSequence(5))), None, 0.0, 0
    while length < options.evaluator.max_steps:
        legal = None if timestep.action_mask is None else timestep.action_mask[0]
        action, state = policy.act(timestep.observation[0], state, timestep.reward[0], action_mask=legal)
        assert all(isinstance(part, np.ndarray) for part in state)
        timestep = env.step(np.asarray(action)[None])
        total, length = total + float(timestep.raw_reward[0]), length + 1
        if timestep.last[0]:
            break
    env.close()
    assert results.lengths.tolist() == [length] and results.returns[0] == pytest.approx(total, rel=1e-5)
    assert psutil.Process().children() == before


@pytest.mark.parametrize("kind", ["dqn", "r2d2", "sac", "pictures"])
def test_a_batch_of_observations_is_answered_like_single_ones(kind, trained):
    policy = trained(kind).load()
    generator, dtype = np.random.default_rng(1), policy.spec.frame.dtype
    observations = [generator.integers(0, 2, (3, *policy.spec.observation_shape)).astype(dtype) for _ in range(2)]
    first, state = policy.act(observations[0])
    second, _ = policy.act(observations[1], state, [0.0, 1.0, 2.0])
    assert len(second) == 3 and second.dtype == policy.spec.action.array.dtype
    for game in range(3):
        action, state = policy.act(observations[0][game])
        np.testing.assert_allclose(action, first[game], rtol=1e-4)
        np.testing.assert_allclose(policy.act(observations[1][game], state, float(game))[0], second[game], rtol=1e-4)
    restarted, after = policy.act(observations[1], policy.act(observations[0])[1], first=[True, False, False])
    fresh, initial = policy.act(observations[1])
    np.testing.assert_allclose(restarted[0], fresh[0], rtol=1e-4)
    for part, start in zip(after, initial):
        np.testing.assert_allclose(part[0], start[0], atol=1e-5)


@pytest.mark.parametrize(
    "observation, message",
    [
        (np.zeros(3), r"observation is \[3\], expected \[4\] or several, \[N, 4\]"),
        (np.zeros((0, 4)), "expected"),
        (["a", "b", "c", "d"], "expected float32"),
        ([0, 0, np.nan, 0], "observation holds nan, expected finite values"),
        ([0, 0, 1e39, 0], "observation holds 1e\\+39, expected finite values"),  # which float32 cannot hold
    ],
)
def test_an_observation_of_a_wrong_shape_or_type_is_refused(observation, message, trained):
    with pytest.raises(ValueError, match=message):
        trained("dqn").load().act(observation)
    with pytest.raises(ValueError, match="observation is float64, expected uint8"):
        trained("pictures").load().act(np.zeros(trained("pictures").load().spec.observation_shape))
    with pytest.raises(ValueError, match=r"state has shapes \[\], expected \[\[1, 8\], \[1, 8\], \[1\]\]: give what"):
        trained("r2d2").load().act(np.zeros(4), ())


class Keys(gymnasium.Env):
    """A picture and numbers in a Dict, and actions that start from 5."""

    observation_space = spaces.Dict(
        {"picture": spaces.Box(0, 255, (20, 20, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,))}
    )
    action_space = spaces.Discrete(3, start=5)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 1.0, False, False, {}


def test_dicts_and_shifted_actions_of_gymnasium_are_converted(root, trained):
    if "Keys-v0" not in gymnasium.registry:
        gymnasium.register("Keys-v0", Keys)
    words = ["--config", "dqn-cartpole", "--game", "Keys-v0", "--model_type", "dqn-small", "--root", str(root)]
    options = command_line.read(words)
    policy = api.Policy(options, options.make_agent(validation.environment_spec(options)), {})
    env = gymnasium.make("Keys-v0")
    observation, _ = env.reset(seed=1)
    with pytest.raises(ValueError, match=r"observation is a dict, expected an array: act\(from_gym\(observation\)\)"):
        policy.act(observation)
    frame = policy.from_gym(observation)
    assert frame.shape == policy.spec.observation_shape and frame.dtype == np.uint8
    np.testing.assert_array_equal(frame[-8:].view(np.float32), observation["speed"])
    action, _ = policy.act(frame)
    assert policy.to_gym(action) == action + 5
    env.step(policy.to_gym(action))
    with pytest.raises(ValueError, match="speed is"):
        policy.from_gym({**observation, "speed": np.zeros(3, np.float32)})
    with pytest.raises(TypeError, match="env_type=catch is no environment of gymnasium"):
        trained("pictures").load().from_gym(observation)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"reward": [0.0, 1.0]}, r"reward is \[0.0, 1.0\], expected one finite value or 3, one for each observation"),
        ({"reward": np.nan}, "reward is nan, expected one finite value"),
        ({"first": [True]}, r"first is \[True\], expected one finite value or 3"),
        (
            {"state": (np.zeros((2, 8)), np.zeros((3, 8)), np.zeros(3))},
            r"state has shapes \[\[2, 8\], \[3, 8\], \[3\]\]",
        ),
        (
            {"action_mask": np.ones((3, 2), bool)},
            "action_mask is given, expected none: CartPole-v1 allows every action",
        ),
    ],
)
def test_an_argument_of_another_length_is_refused(arguments, message, trained):
    with pytest.raises(ValueError, match=message):
        trained("r2d2").load().act(np.zeros((3, 4)), **arguments)


def test_no_reward_led_to_an_episodes_first_observation(trained):
    policy, observations = trained("r2d2").load(), np.ones((2, 4), np.float32)
    _, played = policy.act(observations, reward=[0.5, 0.5])
    _, with_reward = policy.act(observations, played, reward=[3.0, 3.0], first=[True, False])
    _, without = policy.act(observations, played, reward=[0.0, 0.0], first=[True, False])
    for one, other in zip(with_reward, without):
        assert np.array_equal(one[0], other[0])
    assert any((one[1] != other[1]).any() for one, other in zip(with_reward, without))


def test_an_evaluation_needs_an_episode(trained):
    with pytest.raises(ValueError, match="episodes is 0, expected at least 1"):
        trained("dqn").load().evaluate(0)


@pytest.mark.parametrize("device", ["cuda:9", "gpu"])
def test_a_device_that_is_not_here_is_refused(device, trained):
    with pytest.raises(ConfigurationError, match=f"device='{device}' is not on this machine, which has cpu"):
        trained("dqn").load(device)


def test_a_policy_of_masks_takes_legal_actions_only(trained):
    policy = trained("masks").load()
    observations, masks = np.zeros((9, 18), np.float32), np.eye(9, dtype=np.int8)
    assert policy.act(observations, action_mask=masks)[0].tolist() == list(range(9))
    assert policy.act(observations[0], action_mask=masks[7])[0] == 7
    for mask in (None, True, masks[0], np.ones((9, 8), bool), masks * 0.5):
        with pytest.raises(ValueError, match=r"action_mask is .*, expected the legal ones of 9 actions"):
            policy.act(observations, action_mask=mask)


def test_a_model_needs_its_options_alone(trained, tmp_path):
    run = trained("r2d2")
    elsewhere = tmp_path / "models" / f"{run.signature}.pth"
    elsewhere.parent.mkdir()
    weights, metadata = model_file.load_weights(run.model_path)
    model_file.save_weights(elsewhere, weights, metadata)
    assert load(elsewhere).options.model.lstm == 8 and "options" not in load(elsewhere).metadata
    model_file.save_weights(elsewhere, weights, {})  # of an earlier version
    with pytest.raises(ConfigurationError, match="does not say with which options it was trained"):
        load(elsewhere)
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "none.pth")


def test_a_model_in_the_root_folder_is_loaded(trained, monkeypatch):
    content = model_file.load_weights(trained("dqn").model_path)
    monkeypatch.setattr(model_file, "load_weights", lambda path: content)
    assert load("/model.pth").options.config == "dqn-cartpole"


def test_a_model_with_options_that_are_refused_now_is_not_loaded(trained, tmp_path):
    weights, metadata = model_file.load_weights(trained("dqn").model_path)
    metadata["options"]["agent"]["evaluation_epsilon"] = 7.0
    model_file.save_weights(tmp_path / "changed.pth", weights, metadata)
    with pytest.raises(ConfigurationError, match=r"changed\.pth: agent\.evaluation_epsilon=7\.0 must be"):
        load(tmp_path / "changed.pth")


def test_a_checkpoint_is_loaded_with_the_options_of_its_run(trained, tmp_path):
    (kept,) = trained("r2d2").checkpoint_folder.glob("step_*")
    checkpoint = tmp_path / "copied_checkpoints" / kept.name
    shutil.copytree(kept, checkpoint)
    for path in (checkpoint.parent, checkpoint):
        policy = load(path)
        assert policy.options.model.lstm == 8 and policy.metadata["checkpoint"] == checkpoint.name


def test_train_refuses_what_the_command_line_refuses(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **keywords: pytest.fail("a process was started"))
    with pytest.raises(ConfigurationError) as refused:
        train("dqn-cartpole", {"agent.learning_rate": -1}, steps=0, root=tmp_path)
    assert (
        refused.value.problems == ("steps=0 must be at least 1", "agent.learning_rate=-1.0 must be greater than 0")
        and refused.value.code == 2
    )
    with pytest.raises(ConfigurationError, match="mode is not to be given to train"):
        train("dqn-cartpole", mode=2)
    with pytest.raises(ConfigurationError, match="config=3 must be a string, the name of a row of CONFIGS"):
        train(3)
    with pytest.raises(ConfigurationError, match=r"env.kwargs=\{'a': <object .* must be valid as JSON"):
        train("dqn-cartpole", {"env.kwargs": {"a": object()}})
    assert capfd.readouterr() == ("", "") and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "config, name, value, expected",
    [
        ("dqn-cartpole", "seed", 2, 2),
        ("dqn-cartpole", "resume", None, None),
        ("dqn-cartpole", "env.max_steps", None, None),
        ("dqn-cartpole", "agent.double_q", False, False),
        ("dqn-cartpole", "env.kwargs", {"a": [None, True]}, '{"a": [null, true]}'),
        ("dqn-cartpole", "env.wrappers", ["a:B"], '["a:B"]'),
        ("dqn-cartpole", "env.observation_keys", ["a"], ("a",)),
        ("dqn-cartpole", "env.observation_keys", ["a", 1], ("a", 1)),
        ("ddpg-pendulum", "model.hidden", [40], (40,)),
        ("ddpg-pendulum", "model.hidden", (40, 30), (40, 30)),
        ("replay-minatar-breakout", "memory.replay_parameters", [{"type": "queue"}], '[{"type": "queue"}]'),
    ],
)
def test_values_reach_the_options_as_in_a_row(config, name, value, expected, monkeypatch):
    monkeypatch.setattr(command_line.validation, "problems", lambda *given: [])
    options = command_line.read(api._words(config, {name: value}))
    assert operator.attrgetter(name)(options) == expected


@pytest.fixture
def started(monkeypatch):
    """Collect the command lines of runs that `train` starts; none is trained."""
    made = []
    monkeypatch.setattr(api, "_run_main", lambda words, progress: (made.append(words), (0, [], False))[1])
    return made


def test_trainings_of_one_second_return_runs_of_their_own(root, monkeypatch, started):
    monkeypatch.setattr("time.strftime", lambda form: "20300101-000000")
    runs = [train("dqn-cartpole", root=root, seed=seed) for seed in (1, 2)]
    options = [command_line.read(words) for words in started]  # both processes read before one of them claims
    assert [run_registry.claim(each).signature for each in options] == [run.signature for run in runs]
    assert train("dqn-cartpole", root=root, timestamp="one").signature == "local_one"


def test_trainings_of_two_threads_leave_standard_output(root, monkeypatch):
    """The second reads its options from before to after the end of the first's reading, unless it waits its turn."""
    before, read, numbers = (sys.stdout, sys.stderr), command_line.read, itertools.count()
    second_begun, first_ended = threading.Event(), threading.Event()

    def interleaved(words):
        if next(numbers) == 0:
            second_begun.wait(0.3)
        else:
            second_begun.set()
            first_ended.wait(0.3)
        return read(words)

    monkeypatch.setattr(command_line, "read", interleaved)
    monkeypatch.setattr(api, "_run_main", lambda words, progress: (first_ended.set(), (0, [], False))[1])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: train("dqn-cartpole", root=root, seed=seed), (1, 2)))
    after = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = before
    assert after == before


@pytest.mark.slow
def test_a_failed_training_raises_its_error_message(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FAULTS", json.dumps([{"kind": "raise", "at": 50}]))
    with pytest.raises(TrainingError, match="the simulator crashed") as failed:
        train(
            "dqn-cartpole",
            root=tmp_path,
            engine="inline",
            env_type="gym",
            game="tests.reliability.faults:Faulty-v0",
            progress=False,
        )
    assert failed.value.code != 0 and capfd.readouterr().out == ""


@pytest.mark.slow
def test_the_notebook_of_the_documentation_runs_as_a_script(tmp_path):
    """The script has no guard of `__main__`, but learners' and actors' processes start nevertheless."""
    pytest.importorskip("onnxruntime")
    text = (PROJECT / "docs" / "notebook.py").read_text()
    assert "__name__" not in text.replace('no `if __name__ == "__main__"`', "")
    program = subprocess.run(
        [sys.executable, str(PROJECT / "docs" / "notebook.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        timeout=110,
    )
    assert program.returncode == 0, program.stdout + program.stderr
    for part in (
        "agent steps: mean return ",
        " of 5 episodes",
        "an episode of one's own loop: ",
        "actions for eight observations: [",
        ".onnx ['observation'] ['action', 'values']",
    ):
        assert part in program.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
