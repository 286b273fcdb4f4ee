"""What every environment checks at its border, and the seeds of its streams."""


import numpy as np

from core.specs import Continuous, Discrete

RENDER_MODES = (None, "human", "rgb_array")


def check_construction(num_envs: int, num_threads: int, render_mode: str | None) -> None:
    """Raises ValueError with everything that is wrong with these arguments of an Env."""
    found = []
    if num_envs < 1:
        found.append(f"num_envs={num_envs} must be at least 1")
    if num_threads < 1:
        found.append(f"num_threads={num_threads} must be at least 1")
    if render_mode not in RENDER_MODES:
        found.append(f"render_mode={render_mode!r} must be one of {', '.join(map(str, RENDER_MODES))}")
    if render_mode is not None and num_envs != 1:
        found.append(f"render_mode={render_mode!r} draws one stream, num_envs={num_envs}")
    if found:
        raise ValueError("; ".join(found))


def checked_discrete(action: np.ndarray, num_envs: int, space: Discrete) -> np.ndarray:
    """The actions [E] as int64. Raises ValueError naming stream and value."""
    action = np.asarray(action)
    if action.shape != (num_envs,) or action.dtype.kind not in "iu":
        raise ValueError(f"actions are {action.dtype} {list(action.shape)}, expected integers [{num_envs}]")
    outside = (action < 0) | (action >= space.num_actions)
    if outside.any():
        stream = int(outside.argmax())
        raise ValueError(f"action {action[stream]} of stream {stream} is outside 0 .. {space.num_actions - 1}")
    return action.astype(np.int64, copy=False)


def checked_continuous(action: np.ndarray, num_envs: int, space: Continuous) -> np.ndarray:
    """The actions [E, ...] as float32. Raises ValueError naming stream and value; NaN is outside everything."""
    action = np.asarray(action)
    if action.shape != (num_envs, *space.low.shape) or action.dtype.kind not in "fiu":
        raise ValueError(f"actions are {action.dtype} {list(action.shape)}, expected float32 {[num_envs, *space.low.shape]}")
    action = action.astype(np.float32, copy=False)
    inside = (action >= space.low) & (action <= space.high)
    if not inside.all():
        place = tuple(int(index) for index in np.argwhere(~inside)[0])
        low, high = space.low[place[1:]], space.high[place[1:]]
        raise ValueError(f"action {action[place]} of stream {place[0]} (element {list(place[1:])}) is outside {low} .. {high}")
    return action


def stream_seeds(seed: int, num_envs: int) -> np.ndarray:
    """A seed [E] in 0 .. 2**31 - 1 for each stream: distinct, and far from those of neighbouring `seed`s."""
    first = int(np.random.SeedSequence(seed).generate_state(1)[0]) % (2**31 - num_envs)
    return first + np.arange(num_envs)
