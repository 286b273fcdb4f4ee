"""Change what a game returns for training: clipped rewards, and grayscale pictures of another size.

The score is always the sum of raw rewards.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, Strict

from core.specs import ArraySpec


def soft_asymmetric(reward: np.ndarray) -> np.ndarray:
    """Return 5 * (0.3 * min(tanh(r / 5), 0) + max(tanh(r / 5), 0)), the clipping of IMPALA's code (scalable_agent).

    The paper's own formula is `optimistic_asymmetric`, which saturates at rewards of about 2 instead of about 10.
    """
    bounded = np.tanh(reward / 5.0)
    return 5.0 * np.where(reward < 0, 0.3 * bounded, bounded)


def optimistic_asymmetric(reward: np.ndarray) -> np.ndarray:
    """Return 0.3 * min(tanh(r), 0) + 5 * max(tanh(r), 0), IMPALA's asymmetric clipping (1802.01561, figure D.1)."""
    bounded = np.tanh(reward)
    return np.asarray(0.3 * np.minimum(bounded, 0.0) + 5.0 * np.maximum(bounded, 0.0))


Clipping = Literal["none", "sign", "clamp", "soft_asymmetric", "optimistic_asymmetric"]

CLIPPINGS: dict[Clipping, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda reward: reward,
    "sign": np.sign,  # DQN (Nature 2015): positive rewards are 1, negative ones -1
    "clamp": lambda reward: np.clip(reward, -1, 1),  # keeps fractions
    "soft_asymmetric": soft_asymmetric,  # IMPALA's published code
    "optimistic_asymmetric": optimistic_asymmetric,  # IMPALA's figure D.1
}


def clipped(reward: np.ndarray, clipping: Clipping) -> np.ndarray:
    """Return a new float32 array of the rewards [E], clipped by an entry of CLIPPINGS."""
    return CLIPPINGS[clipping](reward).astype(np.float32)


Side = Annotated[int, Field(ge=8, le=1024)]  # pixels
Size = Side | Annotated[tuple[Side, Side], Strict(False)]  # one number, or height and width


def height_and_width(size: Size) -> tuple[int, int]:
    """Return a size as (height, width)."""
    return (size, size) if isinstance(size, int) else size


def resized(picture: np.ndarray, size: Size) -> np.ndarray:
    """Resize a picture [H, W] or [H, W, planes]; each new pixel is the mean of the area that it covers."""
    import cv2  # takes long to import, and most environments need none of it

    height, width = height_and_width(size)
    # cv2 resizes at most four planes at a time
    parts = [picture] if picture.ndim == 2 else np.split(picture, range(4, picture.shape[2], 4), 2)
    smaller = [
        cv2.resize(part, (width, height), interpolation=cv2.INTER_AREA).reshape(height, width, *part.shape[2:])
        for part in parts
    ]
    return smaller[0] if len(smaller) == 1 else np.concatenate(smaller, 2)


def grayscale(picture: np.ndarray) -> np.ndarray:
    """Return the brightness [H, W] of a picture [H, W, 3]; a picture of one plane keeps its values."""
    import cv2

    if picture.ndim == 3 and picture.shape[2] == 3:
        return cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    return picture.reshape(picture.shape[:2])


class Preprocessing:
    """A function from uint8 observations to frames: grayscale first, then resized, each if asked for.

    Args:
        observation: Shape and dtype of the observations.
        is_image: True if they are pictures.
        size: New size; None keeps the size.
        to_gray: Convert to grayscale.

    Raises:
        ValueError: Preprocessing is asked for observations that are not pictures, or do not have one or three planes.
    """

    def __init__(self, observation: ArraySpec, is_image: bool, size: Size | None, to_gray: bool):
        self._size, self._to_gray, shape = size, to_gray, list(observation.shape)
        if not is_image and (to_gray or size is not None):
            raise ValueError(
                f"env.resolution and env.grayscale are for pictures, and its observations are "
                f"{observation.dtype} {shape}"
            )
        if to_gray and len(shape) == 3 and shape[2] not in (1, 3):
            raise ValueError(f"env.grayscale is for pictures of three colours, and its have {shape[2]} planes")
        self.frame = ArraySpec(self(np.zeros(observation.shape, observation.dtype)).shape, observation.dtype)

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        picture = grayscale(observation) if self._to_gray else observation
        return picture if self._size is None else resized(picture, self._size)


class JoinedFrames:
    """A function from pairs of a picture and a float32 vector to frames, the bytes of both.

    Args:
        preprocess: Preprocessing of the picture.
        vector_size: Numbers of the vector.
    """

    def __init__(self, preprocess: Preprocessing, vector_size: int):
        self._preprocess = preprocess
        self.frame = ArraySpec((preprocess.frame.nbytes + 4 * vector_size,), "uint8")

    def __call__(self, observation: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        picture, vector = observation
        return np.concatenate([self._preprocess(picture).reshape(-1), vector.view(np.uint8)])
