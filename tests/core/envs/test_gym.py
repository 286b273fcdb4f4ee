import importlib
import re
import shutil
import sys
import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from core.agents.base.continuous_control import ActionRange
from core.envs.gym import GymEnv, GymParams
from core.specs import Continuous, Discrete
from utils import errors

GOOD = (np.zeros(3), 1.0, False, False, {})


class Told(gym.Env):
    """Play episodes of `length` steps; `faults` maps a step's number to the result that replaces its own."""

    def __init__(self, faults=None, observation_space=None, action_space=None, start=None, length=3):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,)) if observation_space is None else observation_space
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.faults, self.start, self.length, self.actions = faults or {}, start, length, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return (np.zeros(3), {}) if self.start is None else self.start

    def step(self, action):
        self.t += 1
        self.actions.append(action)
        same = self.start[0] if self.start else np.full(3, self.t, np.float64)
        return self.faults.get(self.t, (same, float(self.t), self.t == self.length, False, {}))


@pytest.fixture
def told():
    """Register Told-v0 with the given arguments and make E environments of it."""

    def make(num_envs=2, params=GymParams(), limit=None, **arguments):  # noqa: B008
        gym.registry.pop("Told-v0", None)
        gym.register("Told-v0", Told, kwargs=arguments, max_episode_steps=limit)
        return GymEnv(params, "Told-v0", num_envs)

    yield make
    gym.registry.pop("Told-v0", None)


def test_a_terminated_episode_has_discount_zero(told):
    env = told(length=3)
    steps = [env.reset(0), *(env.step(np.array([0, 1])) for _ in range(8))]
    assert [bool(step.first[0]) for step in steps] == [True, False, False, False, True, False, False, False, True]
    assert [bool(step.last[0]) for step in steps] == [False, False, False, True, False, False, False, True, False]
    assert [float(step.discount[0]) for step in steps] == [1, 1, 1, 0, 1, 1, 1, 0, 1]
    assert [float(step.reward[0]) for step in steps] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [float(step.observation[0, 0]) for step in steps] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert steps[1].observation.dtype == steps[1].reward.dtype == np.float32


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([{}, {}], [None, None]),
        ([{"is_success": True}, {"is_success": np.float32(0)}], [True, False]),
        ([{"success": 1.0}, {}], [True, False]),
        ([{}, {"success": np.array([True])}], [None, True]),
        ([{"success": "soon"}, {"success": np.ones(3)}], [None, None]),
        ([{"is_success": False}, {"success": True}], [False, True]),
    ],
)
def test_success_is_read_from_the_info_of_the_last_step(told, said, expected):
    env = told(
        num_envs=1, length=2, faults={t: (np.zeros(3), 1.0, t == 2, False, info) for t, info in enumerate(said, 1)}
    )
    env.reset(0)
    found = []
    for _ in said:
        env.step(np.array([0]))
        found.append(env.success(0))
    assert found == expected
    env.reset(1)  # of another evaluation
    assert env.success(0) is None


def test_the_reward_threshold_of_the_id_is_in_the_spec():
    assert GymEnv(GymParams(), "CartPole-v1", 1).spec.reward_threshold == 475
    assert GymEnv(GymParams(), "Pendulum-v1", 1).spec.reward_threshold is None


@pytest.mark.parametrize(
    ("params", "limit", "length"),
    [
        (GymParams(max_steps=2), None, 3),
        (GymParams(), 2, 3),
        (GymParams(max_steps=2), 9, 3),
        (GymParams(max_steps=4), 2, 9),
    ],
)
def test_a_truncated_episode_keeps_discount_one(told, params, limit, length):
    env = told(params=params, limit=limit, length=length)
    env.reset(0)
    wanted = params.max_steps or limit
    steps = [env.step(np.array([0, 0])) for _ in range(wanted + 1)]
    assert [step.last.all() for step in steps] == [False] * (wanted - 1) + [True, False]
    assert all(step.discount.all() for step in steps)
    assert steps[wanted - 1].observation[0, 0] == wanted and steps[wanted].first.all()


def test_the_step_limit_of_the_id_is_the_default():
    env = GymEnv(GymParams(), "Pendulum-v1", 1)
    env.reset(0)
    lasts = [env.step(np.zeros((1, 1), np.float32)).last[0] for _ in range(201)]
    assert np.flatnonzero(lasts).tolist() == [199]


