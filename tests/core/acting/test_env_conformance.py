"""Each clause of the environment's contract is reported if it is violated, and only then."""

import numpy as np
import pytest

from core.acting.validated_env import contract_violations, play_randomly, random_actions
from core.env import Env
from core.specs import ArraySpec, Continuous, Discrete, EnvSpec
from core.types import TimeStep

SPEC = EnvSpec("game", ArraySpec((2, 2), "uint8"), 3, Discrete(4), is_image=True, max_value=9.0)
VECTORS = EnvSpec("game", ArraySpec((3,), "float32"), 0, Continuous(np.float32([-2, 0]), np.float32([1, 5])))


def timestep(spec=SPEC, **changes):
    """Return a step of two environments: an episode of the first ends, one of the second starts."""
    row = {
        "observation": np.zeros((2, *spec.observation_shape), spec.frame.dtype),
        "reward": np.float32([0.5, 0]),
        "discount": np.float32([0, 1]),
        "first": np.array([False, True]),
        "last": np.array([True, False]),
        "raw_reward": np.float32([7, 0]),
    }
    return TimeStep(**{**row, **changes})


def before(**changes):
    return timestep(**{"first": np.array([False, False]), "last": np.array([False, True]), **changes})


def frames(*values):
    """Return the stacks [2, 3, 2, 2] of two environments whose frames have these values, the oldest first."""
    return np.broadcast_to(np.array(values, np.uint8)[:, None, None], (2, 3, 2, 2)).copy()


def test_a_stack_has_the_frames_of_the_step_before_or_zeros():
    stacks, earlier = frames(1, 2, 3), before(observation=frames(0, 1, 2))
    assert "older frames" in contract_violations(SPEC, timestep(observation=stacks), earlier)[0]  # one episode starts
    stacks[1, :2] = 0
    assert contract_violations(SPEC, timestep(observation=stacks), earlier) == []


@pytest.mark.parametrize("spec", [SPEC, VECTORS])
def test_a_conforming_step_has_no_violations(spec):
    assert contract_violations(spec, timestep(spec), before()) == []


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (SPEC, {"observation": frames(0, 0, 10)}, r"values 0 \.\. 10, outside 0 \.\. 9"),
        (SPEC, {"observation": frames(1, 0, 0)}, "older frames are neither .* in environments 0, 1"),
        (SPEC, {"reward": np.array([0.5, 0])}, r"reward is float64 \[2\], expected float32 \[2\]"),
        (SPEC, {"discount": np.float32([1.5, 1])}, r"discount of environments 0 is outside 0 \.\. 1"),
        (SPEC, {"discount": np.float32([-0.5, 1])}, r"discount of environments 0 is outside 0 \.\. 1"),
        (
            SPEC,
            {"first": np.array([False, False])},
            "first is wrong in environments 1: an episode starts exactly where one ended before",
        ),
        (
            SPEC,
            {
                "first": np.array([True, True]),
                "last": np.array([False, False]),
                "reward": np.float32([0, 0]),
                "raw_reward": np.float32([0, 0]),
                "discount": np.float32([1, 1]),
            },
            "first is wrong in environments 0",
        ),
        (SPEC, {"last": np.array([False, True])}, "first and last are both true in environments 1"),
        (SPEC, {"reward": np.float32([0, 2])}, "first observation earned a reward in environments 1"),
        (SPEC, {"raw_reward": np.float32([0, 2])}, "first observation earned a reward in environments 1"),
        (SPEC, {"discount": np.float32([1, 0])}, "first observation has a discount other than 1 in environments 1"),
    ],
)
def test_a_violated_clause_is_named(spec, changes, message):
    found = contract_violations(spec, timestep(spec, **changes), before())
    assert len(found) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(found[0])


def test_a_reset_starts_an_episode_in_every_environment():
    assert "a reset starts" in contract_violations(SPEC, timestep(), None)[0]
    everywhere = timestep(
        first=np.array([True, True]),
        last=np.array([False, False]),
        reward=np.float32([0, 0]),
        raw_reward=np.float32([0, 0]),
        discount=np.float32([1, 1]),
    )
    assert contract_violations(SPEC, everywhere, None) == []


class Short(Env):
    """Play episodes of two steps in arrays that are reused; from step `fault` on discounts are 2."""

    spec = VECTORS

    def __init__(self, fault=10**9):
        self.fault, self.steps, self.actions, self.closed = fault, 0, [], False
        self.row = timestep(VECTORS)

    def reset(self, seed):
        return self._next(True, False)

    def step(self, action):
        self.actions.append(action)
        self.steps += 1
        place = self.steps % 3
        return self._next(place == 0, place == 2)

    def _next(self, first, last):
        self.row.first[:], self.row.last[:] = first, last
        self.row.reward[:] = self.row.raw_reward[:] = 0
        self.row.discount[:] = 2 if self.steps >= self.fault else 1
        return self.row


def test_random_play_ends_at_the_first_violation_and_names_it():
    env = Short()
    assert play_randomly(env, 2, 9, 0) == ([], 6) and env.steps == 9
    found, episodes = play_randomly(Short(fault=4), 2, 9, 0)
    assert episodes == 2 and [line.partition(" is ")[0] for line in found] == [
        "step 4 of random play: discount of environments 0, 1"
    ]


def test_random_actions_cover_the_space_and_stay_inside():
    env = Short()
    play_randomly(env, 2, 400, 0)
    actions = np.stack(env.actions)  # [steps, E, 2]
    space = VECTORS.action
    assert actions.dtype == np.float32 and (actions >= space.low).all() and (actions <= space.high).all()
    span = space.high - space.low
    assert (actions.min((0, 1)) < space.low + 0.02 * span).all() and (
        actions.max((0, 1)) > space.high - 0.02 * span
    ).all()
    drawn = random_actions(Discrete(3), 500, np.random.default_rng(0))
    assert drawn.shape == (500,) and set(drawn.tolist()) == {0, 1, 2}
