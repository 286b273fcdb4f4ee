"""Networks of DDPG: a policy, and a critic of one value."""

from core.models.policy_critic import CNNNetwork, ControlMLPParams, ControlParams, MLPNetwork


class DDPGMLP(MLPNetwork):
    Params, head = ControlMLPParams, "policy-value"


class DDPGCNN(CNNNetwork):
    Params, head = ControlParams, "policy-value"
