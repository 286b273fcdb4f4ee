"""Grey and smaller pictures, as the networks take them; shared by every environment that gives pictures."""

from typing import Annotated

import numpy as np
from pydantic import Field, Strict

from core.specs import ArraySpec

Side = Annotated[int, Field(ge=8, le=1024)]  # pixels
Size = Side | Annotated[tuple[Side, Side], Strict(False)]  # one number, or height and width


def sides(size: Size) -> tuple[int, int]:
    """Return height and width of a size that is written as one number or as both."""
    return (size, size) if isinstance(size, int) else size


def resized(picture: np.ndarray, size: Size) -> np.ndarray:
    """Resize [H, W] or [H, W, planes] to this size; each pixel is the mean of the area that it covers."""
    import cv2  # large, and most environments need none of it

    height, width = sides(size)
    planes = [picture] if picture.ndim == 2 else np.split(picture, range(4, picture.shape[2], 4), 2)  # cv2 takes four at a time
    smaller = [cv2.resize(part, (width, height), interpolation=cv2.INTER_AREA).reshape(height, width, *part.shape[2:]) for part in planes]
    return smaller[0] if len(smaller) == 1 else np.concatenate(smaller, 2)


def grey(picture: np.ndarray) -> np.ndarray:
    """Return the brightness [H, W] of a picture; one that has no colours stays as it is."""
    import cv2

    planes = picture.shape[2] if picture.ndim == 3 else 1
    return cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY) if planes == 3 else picture.reshape(picture.shape[:2])


class Preprocessing:
    """Makes observations [*given.shape] uint8 into frames [*frame.shape]: grey, then resized, where asked for.

    Raises ValueError where that is asked for observations that are no pictures.
    """

    def __init__(self, given: ArraySpec, is_image: bool, size: Size | None, grayscale: bool):
        self._size, self._grayscale = size, grayscale
        if not is_image and (grayscale or size is not None):
            raise ValueError(f"env.size and env.grayscale are for pictures, and its observations are {given.dtype} {list(given.shape)}")
        if grayscale and len(given.shape) == 3 and given.shape[2] not in (1, 3):
            raise ValueError(f"env.grayscale is for pictures of three colours, and its have {given.shape[2]} planes")
        self.frame = ArraySpec(self(np.zeros(given.shape, given.dtype)).shape, given.dtype)

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        picture = grey(observation) if self._grayscale else observation
        return picture if self._size is None else resized(picture, self._size)