NAN, INF = np.array([0.0, np.nan, 0.0]), np.array([0.0, 0.0, np.inf])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((None, *GOOD[1:]), "observation of environment 0 at step 2 is .*None"),
        ((NAN, *GOOD[1:]), "observation of environment 0 at step 2 is .*nan.*element 1"),
        ((INF, *GOOD[1:]), "observation of environment 0 at step 2 is .*inf.*element 2"),
        ((np.full(3, 1e300), *GOOD[1:]), "observation of environment 0 at step 2 is .*inf"),
        (
            (np.zeros(4), *GOOD[1:]),
            r"observation of environment 0 at step 2 is .*float64 \[4\].*expected float32 \[3\]",
        ),
        (([[0], [1, 2]], *GOOD[1:]), "observation of environment 0 at step 2"),
        ((np.array(["a", "b", "c"]), *GOOD[1:]), "observation of environment 0 at step 2 is .*<U1"),
        ((GOOD[0], None, *GOOD[2:]), "reward of environment 0 at step 2 is None"),
        ((GOOD[0], float("nan"), *GOOD[2:]), "reward of environment 0 at step 2 is nan"),
        ((GOOD[0], -float("inf"), *GOOD[2:]), "reward of environment 0 at step 2 is -inf"),
        ((GOOD[0], np.zeros(2), *GOOD[2:]), "reward of environment 0 at step 2"),
        ((GOOD[0], "1", *GOOD[2:]), "reward of environment 0 at step 2 is '1'"),
        ((*GOOD[:2], None, False, {}), "terminated of environment 0 at step 2 is None"),
        ((*GOOD[:2], False, 0.5, {}), "truncated of environment 0 at step 2 is 0.5"),
        (
            (*GOOD[:3], {}),
            "step of environment 0 returned 4 values at step 2, expected 5 values: the old gym API.*v21.*legacy-gym",
        ),
        (None, "step of environment 0 returned None at step 2, expected 5 values"),
    ],
)
def test_a_faulty_step_names_field_value_environment_and_step(told, result, message):
    env = told(num_envs=1, faults={2: result})
    env.reset(0)
    env.step(np.array([0]))
    with pytest.raises(ValueError, match=message):
        env.step(np.array([0]))


@pytest.mark.parametrize(
    ("space", "value", "fault"),
    [
        (spaces.Box(-1, 1, (3,)), 1e7, r"expected a value near -1.0 .. 1.0 \(element 2\)"),
        (spaces.Box(-1, 1, (3,)), -1e7, "near"),
        (spaces.Box(-200, 100, (3,)), 3e8, "expected a value near -200.0 .. 100.0"),
        (spaces.Box(0, 9, (3,), np.int64), 10**8, "near 0 .. 9"),
        (spaces.Box(-1, 1, (3,)), 5.0, None),
        (spaces.Box(-200, 100, (3,)), -1e6, None),
        (spaces.Box(-1, np.inf, (3,)), 1e30, None),
    ],
)
def test_an_observation_far_outside_its_box_is_an_error(told, space, value, fault):
    observation = np.array([0, 0, value], space.dtype)
    env = told(
        num_envs=1, observation_space=space, start=(np.zeros(3, space.dtype), {}), faults={2: (observation, *GOOD[1:])}
    )
    env.reset(0)
    env.step(np.array([0]))
    if fault is None:
        assert env.step(np.array([0])).observation[0, 2] == np.float32(value)
    else:
        with pytest.raises(ValueError, match=f"observation of environment 0 at step 2 is .*{fault}"):
            env.step(np.array([0]))


def test_the_frame_rate_is_that_of_the_metadata(told):
    assert GymEnv(GymParams(), "CartPole-v1", 1).spec.frame_rate == 50
    assert told().spec.frame_rate == 30  # gymnasium's default
    for odd in (0, None, "fast", -5, float("nan")):
        Told.metadata = {"render_fps": odd}
        assert told().spec.frame_rate == 30
    Told.metadata = {}


def test_an_error_names_its_environment(told):
    env = told(num_envs=3)
    env.reset(0)
    env._envs[2].env.unwrapped.faults[1] = (NAN, *GOOD[1:])
    with pytest.raises(ValueError, match="environment 2 at step 1"):
        env.step(np.zeros(3, np.int64))


