"""The options, values and commands that docs/migration.md names are valid."""

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest

from core.common.exit_codes import BAD_CHECKPOINT
from core.memories.unrolls.mixed import STRATEGIES
from utils.config.command_line import read_options
from utils.config.options_page import NAMES
from utils.config.rows import SECTIONS, changed, declared, from_words
from utils.options import CONFIGS, Options

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "migration.md").read_text()
BLOCK = re.compile(r"(?ms)^```bash\n(.*?)^```$")
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in re.findall(r"(?m)^\| .*\|$", PAGE)]
TABLE = [row for row in ROWS if row[0] != "theirs"]
COMMANDS = [
    command
    for block in BLOCK.findall(PAGE)
    for command in re.findall(r"(?m)^\.venv/bin/python main\.py (.*)$", block.replace("\\\n", " "))
]


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


HERE = sorted({name for row in TABLE for name in quoted(row[1])})
OPTIONS = [name for name in HERE if not name.startswith('"') and "/" not in name]
KEYS = sorted({name for name in quoted(BLOCK.sub("", PAGE)) if re.fullmatch(r'"\w+"', name)})
GROUP_NAMES = "|".join([*SECTIONS, "rate_limiter", "actor", "learner", "evaluator", "logger", "supervisor"])
MENTIONED = sorted({name for name in quoted(BLOCK.sub("", PAGE)) if re.match(rf"({GROUP_NAMES})\.\w", name)})


def holders(option):
    """Return the Params and Options that have this option, each with its name there."""
    group, _, name = option.rpartition(".")
    if group in SECTIONS:
        _, factory = SECTIONS[group]
        found = [(factory[kind].Params(), name) for kind in factory]
    else:
        found = [(Options(), option)]
    return [(params, name) for params, name in found if name in declared(params)]


def takes(option, value):
    """Return True if any class that has this option accepts the value."""
    if option in NAMES:
        return value in NAMES[option]
    parsed = [
        (params, name, from_words([value], declared(params)[name].annotation)) for params, name in holders(option)
    ]
    return any(not changed(params, {name: given})[1] for params, name, given in parsed)


def needs_a_run(words):
    return "--resume" in words or ("--mode" in words and "--model_file" not in words)


@pytest.mark.parametrize("text", sorted({*OPTIONS, *MENTIONED}))
def test_every_named_option_exists_and_accepts_its_value(text):
    option, _, value = text.partition(" ")
    assert holders(option), f"no class has {option}"
    assert not value or takes(option, value), f"{option} does not take {value}"


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_the_replay_list_exists(key):
    assert any(key.strip('"') in declared(params()) for _, params in STRATEGIES.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_accepted(command, tmp_path, monkeypatch):
    # independent of this machine's memory
    monkeypatch.setattr("utils.config.memory_budget.available_bytes", lambda: 1 << 50)
    monkeypatch.setenv("DISPLAY", ":0")
    words = [*shlex.split(command), "--root", str(tmp_path)]
    if needs_a_run(words):
        with pytest.raises(SystemExit) as ended:
            read_options(words)
        assert ended.value.code == BAD_CHECKPOINT
    else:
        assert read_options(words).root == str(tmp_path)


def test_every_line_of_the_table_names_an_option_or_says_why_not():
    assert len(TABLE) > 70 and len(COMMANDS) > 10
    assert [row for row in TABLE if len(row) not in (2, 3)] == []
    assert [row for row in TABLE if not quoted(row[1]) and row[1] != "nothing to set"] == []


@pytest.mark.parametrize(
    "pattern", sorted({name for name in quoted(BLOCK.sub("", PAGE)) if re.fullmatch(r"[\w-]+\*|dqn-pong-\w+", name)})
)
def test_every_named_config_exists(pattern):
    assert any(fnmatch(row["name"], pattern) for row in CONFIGS)
