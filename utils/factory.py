"""Names that a row of CONFIGS can use, and the class that each name stands for. Classes are imported on use.

A new environment, memory, model, agent or engine is one file and one line here. In place of a name a row may say
"package.module:Class", which is a class of your own from a package on the Python path.
"""

import difflib
import importlib
from collections import UserDict
from collections.abc import Iterable
from typing import Any, ClassVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass

from core.common.foreign_code import foreign_code
from utils.errors import describe_exception


class Factory(UserDict[str, Any]):
    """A mapping from names to what stands at "module:attribute".

    Raises:
        UnknownNameError: a name that is neither known nor of that form, or a class that is no subclass of `contract` or
            lacks parts of it.
    """

    def __init__(self, kind: str, targets: dict[str, str], contract: str | None = None):
        super().__init__(targets)
        self.kind, self._contract = kind, contract

    def __getitem__(self, name: str) -> Any:
        module_name, colon, attribute = self.data.get(name, name).partition(":")
        if not (colon and module_name and attribute):
            known = f"there are {', '.join(self)}, and classes of your own as package.module:Class"
            raise UnknownNameError(f"unknown {self.kind} {name!r}{suggestion(name, self)}; {known}")
        try:
            with foreign_code(f"module {module_name}", may_lack_packages=True):
                module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name + ".").startswith(error.name + "."):
                raise UnknownNameError(f"unknown {self.kind} {name!r}: there is no module {error.name}") from None
            raise
        if not hasattr(module, attribute):
            raise UnknownNameError(f"unknown {self.kind} {name!r}: {module_name} has no {attribute}")
        return self._checked(name, getattr(module, attribute))

    def _checked(self, name: str, selected: Any) -> Any:
        """Return the class if it, and its Params, are subclasses of what the contract demands."""
        if self._contract is None:
            return selected
        module_name, _, attribute = self._contract.partition(":")
        contract = getattr(importlib.import_module(module_name), attribute)
        if not (isinstance(selected, type) and issubclass(selected, contract)):
            wrong = f"{self.kind}={name} is of the wrong kind"
            raise UnknownNameError(f"{wrong}: it is no subclass of {module_name}.{attribute}")
        declared = [name for name, kind in contract.__annotations__.items() if get_origin(kind) is ClassVar]
        abstract = sorted(getattr(selected, "__abstractmethods__", ()))
        if missing := [name for name in declared if not hasattr(selected, name)] + abstract:
            raise UnknownNameError(f"{self.kind}={name} lacks {', '.join(missing)} of {module_name}.{attribute}")
        for attribute in [] if name in self.data else declared:  # of a class of the user's own
            (kind,), value = get_args(contract.__annotations__[attribute]), getattr(selected, attribute)
            try:
                TypeAdapter(kind, config={"arbitrary_types_allowed": True}).validate_python(value)
            except ValidationError:
                expected = str(kind).replace("typing.", "")
                raise UnknownNameError(f"{self.kind}={name}: {attribute}={value!r} is no {expected}") from None
        base, params = getattr(contract, "Params", None), getattr(selected, "Params", None)
        if base is not None and not (
            isinstance(params, type) and issubclass(params, base) and is_pydantic_dataclass(params)
        ):
            raise UnknownNameError(
                f"{self.kind}={name}: its Params must be a @frozen_dataclass and a subclass of "
                f"{module_name}.{base.__name__}"
            )
        return selected


class UnknownNameError(KeyError):
    """A name that stands for nothing, or for something of another kind. The message lists the known names."""

    def __str__(self) -> str:
        return str(self.args[0])


