"""Gymnasium environments take arguments and wrappers, and their images are processed like Atari's."""

import dataclasses
import json
import shlex

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from core.envs.gym import GymEnv, GymParams
from core.specs import ArraySpec, Discrete, EnvSpec
from tests.reliability.test_inline import train
from utils.config.command_line import read
from utils.config.rows import from_row
from utils.errors import ConfigurationError
from utils.factory import ModelsDict
from utils.options import CONFIGS

LENGTHS = (3, 5)  # steps of an episode, alternating between environments


class Painted(gym.Env):
    """Show images that identify episode and step; consecutive environments alternate between two episode lengths."""

    action_space = spaces.Discrete(3)
    made = 0

    def __init__(self, shape=(20, 30, 3), render_mode=None, tint=0):
        self.observation_space = spaces.Box(0, 255, tuple(shape), np.uint8)
        self.tint, self.length, self.episode = tint, LENGTHS[Painted.made % len(LENGTHS)], 0
        Painted.made += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self.picture(), {}

    def step(self, action):
        self.t += 1
        return self.picture(), 1.0, self.t == self.length, False, {}

    def picture(self):
        return np.random.default_rng([self.episode, self.t]).integers(0, 255, self.observation_space.shape, np.uint8)


class Doubled(gym.RewardWrapper):
    def reward(self, reward):
        return 2 * reward


class Added(gym.RewardWrapper):
    def __init__(self, env, amount=1):
        super().__init__(env)
        self.amount = amount

    def reward(self, reward):
        return reward + self.amount


gym.register("Painted-v0", Painted)
HERE = f"{__name__}"
GAME = f"{HERE}:Painted-v0"


@pytest.fixture(autouse=True)
def registered():
    Painted.made = 0
    gym.registry.pop("Painted-v0", None)
    gym.register("Painted-v0", Painted)
    yield
    gym.registry.pop("Painted-v0", None)


def made(num_envs=2, **params):
    return GymEnv(GymParams(**params), "Painted-v0", num_envs)


def small(picture, height=12, width=16):
    """Return the expected frame: grayscale, then the mean of each area."""
    return cv2.resize(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), (width, height), interpolation=cv2.INTER_AREA)


def drawn(episode, step, shape=(20, 30, 3)):
    return np.random.default_rng([episode, step]).integers(0, 255, shape, np.uint8)


def test_frames_are_gray_resized_stacked_and_zero_padded():
    env = made(resolution=(12, 16), grayscale=True, frame_stack=4)
    assert (
        env.spec.observation_shape == (4, 12, 16)
        and env.spec.frame == ArraySpec((12, 16), "uint8")
        and env.spec.is_image
    )
    steps = [env.reset(0), *(env.step(np.zeros(2, np.int64)) for _ in range(14))]
    for env_ind, length in enumerate(LENGTHS):
        for number, step in enumerate(steps):
            episode, t = number // (length + 1) + 1, number % (length + 1)
            frames = [small(drawn(episode, k)) if k >= 0 else np.zeros((12, 16), np.uint8) for k in range(t - 3, t + 1)]
            np.testing.assert_array_equal(step.observation[env_ind], np.stack(frames))
            assert step.first[env_ind] == (t == 0)


def test_environments_may_draw_on_one_screen(monkeypatch):
    def observations():
        env = made()
        return [env.reset(0).observation, *(env.step(np.zeros(2, np.int64)).observation for _ in range(8))]

    expected, picture, screen = observations(), Painted.picture, np.zeros((20, 30, 3), np.uint8)

    def draw(env):
        screen[:] = picture(env)
        return screen

    monkeypatch.setattr(Painted, "picture", draw)
    np.testing.assert_array_equal(observations(), expected)


def test_a_skipped_frame_is_not_shown_but_its_reward_counts():
    env = made(num_envs=1, resolution=(12, 16), grayscale=True, action_repeat=2)
    env.reset(0)
    step = env.step(np.zeros(1, np.int64))
    np.testing.assert_array_equal(step.observation[0], small(drawn(1, 2)))
    assert step.raw_reward.tolist() == [2.0] and env.spec.frames_per_step == 2


