"""A continued run keeps what its checkpoint fixes, and says which options it takes."""

import pytest

from utils import run_registry
from utils.config.command_line import read_options
from utils.config.rows import find_row, settings_on_file
from utils.config.validation import environment_spec


@pytest.fixture
def saved(root):
    """Return a function that leaves the files of a run that has ended, and returns the words that resume it."""

    def started(*words):
        options = run_registry.claim(read_options([*words, "--root", str(root)]))
        run_registry.save(options, settings_on_file(find_row(options.config)), environment_spec(options).name)
        (options.checkpoint_folder / "step_000000000007").mkdir(parents=True)
        return "--resume", options.signature

    return started


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (("rainbow-cartpole",), "agent.distribution", "quantile"),
        (("impala-cartpole", "--game", "Pendulum-v1"), "agent.squash_actions", "True"),
        (("rainbow-cartpole",), "agent.v_max", "1000"),
        (("r2d2-cartpole",), "agent.rescaling_eps", "0.5"),
    ],
)
def test_what_the_networks_numbers_mean_cannot_change(words, option, value, saved, refuse):
    told = refuse(*saved("--config", *words), f"--{option}", value)
    assert f"{option}=" in told and "cannot continue run" in told


@pytest.mark.parametrize("learnt", [True, False])
def test_only_a_learnt_temperature_is_kept(learnt, saved, root, capsys):
    words = saved("--config", "sac-pendulum", "--agent.learn_temperature", str(learnt))
    read_options([*words, "--agent.learn_temperature", "True", "--agent.temperature", "0.2", "--root", str(root)])
    told = capsys.readouterr().out
    assert ("keeps the agent.temperature that it has learnt" in told) == learnt
    assert ("continues with agent.temperature=0.2" in told) != learnt
