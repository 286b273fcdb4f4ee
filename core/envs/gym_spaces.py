"""Convert observations, actions and masks of any gymnasium space.

Observations become a picture, a float32 vector, or a picture and a vector:

- The leaves of nested Dict and Tuple spaces are parts, named by their path: "goal.position", "0". Keys are in
  alphabetical order and elements of tuples in theirs, whatever the order in which a space was written.
- A part of Box, Discrete, MultiDiscrete or MultiBinary space has a fixed range of the vector: numbers as they are,
  bytes divided by 255, integers of Discrete and MultiDiscrete one-hot.
- Text is left out. `keys` selects parts.
- Parts that are pictures are one picture of bytes. Several of one height and width are joined plane by plane.

Stored actions become those of the space, for all environments at once:

- Discrete stays one number, a Box of floats stays one array.
- MultiDiscrete, MultiBinary, and nested Dicts and Tuples of these and Discrete become the choices of one MultiDiscrete,
  in the order of gymnasium's `flatten`. Numbers that spaces start from are added here.
- Nested Dicts and Tuples with Boxes of floats among these parts become one Mixed space: the choices, then the numbers
  of all Boxes, each in that order. With Boxes alone they become one Continuous space.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from core.env import checked_continuous, checked_discrete, checked_mixed
from core.specs import ActionSpec, ArraySpec, Continuous, Discrete, Mixed, MultiDiscrete, ObservationPart, PartKind

Space = spaces.Space[Any]
TOLERANCE = 1e6  # factor by which an observation may exceed the bounds of its space
MAX_FLOAT = float(np.finfo(np.float32).max)
LISTED = 12  # parts that a message names
MAX_ONE_HOT = 10**7  # numbers of a part; a step of these takes 40 MB
Write = Callable[[Any, np.ndarray], None]  # writes a part's value into the vector [N]; raises TypeError or ValueError


class InvalidPartError(ValueError):
    """An observation, or the part `name` of one, that is not of its space."""

    def __init__(self, name: str, value: Any, expected: str):
        super().__init__(f"{name} is {value}, expected {expected}")
        self.name, self.value, self.expected = name, value, expected


class _Leaf(NamedTuple):
    path: tuple[Any, ...]
    space: Space
    name: str
    is_bytes: bool

    def value_in(self, observation: Any) -> Any:
        for key in self.path:
            observation = observation[key]
        return observation


class ObservationConverter:
    """A function from observations of a space to what is stored. It has no state and may be shared by environments.

    Args:
        space: The observation space of an environment.
        keys: Names of the parts that are kept, each with everything below it; empty keeps all.

    Raises:
        ValueError: A key names no part, a part has no fixed size, pictures have different sizes, or no part is left.
    """

    def __init__(self, space: Space, keys: Sequence[str | int] = ()):
        self.space, leaves = space, list(_leaves(space))
        kept, self.parts = _selected(leaves, [str(key) for key in keys], space)
        texts = " and ".join(part.name for part in self.parts if part.kind == "text")
        self.warning = f"{texts} of the observation is text, which is left out" if texts else ""
        self._pictures = [leaf for leaf in kept if is_picture(leaf.space)]
        self.is_image = bool(self._pictures)
        self._writes: list[tuple[_Leaf, slice, Write]] = []
        end, limits = 0, list[np.ndarray]()
        for leaf in kept:
            if is_picture(leaf.space):
                continue
            place = slice(end, end := end + spaces.flatdim(leaf.space))
            self._writes.append((leaf, place, _writer(leaf.space, place)))
            limits.append(_max_magnitude(leaf.space, place.stop - place.start))
        self.vector_size = end
        self._max_magnitude = np.concatenate(limits) if limits else np.zeros(0)
        self.frame = _joined_pictures(self._pictures, leaves) if self.is_image else ArraySpec((end,), "float32")
        # most environments have one Box, which needs less work than other vectors
        self._is_lone_box = not self.is_image and len(kept) == 1 and isinstance(kept[0].space, spaces.Box)

    def __call__(self, observation: Any) -> Any:
        """Return a new picture, a new vector [N], or both if there are both.

        They are copies, because environments may reuse one array, even one that all environments of a class share.

        Raises:
            InvalidPartError: A part is not of its space.
        """
        if self._is_lone_box:
            return self._lone_box(observation)
        if not self.is_image:
            return self._vector(observation)
        picture = self._picture(observation)
        return (picture, self._vector(observation)) if self.vector_size else picture

    def _picture(self, observation: Any) -> np.ndarray:
        pictures = [self._array(leaf, observation) for leaf in self._pictures]
        return pictures[0].copy() if len(pictures) == 1 else np.concatenate([*map(np.atleast_3d, pictures)], 2)

    def _vector(self, observation: Any) -> np.ndarray:
        vector = np.zeros(self.vector_size, np.float32)
        with np.errstate(over="ignore"):  # values too large for float32 become inf, which is reported below
            for leaf, place, write in self._writes:
                if isinstance(leaf.space, spaces.Box):
                    array = self._array(leaf, observation).reshape(-1)
                    vector[place] = array / np.float32(255) if leaf.is_bytes else array
                    continue
                try:
                    write(leaf.value_in(observation), vector)
                except (TypeError, ValueError, LookupError) as error:
                    raise self._invalid(leaf, observation) from error
        return self._near_bounds(vector)

    def _lone_box(self, observation: Any) -> np.ndarray:
        leaf = self._writes[0][0]
        array = self._array(leaf, observation).reshape(-1)
        if array.dtype == np.float32:
            return self._near_bounds(array.copy())
        with np.errstate(over="ignore"):
            vector = array.astype(np.float32)
        return vector / np.float32(255) if leaf.is_bytes else self._near_bounds(vector)

    def _array(self, leaf: _Leaf, observation: Any) -> np.ndarray:
        """Return the part that is a Box. Raises InvalidPartError for a wrong shape or kind of numbers."""
        try:
            array = np.asarray(leaf.value_in(observation))
        except (TypeError, ValueError, LookupError):  # also nested lists of different lengths
            raise self._invalid(leaf, observation) from None
        fits = array.dtype == np.uint8 if leaf.is_bytes else array.dtype.kind in "fiub"
        if array.shape != leaf.space.shape or not fits:
            raise self._invalid(leaf, observation)
        return array

    def _near_bounds(self, vector: np.ndarray) -> np.ndarray:
        """Return the vector [N]. Raises InvalidPartError if an element is not finite or too far outside its bounds."""
        fits = np.abs(vector) <= self._max_magnitude  # False for NaN, too
        if fits.all():
            return vector
        element = int(fits.argmin())
        leaf, place, _ = next(entry for entry in self._writes if element < entry[1].stop)
        number, element = vector[element], element - place.start
        if not np.isfinite(number):
            expected = f"finite values (element {element} of {place.stop - place.start})"
            raise InvalidPartError(leaf.name, number, expected)
        assert isinstance(leaf.space, spaces.Box)
        low, high = leaf.space.low.flat[element], leaf.space.high.flat[element]
        raise InvalidPartError(leaf.name, number, f"a value near {low} .. {high} (element {element})")

    def _invalid(self, leaf: _Leaf, observation: Any) -> InvalidPartError:
        try:
            value = leaf.value_in(observation)
        except (TypeError, ValueError, LookupError):
            return InvalidPartError("observation", observation, f"a value of {self.space}, whose {leaf.name} is absent")
        box = isinstance(leaf.space, spaces.Box)
        wanted = f"{leaf.space.dtype} {list(leaf.space.shape or ())}" if box else f"a value of {leaf.space}"
        return InvalidPartError(leaf.name, value, wanted)


def is_picture(space: Space) -> bool:
    """Return True if the space is uint8 pictures, [H, W] or [H, W, planes]."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def _leaves(space: Space, path: tuple[Any, ...] = ()) -> Iterator[_Leaf]:
    """Yield the leaves of nested Dict and Tuple spaces, in the order of the vector."""
    if isinstance(space, spaces.Dict):
        for key in sorted(space.spaces, key=str):
            yield from _leaves(space.spaces[key], (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _leaves(part, (*path, index))
    else:
        yield _Leaf(path, space, ".".join(map(str, path)) or "observation", space.dtype == np.uint8)


def _selected(leaves: list[_Leaf], keys: list[str], space: Space) -> tuple[list[_Leaf], tuple[ObservationPart, ...]]:
    """Return the leaves that are kept, and a description of all of them."""
    for key in keys:
        if not any(_is_below(leaf.name, key) for leaf in leaves):
            raise ValueError(f"env.observation_keys: {key!r} is no part of the observation; it has {_listed(leaves)}")
    kept, parts = list[_Leaf](), list[ObservationPart]()
    for leaf in leaves:
        wanted = not keys or any(_is_below(leaf.name, key) for key in keys)
        kind = _kind(leaf.space) if wanted else "left out"
        if kind is None:
            subject, advice = "observations", "change them by a wrapper of env.wrappers, as one of your own"
            if leaf.path:
                subject = f"{leaf.name} of the observations"
                advice = f"keep others with env.observation_keys, of {_listed(leaves)}"
            raise ValueError(f"{subject} of {leaf.space} have no fixed size and cannot be stored: {advice}")
        size = 0 if kind in ("text", "left out") else spaces.flatdim(leaf.space)
        if kind == "one-hot" and size > MAX_ONE_HOT:
            raise ValueError(
                f"{leaf.name} of {leaf.space} would be {size:,} numbers one-hot, more than {MAX_ONE_HOT:,}: make it "
                "smaller by a wrapper of env.wrappers, as one of your own"
            )
        kept += [leaf] if size else []
        shape = tuple(leaf.space.shape or ()) if kind == "picture" else (size,) if size else ()
        parts.append(ObservationPart(leaf.name, str(leaf.space), kind, shape))
    if not kept:
        raise ValueError(f"observations of {space} are empty: there is nothing to learn from")
    return kept, tuple(parts)


def _is_below(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def _listed(leaves: list[_Leaf]) -> str:
    names = [leaf.name for leaf in leaves]
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def _kind(space: Space) -> PartKind | None:
    """Return what a space becomes; None if it has no fixed size."""
    if isinstance(space, spaces.Text) or (space.dtype is not None and space.dtype.kind in "US"):  # MiniGrid's missions
        return "text"
    if is_picture(space):
        return "picture"
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return "one-hot"
    try:
        return "vector" if space.is_np_flattenable else None
    except NotImplementedError:  # the default of spaces that are not gymnasium's own
        return None


def _joined_pictures(pictures: list[_Leaf], leaves: list[_Leaf]) -> ArraySpec:
    """Return the shape of pictures that are joined plane by plane.

    Raises:
        ValueError: Their sizes differ, or one has its planes before height and width.
    """
    shapes = [tuple(leaf.space.shape or ()) for leaf in pictures]
    for leaf, shape in zip(pictures, shapes):
        if len(shape) == 3 and shape[0] <= 4 and shape[0] < shape[1] and (shape[1] == shape[2] or min(shape[1:]) >= 16):
            raise ValueError(
                f"{leaf.name} {list(shape)} of the observations has its planes first, and pictures are [H, W, planes]: "
                "move them by a wrapper of env.wrappers, as one of your own"
            )
    if len(pictures) == 1:
        return ArraySpec(shapes[0], "uint8")
    if len({shape[:2] for shape in shapes}) > 1:
        sizes = " and ".join(f"{leaf.name} ({shape[0]}x{shape[1]})" for leaf, shape in zip(pictures, shapes))
        raise ValueError(
            f"{sizes} of the observations are pictures of different sizes, and one convolution reads all pictures: "
            f"keep those of one size with env.observation_keys, of {_listed(leaves)}"
        )
    return ArraySpec((*shapes[0][:2], sum((*shape, 1)[2] for shape in shapes)), "uint8")


def _max_magnitude(space: Space, size: int) -> np.ndarray:
    """Return the largest absolute value [N] of each element that is accepted, at most the largest float32.

    Many environments leave their Box a little, which does no harm. Values of TOLERANCE times the bounds would make
    losses that are not finite, for which agent.learning_rate would be blamed.
    """
    if not isinstance(space, spaces.Box):
        return np.full(size, MAX_FLOAT, np.float32)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    largest = TOLERANCE * np.maximum(np.maximum(np.abs(low), np.abs(high)), 1.0)
    return np.minimum(largest, MAX_FLOAT).astype(np.float32).reshape(-1)


# parts of a vector ----------------------------------------------------------------------------------------------------
def _writer(space: Space, place: slice) -> Write:
    """Return a function that writes a value of the space, which is no Box, into this range of a vector of zeros."""
    if isinstance(space, spaces.Discrete):
        return _discrete_writer(space, place.start)
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete_writer(space, place.start)
    return _flattened_writer(space, place)


def _discrete_writer(space: spaces.Discrete, begin: int) -> Write:
    start, count = int(space.start), int(space.n)

    def write(value: Any, vector: np.ndarray) -> None:
        index = operator.index(value) - start
        if not 0 <= index < count:
            raise ValueError(value)
        vector[begin + index] = 1

    return write


def _multi_discrete_writer(space: spaces.MultiDiscrete, begin: int) -> Write:
    counts, start = space.nvec.reshape(-1), space.start.reshape(-1)
    begins, shape = begin + np.cumsum(counts) - counts, space.shape

    def write(value: Any, vector: np.ndarray) -> None:
        array = np.asarray(value)
        if array.shape != shape or array.dtype.kind not in "iu":
            raise ValueError(value)
        index = array.reshape(-1) - start
        if (index < 0).any() or (index >= counts).any():
            raise ValueError(value)
        vector[begins + index] = 1

    return write


def _flattened_writer(space: Space, place: slice) -> Write:
    def write(value: Any, vector: np.ndarray) -> None:
        if isinstance(space, spaces.MultiBinary) and not space.contains(value):
            raise ValueError(value)
        try:
            array = np.asarray(spaces.flatten(space, value))
        except Exception as error:  # flatten can raise anything for a value that is not of the space
            raise ValueError(value) from error
        if array.shape != (place.stop - place.start,):
            raise ValueError(value)
        vector[place] = array

    return write


# actions --------------------------------------------------------------------------------------------------------------
class ActionConverter:
    """Convert actions of `spec`, which describes the gymnasium space.

    Raises:
        ValueError: No policy can act in the space; the message names the part that is to blame.
    """

    def __init__(self, space: Space):
        self._space, self.spec = space, _action_spec(space)

    def __call__(self, action: np.ndarray, num_envs: int) -> Any:
        """Return actions [E, ...] as gymnasium's vector environments take them.

        Raises:
            ValueError: An action is invalid; the message names its environment and value.
        """
        choices, numbers = np.zeros((num_envs, 0), np.int64), np.zeros((num_envs, 0), np.float32)
        if isinstance(self.spec, Mixed):
            choices, numbers = checked_mixed(action, num_envs, self.spec)
        elif isinstance(self.spec, Continuous):
            numbers = checked_continuous(action, num_envs, self.spec)
            if isinstance(self._space, spaces.Box):
                return _within(self._space, numbers)
        else:
            choices = checked_discrete(action, num_envs, self.spec)
        return _of_space(self._space, iter(choices.reshape(num_envs, -1).T), iter(numbers.T))


def _within(space: spaces.Box, numbers: np.ndarray) -> np.ndarray:
    """Return numbers [E, ...] in the dtype and bounds of a Box; float32 bounds may be rounded to values outside."""
    return np.clip(numbers.astype(space.dtype), space.low, space.high)


def _of_space(space: Space, choices: Iterator[np.ndarray], numbers: Iterator[np.ndarray]) -> Any:
    """Take the choices and numbers of a space, each [E], from iterators, and return its actions of E environments."""
    if isinstance(space, spaces.Dict):
        return {name: _of_space(part, choices, numbers) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_of_space(part, choices, numbers) for part in space.spaces)
    if isinstance(space, spaces.Box):
        columns = np.stack([next(numbers) for _ in range(space.low.size)], 1)  # [E, numbers]
        return _within(space, columns.reshape(-1, *space.shape))
    if isinstance(space, spaces.Discrete):
        return (next(choices) + space.start).astype(space.dtype)
    columns = np.stack([next(choices) for _ in _choices(space)], 1)  # [E, choices]
    start = space.start if isinstance(space, spaces.MultiDiscrete) else 0
    return (columns.reshape(-1, *space.shape) + start).astype(space.dtype)  # type: ignore[misc]


def _parts(space: Space) -> Iterator[Space]:
    """Yield the spaces of nested Dicts and Tuples, and empty ones, in the order of gymnasium's `flatten`."""
    if isinstance(space, spaces.Dict | spaces.Tuple) and len(space.spaces):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            yield from _parts(part)
    else:
        yield space


def _choices(space: Space) -> list[int]:
    """Return the sizes of the choices of a space without parts. Raises ValueError for a space of anything else."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(size) for size in space.nvec.reshape(-1)]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    if isinstance(space, spaces.Dict | spaces.Tuple):  # It is empty.
        return []
    raise ValueError(str(space))


def _action_spec(space: Space) -> ActionSpec:
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    parts = list(_parts(space))
    boxes = [part for part in parts if isinstance(part, spaces.Box) and np.dtype(part.dtype).kind == "f"]
    try:
        nvec = [size for part in parts if part not in boxes for size in _choices(part)]
    except ValueError as error:
        nested = f", and {error} is neither" if isinstance(space, spaces.Dict | spaces.Tuple) else ""
        raise ValueError(
            f"actions of {space} are neither a Box of floats, Discrete, MultiDiscrete, MultiBinary nor nested Dicts "
            f"and Tuples of these{nested}"
        ) from None
    if not parts or not all(map(spaces.flatdim, parts)):
        raise ValueError(f"actions of {space} have no choices and no numbers, or a part of them has none")
    if not boxes:
        return MultiDiscrete(tuple(nvec))
    if boxes == [space]:
        return _continuous(boxes[0])
    bounds = [_continuous(box) for box in boxes]
    low, high = (np.concatenate([each.reshape(-1) for each in sides]) for sides in zip(*bounds))
    return Mixed(tuple(nvec), low, high) if nvec else Continuous(low, high)


def _continuous(space: spaces.Box) -> Continuous:
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        bounded = np.isfinite(high - low).all()
    if not bounded:
        raise ValueError(
            f"actions of {space} have no bounds whose distance float32 can hold, and a policy's actions are scaled to "
            "them; give the environment bounds where it is made, with gymnasium.wrappers.TransformAction(env, "
            f"lambda action: action, gymnasium.spaces.Box(-1.0, 1.0, {space.shape}, env.action_space.dtype))"
        )
    return Continuous(low, high)


# masks of legal actions -----------------------------------------------------------------------------------------------
class MaskReader:
    """Read masks from where `env.action_mask` says.

    Args:
        where: "info" for the entry action_mask of infos, else the path of a part of observations.
        action: The actions that a mask is of.
        space: The observations' space.

    Raises:
        ValueError: Actions have no choices, or observations have no such part.
    """

    def __init__(self, where: str, action: ActionSpec, space: Space):
        if isinstance(action, Continuous):
            raise ValueError(f"env.action_mask={where} needs choices, and the environment's actions are continuous")
        self.size, self._path = sum(action.choice_sizes), None if where == "info" else where.split(".")
        if self._path:
            part: Any = space
            for name in self._path:
                if not (isinstance(part, spaces.Dict) and name in part.spaces):
                    raise ValueError(f"env.action_mask={where} is neither info nor a part of Dict observations {space}")
                part = part[name]

    def __call__(self, observation: Any, info: Any) -> np.ndarray:
        """Return the legal actions [A] bool. Raises InvalidPartError for anything else than zeros and ones."""
        value, path = (info, ["action_mask"]) if self._path is None else (observation, self._path)
        try:
            for name in path:
                value = value[name]
            parts = value if isinstance(value, tuple | list) else (value,)  # one mask, or one of each choice
            mask = np.concatenate([np.ravel(part) for part in parts])
        except (KeyError, TypeError, IndexError, ValueError):
            mask = np.zeros(0)
        if mask.shape != (self.size,) or mask.dtype.kind not in "biu" or not ((mask == 0) | (mask == 1)).all():
            raise InvalidPartError("action_mask", value, f"{self.size} zeros and ones")
        return mask.astype(bool)