def test_environments_are_numbered_within_their_actor(told):
    env, cell, seen = told(num_envs=3), np.zeros(1), []
    env.set_activity_marker(cell, 4)
    env.reset(0)
    own = env._envs[1].env.unwrapped
    taken = own.step
    own.step = lambda action: (seen.append(cell[0]), taken(action))[1]
    env._envs[2].env.unwrapped.faults[1] = (NAN, *GOOD[1:])
    with pytest.raises(ValueError, match="environment 6 at step 1"):
        env.step(np.zeros(3, np.int64))
    assert seen == [1 + 5] and cell == [0]


def test_an_old_reset_is_an_error_that_names_the_adapter(told):
    with pytest.raises(ValueError, match=r"reset of environment 0 returned array.*old gym API.*v21"):
        told(start=np.zeros(3)).reset(0)
    env = told()
    env._envs[0].env.unwrapped.reset = lambda: np.zeros(3)
    with pytest.raises(ValueError, match=r"unexpected keyword argument.*old gym API.*v21"):
        env.reset(0)


def test_images_stay_uint8_and_must_be_uint8(told):
    space, picture = spaces.Box(0, 255, (12, 10, 3), np.uint8), np.full((12, 10, 3), 9, np.uint8)
    env = told(observation_space=space, start=(picture, {}))
    assert env.spec.is_image and env.spec.max_value == 255 and env.spec.frame == ((12, 10, 3), "uint8")
    np.testing.assert_array_equal(env.reset(0).observation, [picture, picture])
    env._envs[0].env.unwrapped.faults[1] = (picture.astype(np.float32), *GOOD[1:])
    with pytest.raises(ValueError, match=r"float32.*expected uint8"):
        env.step(np.array([0, 0]))


def test_discrete_actions_may_start_at_any_integer(told):
    env = told(action_space=spaces.Discrete(3, start=-1))
    assert env.spec.action == Discrete(3)
    env.reset(0)
    env.step(np.array([0, 2]))
    assert [one.env.unwrapped.actions[-1] for one in env._envs] == [-1, 1]
    with pytest.raises(ValueError, match="action 3 of environment 1"):
        env.step(np.array([0, 3]))


def test_continuous_actions_stay_within_their_bounds(told):
    env = told(action_space=spaces.Box(np.array([-1.0, 0.0]), np.array([0.1, 2.0]), dtype=np.float64))
    assert isinstance(env.spec.action, Continuous) and env.spec.action.high.dtype == np.float32
    env.reset(0)
    env.step(np.stack([env.spec.action.low, env.spec.action.high]))  # float32(0.1) is above 0.1
    last = env._envs[1].env.unwrapped
    assert last.action_space.contains(last.actions[-1])
    for bad, message in (
        ([[0, 0], [0, 2.5]], r"action 2.5 of environment 1 \(element \[1\]\)"),
        ([[np.nan, 0], [0, 0]], "action nan of environment 0"),
    ):
        with pytest.raises(ValueError, match=message):
            env.step(np.array(bad, np.float32))


@pytest.mark.parametrize("space", [spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(0, 3, (2,), np.int64)])
def test_unsupported_action_spaces_are_refused(told, space):
    with pytest.raises(ValueError, match="actions of"):
        told(action_space=space)


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "bounded"),
    [
        (-LARGEST, LARGEST, np.float32, False),
        (-1e300, 1e300, np.float64, False),
        (0.0, 1e300, np.float64, False),
        (0.0, np.inf, np.float32, False),
        (-1e38, 1e38, np.float64, True),
        (0.0, LARGEST, np.float32, True),
        (LARGEST / 2, LARGEST, np.float32, True),
        (-1e-300, 1e-300, np.float64, True),
    ],
)
def test_actions_need_bounds_whose_distance_fits_float32(told, low, high, dtype, bounded):
    space = spaces.Box(low, high, (2,), dtype)
    if not bounded:
        with pytest.raises(ValueError, match=r"no bounds whose distance float32 can hold.*TransformAction"):
            told(action_space=space)
        return
    env = told(action_space=space)
    env.reset(0)
    stretch = ActionRange(env.spec.action, torch.device("cpu"))
    for inside, expected in ((-1.0, low), (0.0, low / 2 + high / 2), (1.0, high)):
        action = stretch.to_space(torch.full((2, 2), inside)).numpy()
        np.testing.assert_allclose(action, expected, rtol=1e-6, atol=1e-6)
        env.step(action)


