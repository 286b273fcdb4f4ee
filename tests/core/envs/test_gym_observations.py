"""Observations of every gymnasium space become a vector, a picture or both, and arrive in windows bit for bit."""

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from core.acting.validated_env import contract_violations
from core.envs.gym import GymEnv, GymParams
from core.envs.gym_spaces import InvalidPartError, ObservationConverter
from core.models.layers.torsos import scaled_image, split_frames
from core.specs import WindowSpec
from core.trajectory.frame_compression import StorageParams
from core.trajectory.ring_buffer import Trajectories
from core.trajectory.writer import ChunkWriter
from tests.core.tapes import small_layout

NUMBERS, PICTURE = spaces.Box(-9, 9, (2, 2), np.float64), spaces.Box(0, 255, (3, 4, 3), np.uint8)
GOAL = spaces.Dict(
    observation=spaces.Box(-9, 9, (2,), np.float64),
    desired_goal=spaces.Box(-9, 9, (1,), np.float64),
    achieved_goal=spaces.Box(-9, 9, (1,), np.float64),
)
NESTED = spaces.Dict(
    {
        "b": spaces.Tuple((spaces.Discrete(2), spaces.Dict(z=spaces.MultiBinary(2), a=spaces.Discrete(3, start=5)))),
        "a": spaces.Box(0, 255, (2,), np.uint8),
    }
)
KINDS = {
    "discrete": (spaces.Discrete(4), 2, [0, 0, 1, 0]),
    "discrete from 5": (spaces.Discrete(3, start=5), np.int64(7), [0, 0, 1]),
    "discrete array": (spaces.Discrete(3), np.array(1), [0, 1, 0]),
    "bytes": (spaces.Box(0, 255, (2,), np.uint8), np.array([0, 51], np.uint8), [0, np.float32(51) / np.float32(255)]),
    "binary": (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), [1, 0, 1]),
    "binary matrix": (spaces.MultiBinary((2, 2)), np.array([[1, 0], [0, 1]], np.int8), [1, 0, 0, 1]),
    "multi-discrete": (spaces.MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0]),
    "multi-discrete matrix": (
        spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[0, 4], [7, 1]]),
        np.array([[1, 6], [7, 1]]),
        [0, 1, 0, 0, 1, 1, 1, 0],
    ),
    "integers": (spaces.Box(-9, 9, (2, 2), np.int64), np.array([[1, 2], [3, -4]]), [1, 2, 3, -4]),
    "numbers": (NUMBERS, np.array([[0.1, 1 / 3], [-1, 2]]), np.float32([0.1, 1 / 3, -1, 2]).tolist()),
    "scalar": (spaces.Box(-1, 1, ()), np.float32(0.5), [0.5]),
    "tuple": (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))), (1, 0), [0, 1, 1, 0, 0]),
    "goal": (
        GOAL,
        {"observation": np.array([3.0, 0.1]), "desired_goal": np.array([2.0]), "achieved_goal": np.array([1.0])},
        [1, 2, 3, np.float32(0.1)],
    ),
    "nested": (
        NESTED,
        {"b": (1, {"z": np.array([0, 1], np.int8), "a": 6}), "a": np.array([255, 0], np.uint8)},
        [1, 0, 0, 1, 0, 1, 0, 0, 1],
    ),
    "one of": (spaces.OneOf((spaces.Discrete(2), spaces.Box(-1, 1, (1,)))), (0, 1), [0, 0, 1]),
}


