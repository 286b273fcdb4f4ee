"""The recurrent core of every model that remembers: an LSTM that forgets at the start of an episode."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.model import DataDependentModule
from core.types import State


class LSTMCore(DataDependentModule):
    """Features [T, B, F] to outputs [T, B, H]; state (h, c), each [B, H]. The weights are those of nn.LSTM(F, H).

    A sequence in which no episode starts after its first row is one fused call, unless it may not look. Else the steps are a loop, with
    the inputs of all of them projected at once. Measured on a CPU, forward and backward, T 20 and 80, B 8 and 32, H 256: the fused call
    takes three quarters of the loop's time; one fused call for each stretch between starts gains nothing, since every call costs some 3 ms.
    The forget gate starts with a bias of 1, as in the code of 1802.01561; all other biases are zero.
    """

    def __init__(self, num_features: int, units: int):
        super().__init__()
        self.lstm = nn.LSTM(num_features, units)
        _, _, input_bias, recurrent_bias = self.lstm.all_weights[0]
        nn.init.zeros_(recurrent_bias)
        nn.init.zeros_(input_bias).data[units:2 * units] = 1.0  # gates: input, forget, cell, output

    def initial_state(self, batch_size: int) -> State:
        weight = self.lstm.all_weights[0][1]  # [4 H, H]
        h = weight.new_zeros(batch_size, self.lstm.hidden_size)
        return h, torch.zeros_like(h)

    def forward(self, features: Tensor, firsts: Tensor, state: State) -> tuple[Tensor, State]:
        """T steps; where firsts [T, B] is true, a stream's state is zero before that row is read. firsts on the CPU: no device waits."""
        fused = self.looks and len(firsts) > 1 and not firsts[1:].any()
        resets = firsts.to(features.device).unsqueeze(-1)  # [T, B, 1]
        if fused:
            h, c = _forget(state, resets[0])
            outputs, (h, c) = self.lstm(features, (h[None], c[None]))
            return outputs, (h[0], c[0])
        steps = []
        for gates, reset in zip(self._project(features), resets):
            state = self._step(gates, _forget(state, reset))
            steps.append(state[0])
        return torch.stack(steps), state

    def step(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        """One step [B, F]; the caller has reset the state where an episode starts."""
        state = self._step(self._project(features), state)
        return state[0], state

    def _project(self, features: Tensor) -> Tensor:
        """What the features [..., F] give to the gates [..., 4 H]."""
        weight, _, input_bias, recurrent_bias = self.lstm.all_weights[0]
        return F.linear(features, weight, input_bias + recurrent_bias)

    def _step(self, gates: Tensor, state: State) -> State:
        h, c = state
        gates = torch.addmm(gates, h, self.lstm.all_weights[0][1].t())
        enter, forget, cell, leave = gates.chunk(4, 1)  # each [B, H]
        c = forget.sigmoid() * c + enter.sigmoid() * cell.tanh()
        return leave.sigmoid() * c.tanh(), c


def _forget(state: State, first: Tensor) -> State:
    """Zeros where first [B, 1] is true."""
    return tuple(part.masked_fill(first, 0.0) for part in state)