@pytest.mark.parametrize(
    ("shape", "params", "frame"),
    [
        ((20, 30, 3), {}, (20, 30, 3)),
        ((20, 30, 3), {"resolution": 10}, (10, 10, 3)),
        ((20, 30, 3), {"grayscale": True}, (20, 30)),
        ((20, 30), {"resolution": (9, 11), "grayscale": True}, (9, 11)),
        ((20, 30, 1), {"grayscale": True}, (20, 30)),
        ((20, 30, 1), {"resolution": 8}, (8, 8, 1)),
        ((20, 30, 6), {"resolution": (8, 9)}, (8, 9, 6)),
    ],
)
def test_every_image_shape_is_resized(shape, params, frame):
    env = made(kwargs=json.dumps({"shape": shape}), **params)
    assert env.spec.frame == ArraySpec(frame, "uint8") and env.reset(0).observation.shape == (2, *frame)


def test_vectors_can_be_stacked():
    env = GymEnv(GymParams(frame_stack=3), "CartPole-v1", 2)
    first, after = env.reset(0).observation, env.step(np.zeros(2, np.int64)).observation
    assert env.spec.observation_shape == (3, 4) and not first[:, :2].any()
    np.testing.assert_array_equal(after[:, 1], first[:, 2])


def test_kwargs_reach_the_environment_and_wrappers_keep_order():
    wrappers = [f"{HERE}:Doubled", [f"{HERE}:Added", {"amount": 5}]]
    env = made(num_envs=1, kwargs='{"tint": 7}', wrappers=json.dumps(wrappers))
    env.reset(0)
    assert env._envs[0].env.unwrapped.tint == 7
    assert env.step(np.zeros(1, np.int64)).raw_reward.tolist() == [7.0]  # 2 * 1 + 5
    swapped = made(num_envs=1, wrappers=json.dumps(wrappers[::-1]))
    swapped.reset(0)
    assert swapped.step(np.zeros(1, np.int64)).raw_reward.tolist() == [12.0]  # 2 * (1 + 5)


@pytest.mark.parametrize(("max_steps", "length"), [(None, 50), (30, 30)])
def test_wrappers_stand_around_the_limit_of_an_id(max_steps, length):
    """Pendulum's limit is 200 steps, of which the wrapper takes four at a time."""
    wrappers = [["gymnasium.wrappers:MaxAndSkipObservation", {"skip": 4}], "gymnasium.wrappers:TimeAwareObservation"]
    wrappers = wrappers if max_steps is None else wrappers[:1]
    env = GymEnv(GymParams(wrappers=json.dumps(wrappers), max_steps=max_steps), "Pendulum-v1", 1)
    env.reset(0)
    steps = [env.step(np.zeros((1, 1), np.float32)) for _ in range(length)]
    assert [step.last.item() for step in steps] == [False] * (length - 1) + [True] and steps[-1].discount == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kwargs": '{"colour": 1}'}, r'env.kwargs=\{"colour": 1\}: .*unexpected keyword argument \'colour\''),
        ({"kwargs": '{"render_mode": "human"}'}, "env.kwargs cannot have render_mode: --render, --record"),
        ({"kwargs": "[1]"}, r"env.kwargs=\[1\] is no JSON object such as"),
        ({"kwargs": "{"}, r"env.kwargs=\{ is no JSON object"),
        ({"kwargs": "[" * 100_000}, "is no JSON object"),
        ({"kwargs": '{"max_episode_steps": 3}'}, "set env.max_steps"),
        ({"wrappers": "Doubled"}, "env.wrappers=Doubled is no JSON list such as"),
        ({"wrappers": "[3]"}, "env.wrappers: 3 is neither"),
        (
            {"wrappers": '["no_such_package:A"]'},
            "env.wrappers: no_such_package:A cannot be imported: ModuleNotFoundError",
        ),
        ({"wrappers": '["json:Absent"]'}, "env.wrappers: json:Absent cannot be imported: AttributeError"),
        ({"wrappers": '["json:loads"]'}, "env.wrappers: json:loads is no gymnasium.Wrapper"),
        ({"wrappers": f'["{HERE}:Painted"]'}, "Painted is no gymnasium.Wrapper"),
        (
            {"wrappers": '["gymnasium.wrappers:RescaleAction"]'},
            "RescaleAction cannot be put around the environment: TypeError: .*min_action",
        ),
        ({"wrappers": '["gymnasium.wrappers:FrameStackObservation"]'}, "set env.frame_stack"),
        (
            {"grayscale": True, "kwargs": '{"shape": [20, 30, 4]}'},
            "env.grayscale is for pictures of three colours, and its have 4 planes",
        ),
        (
            {"resolution": 42, "kwargs": '{"shape": [20]}'},
            r"env.resolution and env.grayscale are for pictures, and its observations are float32 \[20\]",
        ),
    ],
)
def test_unsuitable_kwargs_and_wrappers_are_refused_by_name(params, message):
    with pytest.raises(ValueError, match=message):
        made(**params)