def test_the_advice_for_unbounded_actions_works(told):
    """The expression of the error message makes an environment that is accepted."""
    unbounded = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    with pytest.raises(ValueError, match="TransformAction") as error:
        told(action_space=unbounded)
    advice = str(error.value).partition(", with ")[2]
    gym.register("Wrapped-v0", lambda: eval(advice, {"gymnasium": gym, "env": Told(action_space=unbounded)}))
    try:
        env = GymEnv(GymParams(), "Wrapped-v0", 1)
        assert env.spec.action.low.tolist() == [-1, -1] and env.spec.action.high.tolist() == [1, 1]
        env.reset(0)
        env.step(np.array([[0.5, -0.5]], np.float32))
        assert env._envs[0].env.unwrapped.actions[-1].tolist() == [0.5, -0.5]
    finally:
        gym.registry.pop("Wrapped-v0")


def test_rewards_are_clipped_in_training_only(told):
    env = told(params=GymParams(reward_clipping="sign"))
    env.reset(0)
    env.step(np.array([0, 0]))
    step = env.step(np.array([0, 0]))
    assert step.reward.tolist() == [1, 1] and step.raw_reward.tolist() == [2, 2]
    evaluation = GymEnv(GymParams(reward_clipping="sign"), "Told-v0", 1, training=False)
    evaluation.reset(0)
    evaluation.step(np.array([0]))
    assert evaluation.step(np.array([0])).reward.tolist() == [2]


def test_environments_and_seeds_differ_and_a_seed_is_repeatable():
    def start(seed):
        return GymEnv(GymParams(), "CartPole-v1", 3).reset(seed).observation

    np.testing.assert_array_equal(start(4), start(4))
    assert len(np.unique(np.concatenate([start(4), start(5)])[:, 0])) == 6


@pytest.mark.parametrize(
    ("game", "closest"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole-v7", "CartPole-v1"),
        ("nowhere/Thing-v0", "nowhere"),
        ("no good id", "Malformed"),
        ("OfAnotherPackage-v0", "begins with the module that registers it"),
    ],
)
def test_an_unknown_id_is_refused_with_the_closest(game, closest):
    with pytest.raises(ValueError, match=closest):
        GymEnv(GymParams(), game, 1)


def test_a_missing_package_names_the_pip_command(told):
    def needs_a_package(**_):
        raise gym.error.DependencyNotInstalled('Box2D is missing, run `pip install "gymnasium[box2d]"`')

    gym.register("Told-v0", needs_a_package)
    with pytest.raises(ImportError, match=r"Told-v0.*pip install"):
        GymEnv(GymParams(), "Told-v0", 1)
    with pytest.raises(ImportError, match=r"no_such_package.*pip install"):
        GymEnv(GymParams(), "no_such_package:Thing-v0", 1)
    with pytest.raises(ImportError, match=r"tests.no_such_file.*is it a file of the package tests\?"):
        GymEnv(GymParams(), "tests.no_such_file:Thing-v0", 1)


