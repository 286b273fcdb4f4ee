"""Fields of an EnvSpec that contradict each other are refused where the spec is made."""

import re

import numpy as np
import pytest

from core.specs import ArraySpec, Continuous, Discrete, EnvSpec, Mixed

BYTES = ArraySpec((4 * 4 * 3 + 4 * 2,), "uint8")


def spec(frame=BYTES, action=None, **fields):
    return EnvSpec("mine", frame, 0, action or Discrete(2), **fields)


def continuous(low, high):
    return Continuous(np.array(low, np.float32), np.array(high, np.float32))


@pytest.mark.parametrize(
    "frame", [ArraySpec((4 * 4 * 3 + 9,), "uint8"), ArraySpec((40,), "uint8"), ArraySpec((14,), "float32")]
)
def test_a_frame_that_is_no_picture_and_numbers_is_refused(frame):
    assert spec(picture_of_parts=(4, 4, 3)).vector_size == 2
    message = f"a frame {frame.dtype} {list(frame.shape)} does not hold the bytes of a picture [4, 4, 3]"
    with pytest.raises(ValueError, match=re.escape(message)):
        spec(frame, picture_of_parts=(4, 4, 3))


@pytest.mark.parametrize("high", [[np.inf, 9.0], [np.nan, 9.0], [1.0, -0.5]])
def test_actions_without_a_range_are_refused(high):
    spec(action=continuous([-1.0, 0.0], [1.0, 9.0]))
    for action in (bounds := continuous([-1.0, 0.0], high), Mixed((3,), *bounds)):
        with pytest.raises(ValueError, match=r"actions .*in .* need finite bounds"):
            spec(action=action)


def test_continuous_actions_have_no_masks():
    with pytest.raises(ValueError, match="has_action_mask needs choices"):
        spec(action=continuous([-1.0], [1.0]), has_action_mask=True)
