"""Distributional reinforcement learning as the papers write it, with loops in float64."""

import numpy as np


def algorithm_1(probabilities, returns, factors, v_min, v_max):
    """Return algorithm 1 of 1707.06887 atom by atom; an atom on a grid point leaves all its mass there."""
    batch, num = probabilities.shape
    step, target = (v_max - v_min) / (num - 1), np.zeros((batch, num))
    for sample in range(batch):
        for atom in range(num):
            moved = min(max(returns[sample] + factors[sample] * (v_min + atom * step), v_min), v_max)
            place = (moved - v_min) / step
            low, high = int(np.floor(place)), int(np.ceil(place))
            if low == high:
                target[sample, low] += probabilities[sample, atom]
            else:
                target[sample, low] += probabilities[sample, atom] * (high - place)
                target[sample, high] += probabilities[sample, atom] * (place - low)
    return target


def quantile_sum(quantiles, target, kappa):
    """Return equations 9 and 10 and algorithm 1 of 1710.10044, term by term."""
    losses = np.zeros(len(quantiles))
    for sample, (predicted, atoms) in enumerate(zip(quantiles, target)):
        for i, quantile in enumerate(predicted):
            for atom in atoms:
                error = atom - quantile
                huber = error**2 / 2 if abs(error) <= kappa else kappa * (abs(error) - kappa / 2)
                losses[sample] += abs((2 * i + 1) / (2 * len(predicted)) - (error < 0)) * huber / len(atoms)
    return losses


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
