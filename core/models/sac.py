"""Networks of SAC: a Gaussian policy and two critics of one value."""

from core.models.policy_critic import CNNNetwork, ControlMLPParams, ControlParams, MLPNetwork


class SACMLP(MLPNetwork):
    Params, head = ControlMLPParams, "gaussian-twin-value"


class SACCNN(CNNNetwork):
    Params, head = ControlParams, "gaussian-twin-value"
