"""Options by their dotted names ("agent.learning_rate"): listed, changed, read from words and from a row of CONFIGS."""

import contextlib
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from core.common.settings import dotted, sentences
from utils.errors import ConfigurationError
from utils.factory import AgentsDict, EnvsDict, Factory, MemoriesDict, ModelsDict, did_you_mean, suggestion, why_not
from utils.options import CONFIGS, RUN, Options

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SECTIONS: dict[str, tuple[str, Factory]] = {  # section -> the option that names its class, and the classes
    "agent": ("agent_type", AgentsDict),
    "env": ("env_type", EnvsDict),
    "memory": ("memory_type", MemoriesDict),
    "model": ("model_type", ModelsDict),
}
CHOICES = (*(type_field for type_field, _ in SECTIONS.values()), "game")
# Lines of RUN that a row may set.
OPEN_LINES = ("num_envs_per_actor", "steps", "updates", "seconds", "target_score")
SWITCH = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
# Options of this project, and the last parts of the names that stable-baselines3 and CleanRL have for them.
ELSEWHERE = {
    "device": "cuda",
    "env.life_loss": "terminal_on_life_loss",
    "env.reward_clipping": "clip_reward",
    "evaluator.episodes": "n_eval_episodes",
    "evaluator.record_every": "capture_video",
    "evaluator.steps": "eval_freq",
    "game": "env_id",
    "learner.checkpoint_steps": "save_freq",
    "logger.wandb": "track wandb_project_name",
    "machine": "exp_name run_name",
    "memory.capacity": "buffer_size",
    "model.hidden": "net_arch",
    "num_envs_per_actor": "n_envs num_envs",
    "rate_limiter.min_replay_size": "learning_starts",
    "rate_limiter.samples_per_insert": "gradient_steps train_freq train_frequency",
    "steps": "total_timesteps",
    "agent.baseline_cost": "vf_coef",
    "agent.clip_epsilon": "clip_coef clip_range",
    "agent.clip_norm": "max_grad_norm",
    "agent.critic_learning_rate": "q_lr",
    "agent.entropy_cost": "ent_coef",
    "agent.epochs": "n_epochs update_epochs",
    "agent.exploration_epsilon_end": "end_e exploration_final_eps",
    "agent.exploration_epsilon_start": "exploration_initial_eps start_e",
    "agent.exploration_epsilon_steps": "exploration_fraction",
    "agent.learn_temperature": "autotune",
    "agent.learning_rate": "policy_lr",
    "agent.lr_schedule": "anneal_lr",
    "agent.minibatches": "num_minibatches",
    "agent.n_step": "n_steps",
    "agent.noise": "action_noise",
    "agent.noise_scale": "exploration_noise",
    "agent.normalize_advantages": "norm_adv",
    "agent.policy_update_period": "policy_delay policy_frequency",
    "agent.random_exploration_steps": "learning_starts",
    "agent.smoothing_clip": "noise_clip target_noise_clip",
    "agent.smoothing_scale": "policy_noise target_policy_noise",
    "agent.target_update_period": "target_network_frequency target_update_interval",
    "agent.target_update_tau": "tau",
    "agent.temperature": "alpha ent_coef",
    "agent.unroll_length": "n_steps num_steps",
    "agent.value_clipping": "clip_range_vf clip_vloss",
}

P = TypeVar("P", bound="DataclassInstance")


# rows -----------------------------------------------------------------------------------------------------------------
def find_row(config: str) -> dict[str, Any]:
    """Return the row of this name or number.

    Raises:
        ConfigurationError: no such row, with those that are named alike or contain this name, else with all in one
            line; or a row without a name of its own.
    """
    names: list[Any] = [row.get("name") if isinstance(row, dict) else None for row in CONFIGS]
    faults = []
    for number, name in enumerate(names):
        if not isinstance(name, str):
            faults.append(f"CONFIGS row {number} must be a dict with a name")
        elif name in names[:number]:
            faults.append(f"CONFIGS row {number} must not be named {name!r} again")
    if faults:
        raise ConfigurationError(faults)
    if config in names:
        return CONFIGS[names.index(config)]
    if config.isdecimal() and int(config) < len(CONFIGS):
        return CONFIGS[int(config)]
    containing = [name for name in names if config.lower() in name] or names
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(names) if name in containing)
    hint = suggestion(config, names) or f"; there are {listed}"
    raise ConfigurationError(f"config={config!r} is no row of CONFIGS{hint}")


