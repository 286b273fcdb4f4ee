"""Networks of D4PG: a policy, and a critic of a return's distribution on evenly spaced atoms."""

from dataclasses import dataclass

from core.common.settings import setting
from core.models.policy_critic import CNNNetwork, ControlMLPParams, ControlParams, MLPNetwork


@dataclass(frozen=True)
class D4PGMLPParams(ControlMLPParams):
    atoms: int = setting(51, low=2, high=10_000)  # Atoms of the distribution (D4PG: 51).


@dataclass(frozen=True)
class D4PGCNNParams(ControlParams):
    atoms: int = setting(51, low=2, high=10_000)  # Atoms of the distribution (D4PG: 51).


class D4PGMLP(MLPNetwork):
    Params, head = D4PGMLPParams, "policy-distribution"


class D4PGCNN(CNNNetwork):
    Params, head = D4PGCNNParams, "policy-distribution"