class Shown(gym.Env):
    """Show a given observation for ever; episodes have three steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, values):
        self.observation_space, self.values = space, values

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.values[0], {}

    def step(self, action):
        self.t += 1
        return self.values[self.t % len(self.values)], 1.0, self.t == 3, False, {}


@pytest.fixture
def shown():
    """Make two environments that show these observations in turn."""

    def make(space, *values, **params):
        gym.registry.pop("Shown-v0", None)
        gym.register("Shown-v0", lambda: Shown(space, values))
        return GymEnv(GymParams(**params), "Shown-v0", 2)

    yield make
    gym.registry.pop("Shown-v0", None)


def windows_of(env, steps=8, **options):
    """Play and return the observations seen [steps, E, ...] and those of the windows in the ring."""
    layout = small_layout(env.spec, rows=32, chunk_length=4, num_envs=2, **options)
    trajectories = Trajectories(layout)
    writer, before, seen = ChunkWriter(trajectories, 0, WindowSpec.transition(1)), env.reset(0), []
    for _ in range(steps):
        seen.append(before.observation.copy())
        after = env.step(np.zeros(2, np.int64))
        writer.append(before, np.zeros(2, np.int64), after, {})
        before = after
    spec = WindowSpec(steps - 1, tuple(range(steps)), stride=steps)
    window = trajectories.gather(np.arange(2), np.zeros(2, np.int64), spec)
    return np.stack(seen), window.observations


@pytest.mark.parametrize("name", KINDS)
def test_every_space_arrives_in_windows_bit_for_bit(shown, name):
    space, value, stored = KINDS[name]
    assert space.contains(value)
    env = shown(space, value)
    assert env.spec.frame == ((len(stored),), "float32") and not env.spec.is_image and env.spec.max_value == 1
    seen, stored_windows = windows_of(env)
    expected = np.broadcast_to(np.array(stored, np.float32), seen.shape)
    assert seen.tobytes() == expected.tobytes() == stored_windows.numpy().tobytes()


@pytest.mark.parametrize("stack", [0, 2])
def test_a_lone_picture_of_a_dict_arrives_bit_for_bit(shown, stack):
    pictures = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 3), np.uint8)
    space = spaces.Dict(picture=PICTURE, words=spaces.Text(9))
    env = shown(space, *({"picture": picture, "words": "hello"} for picture in pictures), frame_stack=stack)
    assert env.spec.is_image and env.spec.frame == ((3, 4, 3), "uint8") and env.spec.max_value == 255
    seen, stored = windows_of(env)
    newest = seen[:, :, -1] if stack else seen
    for step in range(8):
        np.testing.assert_array_equal(newest[step], np.stack([pictures[step % 4 % 2]] * 2))
    assert stored.numpy().tobytes() == seen.tobytes()


def test_the_vector_does_not_depend_on_the_order_of_keys():
    one, other = spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (2,))
    value = {"one": np.ones(1, np.float32), "other": np.zeros(2, np.float32)}
    vectors = [
        ObservationConverter(spaces.Dict(items, sort_keys=False))(value)
        for items in ({"one": one, "other": other}, {"other": other, "one": one})
    ]
    assert [vector.tolist() for vector in vectors] == [[1, 0, 0]] * 2


def test_keys_select_parts_with_everything_below_them(shown):
    value = KINDS["nested"][1]
    assert shown(NESTED, value, observation_keys=("b.1",)).reset(0).observation[0].tolist() == [0, 1, 0, 0, 1]
    env = shown(NESTED, value, observation_keys=("b.1.z", "a"))
    assert env.reset(0).observation[0].tolist() == [1, 0, 0, 1]
    kinds = {part.name: (part.kind, part.shape) for part in env.spec.parts}
    assert kinds == {
        "a": ("vector", (2,)),
        "b.0": ("left out", ()),
        "b.1.a": ("left out", ()),
        "b.1.z": ("vector", (2,)),
    }
    two = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))
    assert shown(two, (1, 2), observation_keys=[1]).reset(0).observation[0].tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match=r"observation_keys: 'c' is no part.*a, b\.0, b\.1\.a, b\.1\.z"):
        shown(NESTED, value, observation_keys=("c",))


BESIDE = spaces.Dict(camera=PICTURE, speed=NUMBERS, gear=spaces.Discrete(3), words=spaces.Text(9))


def beside(number, generator):
    """Return an observation of BESIDE, and its picture and vector as they should be stored."""
    picture, speed = generator.integers(0, 256, (3, 4, 3), np.uint8), generator.normal(size=(2, 2))
    vector = np.concatenate([np.eye(3)[number % 3], speed.reshape(-1)]).astype(np.float32)
    return {"camera": picture, "speed": speed, "gear": number % 3, "words": "go"}, picture, vector


@pytest.mark.parametrize("stack", [0, 2])
@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_a_picture_beside_numbers_arrives_bit_for_bit(shown, stack, codec):
    values, pictures, vectors = zip(*(beside(number, np.random.default_rng(number)) for number in range(3)))
    env = shown(BESIDE, *values, frame_stack=stack)
    spec = env.spec
    assert spec.is_image and spec.max_value == 255 and spec.frame == ((36 + 4 * 7,), "uint8")
    assert spec.picture_shape == (3, 4, 3) and spec.vector_size == 7
    steps = 24  # the oldest of which are compressed
    seen, stored = windows_of(env, steps, storage=StorageParams(frame_compression=codec))
    assert stored.numpy().tobytes() == seen.tobytes()
    halves = split_frames(stored, spec)
    for step in range(steps):
        picture, vector = halves.picture[step], halves.vector[step]
        if stack:
            assert not step % 4 or picture[:, 0].numpy().tobytes() == halves.picture[step - 1][:, 1].numpy().tobytes()
            picture, vector = picture[:, 1], vector[:, 1]
        number = step % 4 % 3
        assert picture.numpy().tobytes() == pictures[number].tobytes() * 2
        assert vector.numpy().tobytes() == vectors[number].tobytes() * 2


def test_preprocessing_changes_the_picture_alone(shown):
    value, picture, vector = beside(1, np.random.default_rng(0))
    env = shown(BESIDE, value, resolution=8, grayscale=True)
    halves = split_frames(torch.from_numpy(env.reset(0).observation), env.spec)
    expected = cv2.resize(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), (8, 8), interpolation=cv2.INTER_AREA)
    np.testing.assert_array_equal(halves.picture, [expected] * 2)
    np.testing.assert_array_equal(halves.vector, [vector] * 2)


def test_the_largest_byte_scales_the_picture_alone(shown):
    value, _, vector = beside(1, np.random.default_rng(0))
    value["camera"] = picture = np.arange(36).reshape(3, 4, 3).astype(np.uint8) % 11
    env = shown(BESIDE, value, max_byte=10)
    start = env.reset(0)
    halves = split_frames(torch.from_numpy(start.observation), env.spec)
    np.testing.assert_allclose(scaled_image(halves.picture, env.spec), [picture.transpose(2, 0, 1) / 10] * 2, rtol=1e-6)
    np.testing.assert_array_equal(halves.vector, [vector] * 2)
    assert contract_violations(env.spec, start, None) == []  # bytes of the vector may be larger
    (error,) = contract_violations(shown(BESIDE, value, max_byte=9).spec, start, None)
    assert error == "observation has values 0 .. 10, outside 0 .. 9"


def test_a_key_keeps_the_picture_or_numbers_alone(shown):
    value, picture, vector = beside(1, np.random.default_rng(0))
    alone = shown(BESIDE, value, observation_keys=("camera",))
    assert alone.spec.frame == ((3, 4, 3), "uint8") and alone.spec.vector_size == 0
    np.testing.assert_array_equal(alone.reset(0).observation, [picture, picture])
    alone = shown(BESIDE, value, observation_keys=("gear",))
    assert alone.spec.frame == ((3,), "float32") and not alone.spec.is_image
    np.testing.assert_array_equal(alone.reset(0).observation, [vector[:3]] * 2)


@pytest.mark.parametrize("shape", [(3, 84, 84), (1, 7, 7), (3, 64, 96), (4, 210, 160), (2, 84, 84)])
def test_pictures_with_their_planes_first_are_refused(shape):
    with pytest.raises(ValueError, match=r"\[\d, \d+, \d+\] of the observations has its planes first"):
        ObservationConverter(spaces.Box(0, 255, shape, np.uint8))


@pytest.mark.parametrize("shape", [(4, 5, 16), (3, 3, 20), (64, 96, 3), (4, 4, 4)])
def test_low_pictures_are_taken(shape):
    assert ObservationConverter(spaces.Box(0, 255, shape, np.uint8)).frame.shape == shape


def test_pictures_of_one_size_are_joined_and_others_refused(shown):
    grey, small = spaces.Box(0, 255, (3, 4), np.uint8), spaces.Box(0, 255, (2, 4, 3), np.uint8)
    eyes = spaces.Dict(left=PICTURE, right=grey)
    value = eyes.sample()
    observation = shown(eyes, value).reset(0).observation
    np.testing.assert_array_equal(observation[0], np.concatenate([value["left"], value["right"][..., None]], 2))
    with pytest.raises(ValueError, match=r"left \(3x4\) and right \(2x4\) .*different sizes.*env\.observation_keys"):
        ObservationConverter(spaces.Dict(left=PICTURE, right=small))


@pytest.mark.parametrize("part, value", [("camera", np.zeros((3, 4), np.uint8)), ("gear", 3)])
def test_a_faulty_part_beside_a_picture_is_named(shown, part, value):
    good, _, _ = beside(0, np.random.default_rng(0))
    env = shown(BESIDE, good, good | {part: value})
    env.reset(0)
    with pytest.raises(ValueError, match=f"observation {part} of environment 0 at step 1"):
        env.step(np.zeros(2, np.int64))


class Mission(spaces.Space):
    """A space of strings that is not gymnasium's own, as MiniGrid's."""

    def __init__(self):
        super().__init__(dtype=str)


@pytest.mark.parametrize("text", [spaces.Text(5), Mission()])
def test_text_is_left_out_with_a_notice(text):
    space = spaces.Dict(number=spaces.Box(-1, 1, (1,)), words=text)
    convert = ObservationConverter(space)
    assert convert({"number": np.ones(1, np.float32), "words": "go"}).tolist() == [1]
    assert "words of the observation is text, which is left out" in convert.warning
    assert ObservationConverter(space, ["number"]).warning == ""
    with pytest.raises(ValueError, match="empty: there is nothing to learn from"):
        ObservationConverter(text)


def test_parts_without_a_fixed_size_are_refused_unless_left_out():
    loose = spaces.Sequence(spaces.Discrete(2))
    with pytest.raises(ValueError, match=r"observations of Sequence.* have no fixed size.*env\.wrappers"):
        ObservationConverter(loose)
    space = spaces.Dict(tight=spaces.Discrete(2), loose=loose)
    with pytest.raises(ValueError, match=r"loose of the observations.*no fixed size.*env\.observation_keys.*tight"):
        ObservationConverter(space)
    assert ObservationConverter(space, ["tight"])({"tight": 1, "loose": (1, 1)}).tolist() == [0, 1]
    with pytest.raises(ValueError, match="empty"):
        ObservationConverter(spaces.Dict())


@pytest.mark.parametrize("space", [spaces.Discrete(2**40), spaces.MultiDiscrete([2, 2**40])])
def test_a_choice_too_large_for_one_hot_is_refused(space):
    with pytest.raises(
        ValueError, match=r"observation of (Multi)?Discrete.* would be 1,099,511,627,77\d numbers one-hot"
    ):
        ObservationConverter(space)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("discrete", 4, "observation of environment 0 at step 1 is 4"),
        ("discrete", -1, "observation of environment 0 at step 1 is -1"),
        ("discrete", 1.0, r"observation of environment 0 at step 1 is 1\.0"),
        ("binary", np.array([0, 2, 0]), "observation of environment 0 at step 1"),
        ("binary", np.array([0, 1]), "observation of environment 0 at step 1"),
        ("multi-discrete", np.array([0, 3]), r"expected a value of MultiDiscrete"),
        ("multi-discrete", np.array([-1, 0]), r"expected a value of MultiDiscrete"),
        ("multi-discrete", np.array([0.0, 1.0]), r"expected a value of MultiDiscrete"),
        ("tuple", (1,), "observation of environment 0 at step 1 is .*whose 1 is absent"),
        ("tuple", None, "observation of environment 0 at step 1 is None"),
        ("goal", {"observation": np.zeros(2), "desired_goal": np.zeros(1)}, "whose achieved_goal is absent"),
        (
            "goal",
            {"observation": np.array([0, np.nan]), "desired_goal": np.zeros(1), "achieved_goal": np.zeros(1)},
            r"observation of environment 0 at step 1 is .*nan.*finite values \(element 1 of 2\)",
        ),
        (
            "goal",
            {"observation": np.zeros(2), "desired_goal": np.array([1e300]), "achieved_goal": np.zeros(1)},
            "observation desired_goal of environment 0 at step 1 is .*inf.*finite",
        ),
        (
            "goal",
            {"observation": np.zeros(2), "desired_goal": np.array([1e8]), "achieved_goal": np.zeros(1)},
            r"observation desired_goal of environment 0 .*near -9\.0 \.\. 9\.0 \(element 0\)",
        ),
        (
            "goal",
            {"observation": np.zeros(3), "desired_goal": np.zeros(1), "achieved_goal": np.zeros(1)},
            r"float64 \[3\].*expected float64 \[2\]",
        ),
        (
            "nested",
            {"a": np.zeros(2, np.uint8), "b": (0, {"z": np.zeros(2, np.int8), "a": 8})},
            r"observation b\.1\.a of environment 0 at step 1 is 8, expected a value of Discrete\(3, start=5\)",
        ),
        ("nested", {"a": np.zeros(2), "b": (0, {"z": np.zeros(2, np.int8), "a": 5})}, r"observation a of.*uint8 \[2\]"),
    ],
)
def test_a_faulty_part_is_named_with_environment_and_step(shown, name, value, message):
    space, good, _ = KINDS[name]
    env = shown(space, good, value)
    env.reset(0)
    with pytest.raises(ValueError, match=message):
        env.step(np.zeros(2, np.int64))


def test_a_converter_keeps_no_observation():
    convert = ObservationConverter(spaces.Discrete(3))
    first = convert(0)
    assert convert(1).tolist() == [0, 1, 0] and first.tolist() == [1, 0, 0]
    with pytest.raises(InvalidPartError):
        convert(3)
    assert convert(2).tolist() == [0, 0, 1]


@pytest.mark.parametrize("game", ["FrozenLake-v1", "Blackjack-v1", "CliffWalking-v1", "Taxi-v4"])
def test_toy_text_gives_one_hot_vectors(game):
    env = GymEnv(GymParams(), game, 3)
    seen, stored = env.reset(0), []
    for _ in range(30):
        stored.append(seen.observation)
        seen = env.step(np.zeros(3, np.int64))
    ones = {"Blackjack-v1": 3}.get(game, 1)
    observations = torch.from_numpy(np.stack(stored))
    assert (observations.sum(-1) == ones).all() and ((observations == 0) | (observations == 1)).all()