def why_not(setting: str, error: Exception) -> str:
    """Return why the class that an option names, as "agent_type=dqn", cannot be used: `Factory` raised this error."""
    if isinstance(error, UnknownNameError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{setting}: {error}"
    return f"{setting} cannot be loaded: {describe_exception(error)}"


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ", did you mean ...?" with the known words that are spelt alike in any case, or an empty string."""
    lower_case = {each.lower(): each for each in known}
    return did_you_mean(lower_case[each] for each in difflib.get_close_matches(word.lower(), lower_case, n=3))


def did_you_mean(candidates: Iterable[str], prefix: str = "") -> str:
    """Return ", did you mean ...?" with these words, or an empty string if there are none."""
    listed = " or ".join(f"{prefix}{candidate}" for candidate in candidates)
    return f", did you mean {listed}?" if listed else ""


EnvsDict = Factory(
    "env_type",
    {
        "atari": "core.envs.atari:AtariEnv",
        "gym": "core.envs.gym:GymEnv",
        "minatar": "core.envs.minatar:MinAtarEnv",
        "catch": "core.envs.catch:CatchEnv",
        "recall": "core.envs.recall:RecallEnv",
        "tictactoe": "core.envs.tictactoe:TicTacToeEnv",
    },
    "core.env:Env",
)

MemoriesDict = Factory(
    "memory_type",
    {
        "shared": "core.memories.uniform:UniformMemory",
        "prioritized": "core.memories.prioritized:PrioritizedMemory",
        "rollouts": "core.memories.unrolls.rollouts:RolloutMemory",
        "queue": "core.memories.unrolls.queue:QueueMemory",
        "mixed": "core.memories.unrolls.mixed:MixedMemory",
        "circular": "core.memories.unrolls.circular:CircularMemory",
    },
    "core.memory:Memory",
)

ModelsDict = Factory(
    "model_type",
    {
        "dqn-cnn": "core.models.dqn:DQNCNN",
        "dqn-resnet": "core.models.dqn:DQNResNet",
        "dqn-small": "core.models.dqn:DQNSmall",
        "dqn-mlp": "core.models.dqn:DQNMLP",
        "dqn-minatar": "core.models.dqn:DQNMinAtar",
        "rainbow-cnn": "core.models.dqn:RainbowCNN",
        "rainbow-resnet": "core.models.dqn:RainbowResNet",
        "rainbow-small": "core.models.dqn:RainbowSmall",
        "rainbow-minatar": "core.models.dqn:RainbowMinAtar",
        "rainbow-mlp": "core.models.dqn:RainbowMLP",
        "iqn-cnn": "core.models.iqn:IQNCNN",
        "iqn-resnet": "core.models.iqn:IQNResNet",
        "iqn-small": "core.models.iqn:IQNSmall",
        "iqn-minatar": "core.models.iqn:IQNMinAtar",
        "iqn-mlp": "core.models.iqn:IQNMLP",
        "r2d2-cnn": "core.models.r2d2:R2D2CNN",
        "r2d2-resnet": "core.models.r2d2:R2D2ResNet",
        "r2d2-small": "core.models.r2d2:R2D2Small",
        "r2d2-minatar": "core.models.r2d2:R2D2MinAtar",
        "r2d2-mlp": "core.models.r2d2:R2D2MLP",
        "impala-cnn": "core.models.actor_critic:ImpalaCNN",
        "impala-resnet": "core.models.actor_critic:ImpalaResNet",
        "nature-ac": "core.models.actor_critic:NatureAC",
        "feature-ac": "core.models.actor_critic:FeatureAC",
        "small-ac": "core.models.actor_critic:SmallAC",
        "minatar-ac": "core.models.actor_critic:MinAtarAC",
        "mlp-ac": "core.models.actor_critic:MLPAC",
        "ddpg-mlp": "core.models.policy_critic:DDPGMLP",
        "ddpg-cnn": "core.models.policy_critic:DDPGCNN",
        "d4pg-mlp": "core.models.policy_critic:D4PGMLP",
        "d4pg-cnn": "core.models.policy_critic:D4PGCNN",
        "td3-mlp": "core.models.policy_critic:TD3MLP",
        "td3-cnn": "core.models.policy_critic:TD3CNN",
        "sac-mlp": "core.models.policy_critic:SACMLP",
        "sac-cnn": "core.models.policy_critic:SACCNN",
    },
    "core.model:Model",
)

AgentsDict = Factory(
    "agent_type",
    {
        "dqn": "core.agents.dqn:DQN",
        "rainbow": "core.agents.rainbow:Rainbow",
        "iqn": "core.agents.iqn:IQN",
        "r2d2": "core.agents.r2d2:R2D2",
        "pqn": "core.agents.pqn:PQN",
        "impala": "core.agents.impala:Impala",
        "impact": "core.agents.impact:Impact",
        "ppo": "core.agents.ppo:PPO",
        "ddpg": "core.agents.ddpg:DDPG",
        "d4pg": "core.agents.d4pg:D4PG",
        "td3": "core.agents.td3:TD3",
        "sac": "core.agents.sac:SAC",
    },
    "core.agent:Agent",
)

ProcessesDict = Factory(
    "process",
    {
        "logger": "core.single_processes.logger:logger",
        "actor": "core.single_processes.actor:actor",
        "learner": "core.single_processes.learner:learner",
        "evaluator": "core.single_processes.evaluator:evaluator",
        "tester": "core.single_processes.tester:tester",
    },
)

EnginesDict = Factory(
    "engine",
    {
        "local": "core.engines.local:LocalEngine",
        "inline": "core.engines.inline:InlineEngine",
        "ray": "core.engines.ray.engine:RayEngine",
    },
    "core.agent:Engine",
)
