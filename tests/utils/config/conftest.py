"""Provide a fixture that reads a command line which is refused."""

import pytest

from utils.config.command_line import read_options


@pytest.fixture
def refuse(root, capsys):
    def refused(*words):
        with pytest.raises(SystemExit) as exit:
            read_options([*words, "--root", str(root)])
        assert exit.value.code == 2
        return capsys.readouterr().err

    return refused
