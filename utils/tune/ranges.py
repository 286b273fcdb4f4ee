"""Ranges that settings are tuned over: those declared for an agent or a row, and the way to write one.

low..high is a range, low..high:log one that is looked at by factors, a,b,c a choice. Numbers are of the setting's declared type.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from utils.config.dotted_settings import changed, closest, declared, from_words, kinds, split_values
from utils.errors import ConfigurationError
from utils.options import Options

VALUES = {"agent.lr": "1e-5..1e-2:log", "agent.batch_size": "16,32,64,128", "agent.gamma": "0.95,0.98,0.99,0.995,0.997",
          "agent.nstep": "1..10", "agent.target_update": "100,300,1000,3000,10000", "clock.samples_per_insert": "1..16:log"}
ACTOR_CRITIC = {"agent.lr": "1e-4..3e-3:log", "agent.batch_size": "4,8,16,32", "agent.gamma": "0.95,0.98,0.99,0.995",
                "agent.unroll_length": "5,10,20,40", "agent.entropy_cost": "1e-4..1e-1:log", "agent.baseline_cost": "0.25..1",
                "agent.clip_norm": "1..100:log"}
CONTROL = {"agent.lr": "1e-4..3e-3:log", "agent.critic_lr": "1e-4..3e-3:log", "agent.batch_size": "64,128,256,512",
           "agent.gamma": "0.95,0.98,0.99,0.995", "agent.target_update": "1e-3..2e-2:log", "clock.samples_per_insert": "64..512:log"}
NOISY = {**CONTROL, "agent.noise_scale": "0.05..0.5"}
BY_PRIORITY = {"memory.alpha": "0.2..0.9"}
RANGES: dict[str, dict[str, str]] = {  # of an agent_type, or of a row, whose ranges go before those of its agent
    "dqn": {**VALUES, **BY_PRIORITY}, "rainbow": {**VALUES, **BY_PRIORITY}, "r2d2": {**VALUES, **BY_PRIORITY, "agent.burn_in": "0,4,10,20"},
    "impala": ACTOR_CRITIC, "impact": {**ACTOR_CRITIC, "agent.epsilon": "0.1..0.5", "agent.target_update": "1,2,4,8,16,32"},
    "ddpg": NOISY, "d4pg": {**NOISY, **BY_PRIORITY, "agent.nstep": "1..10"}, "td3": {**NOISY, "agent.policy_period": "1,2,4"},
    "sac": {**CONTROL, "agent.temperature": "1e-2..1:log"},
    "dqn-cartpole": {"agent.lr": "1e-4..3e-3:log", "agent.target_update": "50,100,200,500,1000,2000", "agent.nstep": "1..5",
                     "agent.gamma": "0.98,0.99,0.995"}}


class Range(NamedTuple):
    """low and high with both ends, or choices."""

    name: str
    text: str
    values: tuple[Any, ...]   # (low, high), or the choices
    kind: str                 # range, log or choice


def ranges(options: Options, wanted: Iterable[str]) -> list[Range]:
    """The ranges of a row: `wanted` are name=range, or names of declared ones; without any, all that are declared. Raises Refused."""
    known, ranges_of_row = declared(options), _ranges_of_row(options)
    texts = [text.partition("=")[::2] for text in wanted] or list(ranges_of_row.items())
    problems, found = [], []
    for name, text in texts:
        if name not in known:
            near = closest(name, known)
            problems.append(f"there is no setting {name} to tune" + (f", did you mean {' or '.join(near)}?" if near else ""))
        elif not (text or name in ranges_of_row):
            problems.append(f"{name} has no declared range: write {name}=low..high, {name}=low..high:log or {name}=a,b,c")
        else:
            try:
                found.append(_range(options, name, text or ranges_of_row[name]))
            except ValueError as error:
                problems.append(f"{name}={text or ranges_of_row[name]}: {error}")
    if problems or not found:
        raise ConfigurationError(
            problems or [f"no ranges are declared for {options.config} or agent_type={options.agent_type}: give --ranges"])
    return found


def _ranges_of_row(options: Options) -> Mapping[str, str]:
    """Those of the row; without any, those of its agent for settings that this row's classes have."""
    known = declared(options)
    return RANGES.get(options.config) or {name: text for name, text in RANGES.get(options.agent_type, {}).items() if name in known}


def _range(options: Options, name: str, text: str) -> Range:
    """Raises ValueError for what is no range, or beyond the bounds of the setting."""
    annotation = declared(options)[name].annotation
    of_json = "{" in text or "[" in text  # whose colons are no marks of ranges
    body, colon, log = (text, "", "") if of_json else text.partition(":")
    low, dots, high = (body, "", "") if of_json else body.partition("..")
    if colon and (log != "log" or not dots):
        raise ValueError("after : only log is known, and for a range")
    values = tuple(from_words([part], annotation) for part in ((low, high) if dots else split_values(body)))
    if dots and not (all(type(value) in (int, float) for value in values) and {int, float} & kinds(annotation)):
        raise ValueError("a range needs two numbers")
    if dots and not (values[0] < values[1] and (values[0] > 0 or not log)):
        raise ValueError("a range rises, and a logarithmic one begins above 0")
    if refused := [sentence for value in values for sentence in changed(options, {name: value})[1].values()]:
        raise ValueError(refused[0])
    return Range(name, text, values, log or ("range" if dots else "choice"))
