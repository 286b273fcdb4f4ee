"""Accumulate the metrics of updates between two reports."""

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from core.agent import LearnerOutput


class Tally:
    """Running sums of what updates report, on their device and always in the same tensors."""

    def __init__(self, device: torch.device):
        self._device = device
        self._sums: dict[tuple[str, ...], Tensor] = {}  # of the updates that reported these and changed something: how many, and sums
        self._skipped = torch.zeros(3, dtype=torch.int64, device=device)  # so far; in a row at the end; and at the most

    def add(self, output: LearnerOutput) -> None:
        names = tuple(output.statistics)
        if names not in self._sums:
            self._sums[names] = torch.zeros(1 + len(names), device=self._device)
        skipped = torch.as_tensor(output.skipped, device=self._device)
        values = [output.statistics[name].to(self._device, torch.float32) for name in names]
        self._sums[names].add_(torch.where(skipped, 0.0, torch.stack([torch.ones((), device=self._device), *values])))
        lost, row, longest = self._skipped
        row = torch.where(skipped, row + 1, 0)
        self._skipped.copy_(torch.stack([lost + skipped, row, torch.maximum(longest, row)]))

    def take(self) -> tuple[dict[str, float], int]:
        """Means since the last call with the number of skipped updates so far, and how many in a row were since the last call."""
        totals: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        for names, sums in self._sums.items():
            count, *values = sums.tolist()
            for name, value in zip(names, values):
                totals[name] += value
                counts[name] += count
            sums.zero_()
        lost, _, longest = self._skipped.tolist()
        self._skipped[2].zero_()
        return {**{name: totals[name] / count for name, count in counts.items() if count}, "skipped_updates": float(lost)}, longest


class Statistics:
    """Running sums of an agent's statistics, left as tensors until they are reported."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._skipped = 0

    def add(self, statistics: Mapping[str, Tensor], skipped: bool) -> None:
        self._skipped += skipped
        if skipped:
            return
        known = [name for name in statistics if name in self._sums]
        if known:
            torch._foreach_add_([self._sums[name] for name in known], [statistics[name] for name in known])
        if len(known) < len(statistics):
            self._sums |= {name: value.to(torch.float32, copy=True) for name, value in statistics.items() if name not in self._sums}
        self._counts.update(statistics.keys())

    def take(self) -> dict[str, float]:
        """Means since the last call over the updates that had each, and the number of skipped updates so far."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, Counter()
        return {**means, "skipped_updates": float(self._skipped)}