def from_row(row: Mapping[str, Any], choices: Mapping[str, str] | None = None) -> tuple[Options, list[str]]:
    """Return what utils/options.py says for this row, and its problems.

    The `choices` replace those of the row. Its options for a replaced class are left out if the other class does not
    have them, or refuses their values.
    """
    where = f"CONFIGS row {row['name']!r}"
    problems = [f"{where} lacks {name}" for name in CHOICES if name not in row]
    no_names = {name: row[name] for name in CHOICES if not isinstance(row.get(name, ""), str)}
    problems += [f"{where}: {name}={value!r} must be a valid string" for name, value in no_names.items()]
    chosen = {**{name: str(row.get(name, "")) for name in CHOICES}, **(choices or {})}
    options, _ = changed(Options(), chosen)
    missing = missing_classes(options)
    found = {section: named for section, named in SECTIONS.items() if section not in missing}
    params = {section: factory[chosen[type_field]].Params() for section, (type_field, factory) in found.items()}
    options, _ = changed(options, params)
    options, wrong_lines = with_lines(options)
    problems += [*missing.values(), *wrong_lines]

    known, settings = declared(options), {"config": row["name"]}  # RUN may name another row
    replaced = {section for section, (type_field, _) in SECTIONS.items() if chosen[type_field] != row.get(type_field)}
    for name, value in row.items():
        if name in (*CHOICES, "name"):
            continue
        if name not in known:
            if str(name).partition(".")[0] not in replaced | missing.keys():
                problems.append(f"{where}: {name} is no option{did_you_mean(closest(str(name), known))}")
        elif "." not in name and name not in OPEN_LINES:
            problems.append(f"{where}: {name} is not a row's to set: edit its line in RUN of utils/options.py")
        elif RUN.get(name) is None:
            settings[name] = value
    options, refused = changed(options, settings)
    own = [sentence for name, sentence in refused.items() if name.partition(".")[0] not in replaced]
    return options, problems + [f"{where}: {sentence}" for sentence in own]


def class_defaults(options: Options) -> dict[str, Any]:
    """Return what options would be by the defaults beside their classes: dotted name -> value."""
    return flatten(from_row({"name": options.config, **{name: getattr(options, name) for name in CHOICES}})[0])


