"""The commands of docs/tools.md, README and the Makefile are parsed without error."""

import re
import shlex
from pathlib import Path

import pytest

from utils.plot import __main__ as plot
from utils.sweep import __main__ as sweep
from utils.sweep.subprocess_run import options_of
from utils.tune import __main__ as tune
from utils.tune.ranges import ranges

PROJECT = Path(__file__).resolve().parents[1]
PAGES = [*(PROJECT / path for path in ("docs/tools.md", "Makefile", "README.md")), *PROJECT.glob("docs/results/*.md")]
TEXT = "".join(page.read_text() for page in PAGES)
COMMANDS = re.findall(r"(?m)^\t?\S+ -m utils\.(plot|sweep|tune) (.*)$", TEXT)
PARSERS = {"plot": plot.parser, "sweep": sweep.parser, "tune": tune.parser}


def test_every_tool_is_documented():
    assert {tool for tool, _ in COMMANDS} == set(PARSERS)


@pytest.mark.parametrize("tool, command", COMMANDS)
def test_every_command_is_parsed(tool, command, root):
    words = [word for word in shlex.split(command) if not word.startswith("$")]
    end = words.index("--") if "--" in words else len(words)
    options = PARSERS[tool]().parse_args(words[:end])
    for config in {"sweep": lambda: options.configs, "tune": lambda: [options.config], "plot": list}[tool]():
        template = options_of(config, words[end + 1 :], options.name, str(root))
        assert template.steps or (tool == "sweep" and template.target_score)
        assert tool != "tune" or ranges(template, options.ranges)
