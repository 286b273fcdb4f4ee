"""Learning-rate schedules: pure functions of the number of updates."""


def constant(update: int, start: float, end: float, updates: int, decay: float) -> float:
    return start


def polynomial(update: int, start: float, end: float, updates: int, decay: float) -> float:
    """From start to end over `updates`, as (1 - t) ^ decay; then constant."""
    return end + (start - end) * (1 - min(update / updates, 1.0)) ** decay


def linear(update: int, start: float, end: float, updates: int, decay: float) -> float:
    return polynomial(update, start, end, updates, 1.0)


def step(update: int, start: float, end: float, updates: int, decay: float) -> float:
    """Multiplied by decay every `updates`, never below end."""
    return max(start * decay ** (update // updates), end)


SCHEDULES = {"constant": constant, "linear": linear, "polynomial": polynomial, "step": step}