def test_an_id_may_name_the_module_that_registers_it(tmp_path, monkeypatch):
    (tmp_path / "my_games.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Mine-v0', CartPoleEnv, max_episode_steps=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = GymEnv(GymParams(), "my_games:Mine-v0", 1)
    assert env.spec.name == "Mine-v0"
    env.reset(0)
    assert [bool(env.step(np.array([t % 2])).last[0]) for t in range(7)] == [False] * 6 + [True]
    gym.registry.pop("Mine-v0")


def test_empty_observations_are_refused(told):
    with pytest.raises(ValueError, match="are empty"):
        told(observation_space=spaces.Dict({}))


@pytest.mark.parametrize("installed", [False, True])
def test_a_module_that_needs_the_old_gym_names_the_adapter(tmp_path, monkeypatch, installed):
    (tmp_path / "procgenlike.py").write_text("import gym\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "procgenlike", raising=False)
    monkeypatch.setitem(sys.modules, "gym", types.ModuleType("gym") if installed else None)
    registration = types.ModuleType("gym.envs.registration")
    registration.registry = {"coin-v0": None}
    monkeypatch.setitem(sys.modules, "gym.envs.registration", registration)
    with pytest.raises(
        ValueError if installed else ImportError,
        match=r"old gym: pip install -e \"\.\[legacy-gym\]\" and set env.legacy",
    ):
        GymEnv(GymParams(), "procgenlike:coin-v0", 1)


def test_a_missing_or_broken_adapter_names_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    # shimmy registers nothing if dm_control is missing
    for content in ("", "raise AttributeError('mujoco has changed')\n"):
        (tmp_path / "shimmy.py").write_text(content)
        monkeypatch.setitem(sys.modules, "shimmy", None)
        del sys.modules["shimmy"]  # monkeypatch then removes the module that is imported now
        with pytest.raises(ImportError, match=r'pip install -e "\.\[dm-control\]"'):
            GymEnv(GymParams(), "dm_control/walker-walk-v0", 1)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)


@pytest.mark.parametrize("module, extra", [("minigrid", "minigrid"), ("gymnasium_robotics", "robotics")])
def test_a_missing_package_of_an_extra_names_the_pip_command(module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # import then fails, installed or not
    with pytest.raises(ImportError, match=rf'{module}.*pip install -e "\.\[{extra}\]"'):
        GymEnv(GymParams(), f"{module}:Any-v0", 1)


def test_a_package_that_fails_reports_installed_versions(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "robots.py").write_text(
        "import gymnasium\nclass Fetch(gymnasium.Env):\n    def __init__(self):\n        assert None\n"
        "gymnasium.register('Fetching-v0', Fetch)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    with pytest.raises(AssertionError) as error:
        GymEnv(GymParams(), "robots:Fetching-v0", 1)
    gym.registry.pop("Fetching-v0")
    versions = f"gymnasium {gym.__version__}, numpy {np.__version__}"
    assert f"other versions than these, which are installed: {versions}" in errors.describe_exception(error.value)


def test_legacy_without_the_old_gym_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "gym", None)
    with pytest.raises(ImportError, match="legacy-gym"):
        GymEnv(GymParams(legacy="v26"), "CartPole-v1", 1)


@pytest.mark.parametrize(("legacy", "expected"), [("v26", {}), ("v21", {"apply_api_compatibility": True})])
def test_legacy_ids_are_made_by_the_adapter(monkeypatch, legacy, expected):
    asked = []
    old_gym, shimmy, adapter = (
        types.ModuleType("gym"),
        types.ModuleType("shimmy"),
        types.ModuleType("shimmy.openai_gym_compatibility"),
    )
    old_gym.make = lambda game, **arguments: asked.append((game, arguments)) or Told()
    old_gym.error = types.SimpleNamespace(DependencyNotInstalled=KeyError, Error=KeyError)
    adapter.GymV26CompatibilityV0 = lambda env: env
    for module in (old_gym, shimmy, adapter):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    env = GymEnv(GymParams(legacy=legacy), "Old-v0", 1)
    assert asked == [("Old-v0", {"disable_env_checker": True, **expected})]
    env.reset(0)
    assert env.step(np.array([1])).reward.tolist() == [1]


def test_the_old_gym_plays_if_installed():
    pytest.importorskip("gym")
    pytest.importorskip("shimmy")
    env = GymEnv(GymParams(legacy="v26", max_steps=5), "CartPole-v1", 2)
    env.reset(0)
    assert [bool(env.step(np.array([t % 2, 1])).last[0]) for t in range(5)] == [False] * 4 + [True]


class Drawn(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def __init__(self, picture, render_mode=None):
        self.picture, self.render_mode = picture, render_mode

    def reset(self, *, seed=None, options=None):
        return np.zeros(1), {}

    def render(self):
        return self.picture


def test_anything_but_a_picture_is_refused_by_the_name_of_the_environment():
    picture = np.full((4, 6, 3), 7, np.uint8)
    wrong = {
        "no pictures: render() returned [4, 6]": picture[..., 0],
        "no pictures: render() returned [4, 6, 6]": np.concatenate([picture, picture], 2),
        "no pictures: render() returned list": picture.tolist(),
        "no pictures: render() returned NoneType": None,
        "pictures of float64": picture / 255.0,
    }
    gym.register("Drawn-v0", Drawn, kwargs={"picture": picture})
    env = GymEnv(GymParams(), "Drawn-v0", 1, render_mode="rgb_array")
    gym.registry.pop("Drawn-v0")
    env.reset(0)
    np.testing.assert_array_equal(env.render(), picture)
    for told, drawn in wrong.items():
        env._envs[0].env.unwrapped.picture = drawn
        with pytest.raises(ValueError, match=re.escape(f"Drawn-v0 draws {told}")):
            env.render()


def test_a_step_does_not_overwrite_earlier_steps():
    env = GymEnv(GymParams(), "CartPole-v1", 2)
    kept = env.reset(0)
    copies = [field.copy() for field in kept if field is not None]
    for _ in range(40):
        env.step(np.array([0, 1]))
    for field, copy in zip(kept, copies):
        np.testing.assert_array_equal(field, copy)