WORDS = ("--config", "dqn-pong-small", "--env_type", "gym", "--game", GAME)


def test_a_config_and_the_command_line_give_the_same_options(tmp_path):
    row = {
        **next(row for row in CONFIGS if row["name"] == "dqn-pong-small"),
        "env_type": "gym",
        "game": GAME,
        "env.kwargs": {"tint": 3},
        "env.wrappers": [f"{HERE}:Doubled", [f"{HERE}:Added", {"amount": 2}]],
        "env.resolution": [48, 40],
        "env.grayscale": True,
    }
    options, problems = from_row(row)
    assert (
        not problems
        and options.env
        == read(
            [
                *WORDS,
                "--root",
                str(tmp_path),
                "--env.kwargs",
                '{"tint": 3}',
                *shlex.split("--env.resolution 48 40 --env.grayscale true --env.wrappers"),
                f'["{HERE}:Doubled", ["{HERE}:Added", {{"amount": 2}}]]',
            ]
        ).env
    )
    wrong = from_row({**row, "env.resolution": [48, 40, 3], "env.kwargs": {"tint": object()}})[1]
    assert len(
        wrong
    ) == 2 and "env.resolution=[48, 40, 3] must be a valid integer or must have at most 2 items" in "\n".join(wrong)


def test_a_resumed_run_keeps_its_environment_options(tmp_path, alone):
    words = (
        "--env.kwargs",
        '{"tint": 3}',
        "--env.wrappers",
        f'["{HERE}:Doubled"]',
        *shlex.split("--env.resolution 48 40 --env.grayscale true"),
    )
    short = shlex.split(
        "--updates 2 --rate_limiter.min_replay_size 20 --num_envs_per_actor 2 --agent.batch_size 4 "
        "--evaluator.episodes 1 --memory.capacity 500 --env.frame_stack 2"
    )
    first = train(
        tmp_path, *WORDS, *words, *short, "--timestamp", "one", "--engine", "inline", "--machine", "test"
    ).options
    assert first.env == dataclasses.replace(
        GymParams(),
        kwargs='{"tint": 3}',
        wrappers=f'["{HERE}:Doubled"]',
        resolution=(48, 40),
        grayscale=True,
        frame_stack=2,
    )
    root = ("--root", str(tmp_path))
    assert read([*root, "--resume", "test_one"]).env == first.env
    assert (
        read([*root, "--config", "dqn-pong-small", "--mode", "2", "--machine", "test", "--timestamp", "one"]).env
        == first.env
    )
    for name, value in (("kwargs", '{"tint": 4}'), ("wrappers", "[]"), ("resolution", "48")):
        with pytest.raises(
            ConfigurationError, match=f"env.{name}=.* cannot continue run test_one, which has env.{name}="
        ):
            read([*root, "--resume", "test_one", f"--env.{name}", value])


IMAGE_MODELS = [
    name
    for name in ModelsDict
    if ModelsDict[name].observations == "image"
    and ModelsDict[name].output_kind != "recurrent-q"
    and not name.startswith(("ddpg", "d4pg", "td3", "sac"))
]


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_networks_accept_images_that_are_not_square(name):
    spec = EnvSpec("painted", ArraySpec((96, 64), "uint8"), 2, Discrete(3), is_image=True, max_value=255.0)
    model = ModelsDict[name](ModelsDict[name].Params(), spec)
    output, _ = model(torch.zeros(5, *spec.observation_shape, dtype=torch.uint8), model.initial_state(5))
    assert len(output[0] if isinstance(output, tuple) else output) == 5
