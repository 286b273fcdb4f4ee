"""Declare the ranges of tuned options for agents and rows, and parse ranges of the command line.

low..high is a linear range, low..high:log a logarithmic one, and a,b,c a choice. Numbers have the type of the option.
"""

from collections import Counter
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from utils.config.rows import changed, closest, declared, from_words, kinds, split_values
from utils.errors import ConfigurationError
from utils.factory import did_you_mean
from utils.options import Options
from utils.plot.curves import STOPS
from utils.sweep.subprocess_run import RESERVED

VALUES = {
    "agent.learning_rate": "1e-5..1e-2:log",
    "agent.batch_size": "16,32,64,128",
    "agent.gamma": "0.95,0.98,0.99,0.995,0.997",
    "agent.n_step": "1..10",
    "agent.target_update_period": "100,300,1000,3000,10000",
    "rate_limiter.samples_per_insert": "1..16:log",
}
ACTOR_CRITIC = {
    "agent.learning_rate": "1e-4..3e-3:log",
    "agent.batch_size": "4,8,16,32",
    "agent.gamma": "0.95,0.98,0.99,0.995",
    "agent.unroll_length": "5,10,20,40",
    "agent.entropy_cost": "1e-4..1e-1:log",
    "agent.baseline_cost": "0.25..1",
    "agent.clip_norm": "1..100:log",
}
CONTROL = {
    "agent.learning_rate": "1e-4..3e-3:log",
    "agent.critic_learning_rate": "1e-4..3e-3:log",
    "agent.batch_size": "64,128,256,512",
    "agent.gamma": "0.95,0.98,0.99,0.995",
    "agent.target_update_tau": "1e-3..2e-2:log",
    "rate_limiter.samples_per_insert": "64..512:log",
}
NOISY = {**CONTROL, "agent.noise_scale": "0.05..0.5"}
BY_PRIORITY = {"memory.alpha": "0.2..0.9"}
RANGES: dict[str, dict[str, str]] = {  # By agent_type or row; the ranges of a row replace those of its agent.
    "dqn": {**VALUES, **BY_PRIORITY},
    "rainbow": {**VALUES, **BY_PRIORITY},
    "iqn": {**VALUES, **BY_PRIORITY},
    # A batch's steps, and so the rate limiter's error buffer, are those of whole sequences.
    "r2d2": {
        **VALUES,
        **BY_PRIORITY,
        "agent.batch_size": "8,16,32,64",
        "rate_limiter.samples_per_insert": "3..16:log",
        "agent.burn_in": "0,4,10,20",
    },
    "impala": ACTOR_CRITIC,
    "impact": {**ACTOR_CRITIC, "agent.clip_epsilon": "0.1..0.5", "agent.target_update_period": "1,2,4,8,16,32"},
    "ppo": {
        "agent.learning_rate": "1e-4..3e-3:log",
        "agent.gamma": "0.95,0.98,0.99,0.995",
        "agent.unroll_length": "32,64,128,256",
        "agent.epochs": "2..10",
        "agent.minibatches": "2,4,8,16",
        "agent.gae_lambda": "0.9..1",
        "agent.clip_epsilon": "0.1..0.3",
        "agent.entropy_cost": "1e-4..1e-1:log",
    },
    "pqn": {
        "agent.learning_rate": "1e-4..1e-3:log",
        "agent.gamma": "0.95,0.98,0.99,0.995",
        "agent.unroll_length": "16,32,64",
        "agent.epochs": "1..4",
        "agent.minibatches": "4,8,16,32",
        "agent.trace_lambda": "0.5..0.95",
    },
    "ddpg": NOISY,
    "d4pg": {**NOISY, **BY_PRIORITY, "agent.n_step": "1..10"},
    "td3": {**NOISY, "agent.policy_update_period": "1,2,4"},
    "sac": {**CONTROL, "agent.temperature": "1e-2..1:log"},
    "dqn-cartpole": {
        "agent.learning_rate": "1e-4..3e-3:log",
        "agent.target_update_period": "50,100,200,500,1000,2000",
        "agent.n_step": "1..5",
        "agent.gamma": "0.98,0.99,0.995",
    },
}


class Range(NamedTuple):
    """The values that an option may take in a study."""

    name: str
    text: str  # As written.
    values: tuple[Any, ...]  # (low, high), both included, or the choices.
    kind: str  # "range", "log" or "choice".


def ranges(options: Options, wanted: Iterable[str], given: Container[str] = ()) -> list[Range]:
    """Return the ranges of a row.

    Args:
        options: Options of the row.
        wanted: Texts name=range, or names of options whose ranges are declared; if empty, all declared but `given`.
        given: Names of options that have one value in all trials.

    Raises:
        ConfigurationError: an option does not exist or cannot be tuned, a range is wrong, or none is declared.
    """
    known, of_agent = declared(options), RANGES.get(options.agent_type, {})
    ranges_of_row = {name: text for name, text in RANGES.get(options.config, of_agent).items() if name in known}
    texts = [(name.replace("-", "_"), text) for name, _, text in (each.partition("=") for each in wanted)]
    texts = texts or [(name, text) for name, text in ranges_of_row.items() if name not in given]
    names, parsed = Counter(name for name, _ in texts), []
    errors = [f"{name} has {count} ranges: give one" for name, count in names.items() if count > 1]
    for name, text in texts:
        if name not in known:
            errors.append(f"there is no setting {name} to tune{did_you_mean(closest(name, known))}")
        elif name in (*RESERVED, *STOPS) or name.startswith("evaluator."):
            errors.append(f"{name} cannot be tuned: it names a run, or says how a run starts, ends or is evaluated")
        elif name in given:
            errors.append(f"{name} has a range and a value after --: give one of them")
        elif not (text or name in ranges_of_row):
            errors.append(f"{name} has no declared range: write {name}=low..high, {name}=low..high:log or {name}=a,b,c")
        else:
            try:
                parsed.append(_range(options, name, text or ranges_of_row[name]))
            except ValueError as error:
                errors.append(f"{name}={text or ranges_of_row[name]}: {error}")
    if errors or not parsed:
        raise ConfigurationError(
            errors or [f"no ranges are declared for {options.config} or agent_type={options.agent_type}: give --ranges"]
        )
    return parsed


def _range(options: Options, name: str, text: str) -> Range:
    """Parse one range.

    Raises:
        ValueError: the text is no range, or exceeds the bounds of the option.
    """
    annotation = declared(options)[name].annotation
    # Colons and dots within JSON, and in package.module:Class, mark no range.
    is_range = ".." in text and "{" not in text and "[" not in text
    body, colon, log = text.partition(":") if is_range else (text, "", "")
    low, dots, high = body.partition("..") if is_range else (text, "", "")
    if colon and log != "log":
        raise ValueError("only :log may follow a range")
    values = tuple(from_words([part], annotation) for part in ((low, high) if dots else split_values(body)))
    if dots and not (all(type(value) in (int, float) for value in values) and {int, float} & kinds(annotation)):
        raise ValueError("a range needs two numbers")
    if dots and not (values[0] < values[1] and (values[0] > 0 or not log)):
        raise ValueError("low must be below high, and above 0 for :log")
    if refused := [sentence for value in values for sentence in changed(options, {name: value})[1].values()]:
        raise ValueError(refused[0])
    return Range(name, text, values, log or ("range" if dots else "choice"))
