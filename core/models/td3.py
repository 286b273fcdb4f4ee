"""Networks of TD3: a policy and two critics of one value."""

from core.models.policy_critic import CNNNetwork, ControlMLPParams, ControlParams, MLPNetwork


class TD3MLP(MLPNetwork):
    Params, head = ControlMLPParams, "policy-twin-value"


class TD3CNN(CNNNetwork):
    Params, head = ControlParams, "policy-twin-value"