def settings_on_file(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what utils/options.py says for this row: dotted name -> value, as JSON carries it."""
    return dotted(from_row(row)[0].to_dict())


def with_lines(options: Options) -> tuple[Options, list[str]]:
    """Return the options with the lines of RUN that are not None, and a sentence for each line that is wrong."""
    known = declared(options)
    lines = {name: value for name, value in RUN.items() if value is not None}
    lines |= {"config": str(lines["config"])} if "config" in lines else {}  # a row's number as well
    unknown = [f"{name} is no option" + suggestion(name, known) for name in lines if name not in known]
    options, refused = changed(options, {name: value for name, value in lines.items() if name in known})
    return options, [f"RUN of utils/options.py: {sentence}" for sentence in (*unknown, *refused.values())]


def missing_classes(options: Options) -> dict[str, str]:
    """Return the sections whose class cannot be loaded: section -> why not."""
    missing: dict[str, str] = {}
    for section, (type_field, factory) in SECTIONS.items():
        name = getattr(options, type_field)
        try:
            factory[name].Params()
        except ValidationError as error:  # a default that its own bounds refuse
            missing[section] = f"{type_field}={name}: {', '.join(sentences(error, f'{section}.').values())}"
        except Exception as error:  # a module of the user's own can fail in any way
            missing[section] = why_not(f"{type_field}={name}", error)
    return missing


# dotted names ---------------------------------------------------------------------------------------------------------
def flatten(params: Any) -> dict[str, Any]:
    """Return the values of a dataclass and of its sections: dotted name -> value."""
    return dotted(dataclasses.asdict(params))


def declared(params: Any, prefix: str = "") -> dict[str, FieldInfo]:
    """Return the declarations of a pydantic dataclass and of its sections: dotted name -> type, default, bounds."""
    found: dict[str, FieldInfo] = {}
    for name, field in type(params).__pydantic_fields__.items():
        value = getattr(params, name)
        found |= declared(value, f"{prefix}{name}.") if dataclasses.is_dataclass(value) else {prefix + name: field}
    return found


def changed(params: P, settings: Mapping[str, Any], prefix: str = "") -> tuple[P, dict[str, str]]:
    """Return a copy with these values, and a sentence for each value that pydantic refuses; refused ones are left out.

    Every dotted name must exist. In sentences the prefix stands before the names.
    """
    own: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, dot, rest = name.partition(".")
        if dot:
            sections.setdefault(section, {})[rest] = value
        else:
            own[name] = value
    try:
        copy, refused = dataclasses.replace(params, **own), dict[str, str]()
    except ValidationError as error:
        refused = sentences(error, prefix)
        right = {name: value for name, value in own.items() if prefix + name not in refused}
        copy = dataclasses.replace(params, **right)
    for section, values in sections.items():
        part, more = changed(getattr(copy, section), values, f"{prefix}{section}.")
        copy, refused = dataclasses.replace(copy, **{section: part}), {**refused, **more}
    return copy, refused


def from_words(words: Sequence[str], annotation: Any) -> Any:
    """Return the value that words of the command line mean for an option of this type.

    `1e6` means a whole number too, `none` means None, and a switch without a word means True. A tuple is several words
    or one JSON list. Words that mean no value of the type are returned as text, which pydantic refuses.
    """
    allowed = kinds(annotation)
    if bool in allowed and not words:
        return True
    if tuple in allowed and len(words) == 1 and words[0].startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            return tuple(json.loads(words[0]))
    if tuple in allowed and (len(words) != 1 or int not in allowed):
        return tuple(_number(word, whole=True) for word in words)
    if len(words) != 1:
        return " ".join(words) if str not in allowed else [*words]
    word = words[0]
    if type(None) in allowed and word.lower() == "none":
        return None
    if bool in allowed:
        return SWITCH.get(word.lower(), word)
    return _number(word, whole=int in allowed) if allowed & {int, float} and str not in allowed else word


def kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation allows, without their parameters."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return set(map(type, parts))
    if origin is Annotated:
        return kinds(parts[0])
    if origin in (Union, types.UnionType):
        return set[Any]().union(*map(kinds, parts))
    return {origin or annotation}


def _number(word: str, whole: bool) -> int | float | str:
    try:
        if whole and word.lstrip("+-").replace("_", "").isdecimal():
            return int(word)
        number = float(word)
    except ValueError:
        return word
    return int(number) if whole and number.is_integer() else number


def split_values(text: str, separator: str = ",") -> list[str]:
    """Split at separators that stand outside the brackets, braces and quotes of JSON."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == '"'
        depth += 0 if quoted else (character in "[{") - (character in "]}")
        if character == separator and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known dotted names that a misspelt name may mean, best first.

    They have its last part, or are called so elsewhere, or have the words of which that has the initials (lr), or are
    spelt alike.
    """
    known, last = list(known), name.rpartition(".")[2]
    ends: dict[str, list[str]] = {}
    for candidate in known:
        ends.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    if elsewhere := [option for option, names in ELSEWHERE.items() if option in known and last in names.split()]:
        return [*elsewhere, *ends.get(last, [])]
    initials = {end: "".join(word[:1] for word in end.split("_")) for end in ends if "_" in end}
    by_initials = [candidate for end in initials if initials[end] == last for candidate in ends[end]]
    by_whole = difflib.get_close_matches(name, known, n=2, cutoff=0.75)
    by_end = [candidate for end in difflib.get_close_matches(last, ends, n=2, cutoff=0.75) for candidate in ends[end]]
    by_end.sort(key=lambda candidate: -difflib.SequenceMatcher(None, name, candidate).ratio())
    return list(dict.fromkeys([*ends.get(last, []), *by_initials, *by_whole, *by_end]))[:3]
