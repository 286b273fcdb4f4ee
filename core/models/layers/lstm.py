"""The LSTM of every recurrent model, which is reset at the start of an episode."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.model import keep_float32
from core.types import State


class OneLayerLSTM(nn.LSTM):
    """Declare the parameters that nn.LSTM makes, because its lists of them are made anew at each reading."""

    weight_ih_l0: Tensor  # [4 H, F]
    weight_hh_l0: Tensor  # [4 H, H]
    bias_ih_l0: Tensor  # [4 H]
    bias_hh_l0: Tensor  # [4 H]


class LSTMCore(nn.Module):
    """Features [T, B, F] to outputs [T, B, H], with state (h, c), each [B, H]. The weights are those of nn.LSTM(F, H).

    - A sequence in which no episode starts after its first step is one fused call, if host synchronisation is allowed.
      Other sequences are a loop over steps, with the inputs of all steps projected at once.
    - Measured on a CPU, forward and backward, T 20 and 80, B 8 and 32, H 256: the fused call takes three quarters of
      the loop's time. One fused call for each stretch between starts gains nothing, because every call costs some 3 ms.
    - In a network that computes in bfloat16, the LSTM computes in float32, as its state is.
    - The forget gate starts with a bias of 1, as in the code of 1802.01561; all other biases are zero.
    """

    allow_host_sync = True  # until `disable_host_sync`

    def __init__(self, num_features: int, units: int):
        super().__init__()
        self.lstm = OneLayerLSTM(num_features, units)
        keep_float32(self.lstm)
        nn.init.zeros_(self.lstm.bias_hh_l0)
        nn.init.zeros_(self.lstm.bias_ih_l0).data[units : 2 * units] = 1.0  # gates: input, forget, cell, output

    def initial_state(self, batch_size: int) -> State:
        """Return zeros for h and c."""
        h = self.lstm.weight_hh_l0.new_zeros(batch_size, self.lstm.hidden_size)
        return h, torch.zeros_like(h)

    def forward(self, features: Tensor, firsts: Tensor, state: State) -> tuple[Tensor, State]:
        """Compute T steps. The state is zero before a step where firsts [T, B] is True.

        If `firsts` is on the CPU, reading it does not wait for the device.
        """
        fused = self.allow_host_sync and len(firsts) > 1 and not firsts[1:].any()
        resets = firsts.to(features.device).unsqueeze(-1)  # [T, B, 1]
        if fused:
            h, c = _reset(state, resets[0])
            outputs, (h, c) = self.lstm(features, (h[None], c[None]))
            return outputs, (h[0], c[0])
        steps = []
        for gates, reset in zip(self._project(features), resets):
            state = self._step(gates, _reset(state, reset))
            steps.append(state[0])
        return torch.stack(steps), state

    def step(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        """Compute one step of features [B, F]. The caller has reset the state where an episode starts."""
        state = self._step(self._project(features), state)
        return state[0], state

    def _project(self, features: Tensor) -> Tensor:
        """Project features [..., F] to their share of the gates [..., 4 H]."""
        weight = self.lstm.weight_ih_l0
        return F.linear(features.to(weight.dtype), weight, self.lstm.bias_ih_l0 + self.lstm.bias_hh_l0)

    def _step(self, gates: Tensor, state: State) -> State:
        h, c = state
        gates = torch.addmm(gates, h, self.lstm.weight_hh_l0.t())
        input_gate, forget_gate, cell, output_gate = gates.chunk(4, 1)  # each [B, H]
        c = forget_gate.sigmoid() * c + input_gate.sigmoid() * cell.tanh()
        return output_gate.sigmoid() * c.tanh(), c


def _reset(state: State, first: Tensor) -> State:
    """Set the state to zero where first [B, 1] is True."""
    return tuple(tensor.masked_fill(first, 0.0) for tensor in state)
