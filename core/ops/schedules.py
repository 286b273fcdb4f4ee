"""Learning-rate schedules, as pure functions of the number of updates."""


def constant(update: int, start: float, end: float, updates: int, decay: float) -> float:
    """Return start."""
    return start


def polynomial(update: int, start: float, end: float, updates: int, decay: float) -> float:
    """Go from start to end over `updates` as (1 - t) ^ decay, then stay at end."""
    return end + (start - end) * float((1 - min(update / updates, 1.0)) ** decay)


def linear(update: int, start: float, end: float, updates: int, decay: float) -> float:
    """Go from start to end linearly over `updates`, then stay at end."""
    return polynomial(update, start, end, updates, 1.0)


def step(update: int, start: float, end: float, updates: int, decay: float) -> float:
    """Multiply start by decay every `updates`, never going below end."""
    return max(start * decay ** (update // updates), end)


SCHEDULES = {"constant": constant, "linear": linear, "polynomial": polynomial, "step": step}
