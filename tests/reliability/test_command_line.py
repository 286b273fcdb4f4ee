"""The command line accepts good words and refuses bad ones (F01-F03, F05-F07, F28, F36, F49, F50)."""

import itertools
import json
import pickle
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from core.checkpoint import model_file
from tests.reliability.test_inline import CARTPOLE, train
from tests.rows import skip_unless_installed
from utils import options, run_registry
from utils.config import memory_budget, validation
from utils.config.command_line import read_options
from utils.config.rows import find_row, settings_on_file
from utils.errors import ConfigurationError
from utils.launch import create_context
from utils.options import CONFIGS

MAIN = Path(options.PROJECT) / "main.py"


@pytest.fixture
def read(root):
    return lambda *words: read_options([*words, "--root", str(root)])


@pytest.fixture
def refuse(root, capsys):
    """Return a function that asserts that words are refused without any file made, and returns the messages."""

    def refused(*words, code=2):
        before = sorted(root.rglob("*"))
        with pytest.raises(SystemExit) as exit:
            read_options([*words, "--root", str(root)])
        assert exit.value.code == code
        assert sorted(root.rglob("*")) == before
        lines = capsys.readouterr().err.splitlines()
        assert lines and all(line.startswith("error: ") for line in lines)
        return lines

    return refused


def small_memory(row):
    """Return words that shrink the replay; mixed memories and rollouts are small already."""
    return [] if find_row(row)["memory_type"] in ("mixed", "rollouts") else ["--memory.capacity", "40000"]


# accepted words ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", [row["name"] for row in CONFIGS])
def test_every_config_is_valid(row, read, monkeypatch):
    skip_unless_installed(row)
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 1 << 40)
    chosen = read("--config", row)
    assert chosen.config == row
    assert pickle.loads(pickle.dumps(chosen)) == chosen
    assert json.loads(json.dumps(chosen.to_dict()))["agent"]["learning_rate"] == chosen.agent.learning_rate


def test_a_config_is_chosen_by_number_or_name(read):
    names = [row["name"] for row in CONFIGS]
    for name in ("dqn-pong-small", "impala-cartpole", "sac-pendulum"):
        assert read("--config", str(names.index(name)), *small_memory(name)).config == name


def test_options_are_overridden_with_hyphens_or_underscores(read):
    chosen = read(
        *shlex.split(
            "--config dqn-cartpole --agent.learning_rate 2e-4 --agent.batch-size=16 --num_actors=2 "
            "--num-envs-per-actor=3 --memory.capacity 200000 --rate_limiter.samples-per-insert none "
            "--steps 1e4 --no-render"
        )
    )
    assert (chosen.agent.learning_rate, chosen.agent.batch_size, chosen.num_actors, chosen.num_envs_per_actor) == (
        2e-4,
        16,
        2,
        3,
    )
    assert (chosen.memory.capacity, chosen.rate_limiter.samples_per_insert, chosen.steps, chosen.render) == (
        200_000,
        None,
        10_000,
        False,
    )
    assert (
        chosen.agent.exploration_epsilon_steps
        == next(row for row in CONFIGS if row["name"] == "dqn-cartpole")["agent.exploration_epsilon_steps"]
    )


@pytest.mark.parametrize(
    "words",
    [["--agent.double_q", "False"], ["--agent.double_q=false"], ["--agent.double_q", "0"], ["--agent.no-double_q"]],
)
def test_booleans_can_be_switched_off(words, read):
    assert read("--config", "dqn-cartpole").agent.double_q is True
    assert read("--config", "dqn-cartpole", *words).agent.double_q is False


def test_a_config_may_set_run_options_that_default_to_none(read, monkeypatch):
    monkeypatch.setitem(find_row("dqn-cartpole"), "steps", 7_700)
    monkeypatch.setitem(find_row("dqn-cartpole"), "num_envs_per_actor", 3)
    chosen = read("--config", "dqn-cartpole")
    assert (chosen.steps, chosen.num_envs_per_actor, read("--config", "dqn-pong").num_envs_per_actor) == (7_700, 3, 8)
    assert read("--config", "dqn-cartpole", "--num_envs_per_actor", "5").num_envs_per_actor == 5
    monkeypatch.setitem(find_row("dqn-cartpole"), "seed", 99)
    with pytest.raises(SystemExit):
        read("--config", "dqn-cartpole")


def test_another_memory_type_drops_options_it_does_not_have(read):
    chosen = read("--config", "apex-pong", "--memory-type", "shared", "--memory.capacity", "20000")
    assert (chosen.memory_type, chosen.memory.capacity, hasattr(chosen.memory, "alpha")) == ("shared", 20_000, False)


def test_help_lists_options_with_the_configs_defaults(root, capsys):
    with pytest.raises(SystemExit) as exit:
        read_options(["--root", str(root), "--config", "dqn-cartpole", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert exit.value.code == 0
    for word in (
        "--agent.batch_size int = 64 (>= 1, <= 65_536) Windows in a batch",
        "--memory.capacity int = 50_000",
        "--target_score",
        "--agent.exploration str = linear (linear, ladder, linear-ladder)",
        "--engine str = local (local, inline, ray)",
        "dqn-minatar-breakout",
    ):
        assert word in shown


@pytest.mark.parametrize(
    "words", [("--help", "agent", "--config", "r2d2-recall"), ("--config=r2d2-recall", "-h", "agent")]
)
def test_help_of_one_section_lists_its_options_only(words, root, capsys):
    with pytest.raises(SystemExit) as exit:
        read_options([*words, "--root", str(root)])
    names = re.findall(r"(?m)^  --(\S+)", capsys.readouterr().out)
    assert exit.value.code == 0 and "agent.burn_in" in names and all(name.startswith("agent.") for name in names)


def test_help_of_several_sections_lists_the_options_of_each(root, capsys):
    with pytest.raises(SystemExit) as exit:
        read_options(["--root", str(root), "--config", "dqn-cartpole", "--help", "agent", "rate-limiter"])
    assert exit.value.code == 0
    told = capsys.readouterr().out
    assert "--agent.learning_rate" in told and "--rate_limiter.min_replay_size" in told and "--memory." not in told


def test_a_default_out_of_its_bounds_is_told_with_its_class(refuse, tmp_path, monkeypatch):
    (tmp_path / "own_agent_of_a_bad_default.py").write_text(
        "from pydantic import Field\n"
        "from core.agents.dqn import DQN, DQNParams\n"
        "from core.common.settings import frozen_dataclass\n"
        "@frozen_dataclass\nclass MineParams(DQNParams):\n    share: float = Field(default=2.0, le=1)\n"
        "class Mine(DQN):\n    Params = MineParams\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = refuse("--config", "dqn-cartpole", "--agent_type", "own_agent_of_a_bad_default:Mine")
    assert line == "error: agent_type=own_agent_of_a_bad_default:Mine: agent.share=2.0 must be at most 1"


def test_help_does_not_hide_an_unknown_class(refuse):
    (line,) = refuse("--config", "dqn-cartpole", "--agent_type", "bogus", "--help")
    assert line.startswith("error: unknown agent_type 'bogus'; there are dqn, ")


@pytest.mark.parametrize("words", [("--resume", "local_one"), ("--mode", "2", "--model_file", "local_one.pth")])
def test_a_run_that_is_named_takes_no_other_name(refuse, words):
    lines = refuse("--config", "dqn-cartpole", *words, "--timestamp", "two")
    assert lines[0].startswith("error: timestamp=two and ") and lines[0].endswith(" both name a run: leave one out")


def test_a_resumed_or_tested_run_takes_no_other_machine(refuse, read, run):
    run("--config", "dqn-cartpole", "--timestamp", "one")
    for words in (["--resume", "local_one"], ["--mode", "2"]):
        (line,) = refuse("--config", "dqn-cartpole", *words, "--machine", "gpu7")
        assert line == "error: machine=gpu7 is not the machine of run local_one: leave it out"
        assert read("--config", "dqn-cartpole", *words, "--machine", "local").signature == "local_one"


def test_help_of_an_unknown_section_names_the_valid_ones(refuse):
    (line,) = refuse("--help", "agnet")
    assert "groups are run, agent, env, " in line and "did you mean agent" in line


@pytest.mark.parametrize("line", ["dqn-cartpole", "3", 3])
def test_the_line_of_run_names_the_row_unless_a_word_does(read, monkeypatch, line):
    monkeypatch.setitem(options.RUN, "config", line)
    assert read().config == "dqn-cartpole" and read("--config", "impala-cartpole").config == "impala-cartpole"


def test_paths_are_relative_to_the_project_not_to_the_cwd(read, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    chosen = read_options(["--config", "dqn-cartpole", "--machine", "m", "--timestamp", "t"])
    assert chosen.log_folder == MAIN.parent / "logs" / "m_t"
    assert chosen.model_path == MAIN.parent / "models" / "m_t.pth"
    assert chosen.checkpoint_folder == MAIN.parent / "models" / "m_t_checkpoints"


# refused words ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", ["999", "-1", ""])
def test_f01_an_unknown_config_is_refused_with_the_valid_ones(config, refuse):
    lines = refuse(f"--config={config}")
    assert len(lines) == 1 and all(row["name"] in lines[0] for row in CONFIGS)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--agent.learning_rte", "--agent.learning_rate"),
        ("--num-actor", "--num_actors"),
        ("--batch_size", "--agent.batch_size"),
        ("--memroy.capacity", "--memory.capacity"),
        ("--sede", "--seed"),
        ("--agent.target_network_frequency", "--agent.target_update_period?"),
        ("--num_envs", "--num_envs_per_actor or --evaluator.num_envs?"),
        ("--total_timesteps", "--steps?"),
    ],
)
def test_f02_an_unknown_option_is_refused_with_the_closest(word, meant, refuse):
    assert f"did you mean {meant}" in refuse(word, "1")[0]


def test_f03_several_bad_values_are_reported_at_once(refuse):
    told = "\n".join(
        refuse(
            "stray",
            *shlex.split(
                "--agent.learning_rate=abc --agent.batch_size=0 --agent.gamma 1.5 --agent.n_step=0 --num_actors=0 "
                "--agent.los=huber --memory-type prioritised --engine locall --agent.double_q perhaps --seed"
            ),
        )
    )
    for part in (
        "agent.learning_rate='abc'",
        "agent.batch_size=0",
        "agent.gamma=1.5",
        "agent.n_step=0",
        "num_actors=0",
        "did you mean --agent.loss",
        "did you mean prioritized",
        "did you mean local",
        "agent.double_q='perhaps'",
        "'stray' stands alone",
        "--seed needs a value",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["--config", "dqn-cartpole", "--game", "Pendulum-v1", "--memory_type", "queue", "--model_type", "dqn-cnn"],
            [
                "agent_type=dqn cannot take the continuous actions of game=Pendulum-v1",
                "agent_type=dqn learns from transitions",
                "model_type could be dqn-mlp",
            ],
        ),
        (["--config", "dqn-pong", "--model_type", "dqn-mlp"], ["model_type=dqn-mlp", "game=pong", "dqn-cnn"]),
        (
            ["--config", "dqn-cartpole", "--model_type", "dqn-cnn"],
            ["model_type=dqn-cnn", "game=CartPole-v1", "dqn-mlp"],
        ),
        (
            ["--config", "dqn-minatar-breakout", "--model_type", "dqn-cnn"],
            ["model_type=dqn-cnn", "game=breakout", "too small"],
        ),
        (["--config", "dqn-cartpole", "--memory.capacity", "10"], ["memory.capacity=10", "at least"]),
        (
            ["--config", "r2d2-cartpole", "--memory.capacity", "223"],
            ["memory.capacity=223", "27 steps", "at least 224"],
        ),
        (
            ["--config", "r2d2-cartpole", "--rate_limiter.min_replay_size", "20", "--rate_limiter.error_buffer", "100"],
            ["rate_limiter.error_buffer=100", "at least 240"],
        ),
        (
            ["--config", "dqn-cartpole", "--rate_limiter.error_buffer", "1"],
            ["rate_limiter.error_buffer=1", "the 64 samples of a batch"],
        ),
        (
            ["--config", "dqn-cartpole", "--memory_type", "queue"],
            ["memory_type=queue", "agent_type=dqn", "shared or prioritized"],
        ),
        (
            ["--config", "impala-cartpole", "--memory_type", "prioritized"],
            ["memory_type=prioritized holds transitions and sequences", "agent_type=impala", "queue or mixed"],
        ),
        (
            ["--config", "impala-cartpole", "--model_type", "dqn-mlp"],
            ["model_type=dqn-mlp gives 'q' and agent_type=impala needs 'actor-critic'", "mlp-ac"],
        ),
        (
            ["--config", "impala-cartpole", "--rate_limiter.samples_per_insert", "4"],
            ["rate_limiter.samples_per_insert=4.0", "memory_type=queue", "None"],
        ),
        (
            [
                "--config",
                "replay-minatar-breakout",
                "--memory.replay_parameters",
                '[{"type":"queu","capacity":1,"sample_ratio":1}]',
            ],
            ["memory.replay_parameters", "'queu'", "reservoir"],
        ),
        (["--config", "rainbow-cartpole", "--agent.v_min", "100"], ["agent.v_min=100.0", "agent.v_max=100.0"]),
        (
            ["--config", "ddpg-pendulum", "--env_type", "atari", "--game", "pong"],
            ["agent_type=ddpg", "discrete", "game=pong", "dqn or"],
        ),
        (["--config", "dqn-cartpole", "--game", "Pendulum-v1"], ["continuous", "ddpg or d4pg or td3 or sac"]),
        (
            ["--config", "ddpg-pendulum", "--model_type", "d4pg-mlp"],
            ["model_type=d4pg-mlp", "agent_type=ddpg", "ddpg-mlp"],
        ),
        (
            ["--config", "td3-pendulum", "--memory_type", "queue"],
            ["memory_type=queue", "agent_type=td3", "shared or prioritized"],
        ),
        (
            ["--config", "sac-pendulum", "--model_type", "sac-cnn"],
            ["model_type=sac-cnn", "game=Pendulum-v1", "sac-mlp"],
        ),
        (["--config", "d4pg-pendulum", "--agent.v_max", "-2000"], ["agent.v_min=-1628.0", "agent.v_max=-2000.0"]),
        (
            ["--config", "impala-cartpole", "--learner.batches_per_sample", "2"],
            ["learner.batches_per_sample=2", "memory_type=queue"],
        ),
        (
            ["--config", "r2d2-cartpole", "--actor.chunk_length", "5"],
            ["actor.chunk_length=5 does nothing with agent_type=r2d2", "one sequence's start to the next"],
        ),
        (
            ["--config", "ppo-cartpole", "--learner.batches_per_sample", "2"],
            ["learner.batches_per_sample=2", "memory_type=rollouts"],
        ),
        (["--config", "ddpg-pendulum", "--model.hidden", "64", "0"], ["model.hidden=0", "at least 1"]),
        (
            ["--config", "dqn-cartpole", "--replay.frame_compression", "lz4"],
            ["replay.frame_compression=lz4", "game=CartPole-v1", "vectors"],
        ),
        (
            shlex.split("--config dqn-minatar-breakout --replay.frame_compression lz4 --replay.max_frame_bytes 1000"),
            ["replay.max_frame_bytes=1000", "at least"],
        ),
        (
            ["--config", "r2d2-cartpole", "--replay.max_frame_bytes", "1000"],
            ["replay.max_frame_bytes=1000", "at least"],
        ),
        (
            ["--config", "impala-cartpole", "--replay.max_frame_bytes", "2000"],
            ["replay.max_frame_bytes=2000", "at least"],
        ),
        (
            ["--config", "dqn-cartpole", "--engine", "inline", "--rate_limiter.samples_per_insert", "none"],
            ["rate_limiter.samples_per_insert=None", "engine=inline", "give a number"],
        ),
        (
            ["--config", "dqn-cartpole", "--num_learners", "3", "--num_actors", "2"],
            ["num_learners=3", "num_actors=2", "at least 3"],
        ),
        (
            shlex.split("--config dqn-cartpole --num_learners 2 --num_actors 3 --rate_limiter.error_buffer 15"),
            ["rate_limiter.error_buffer=15", "the 128 samples of 2 learners' batches"],
        ),
        (
            ["--config", "dqn-cartpole", "--num_learners", "2", "--num_actors", "3", "--memory.capacity", "79"],
            ["memory.capacity=79", "in each of 16 environments", "at least 80"],
        ),
        (
            ["--config", "dqn-cartpole", "--engine", "inline", "--num_learners", "2", "--num_actors", "2"],
            ["num_learners=2 needs engine=local or ray", "engine=inline runs one learner"],
        ),
        (["--config", "dqn-cartpole", "--engine", "foo.bar:Baz"], ["unknown engine 'foo.bar:Baz'", "no module foo"]),
        (["--config", "dqn-cartpole", "--engine", "os:nothere"], ["unknown engine 'os:nothere'", "os has no nothere"]),
        (["--config", "dqn-cartpole", "--engine", "..:Own"], ["engine=..:Own cannot be loaded", "TypeError"]),
        (["--config", "dqn-cartpole", "--machine", "../x"], ["machine='../x'"]),
        (["--config", "dqn-cartpole", "--resume", "a_b", "--model_file", "c.pth"], ["exclude each other"]),
    ],
)
def test_f05_impossible_combinations_name_options_and_a_remedy(words, parts, refuse):
    told = "\n".join(refuse(*words))
    assert all(part in told for part in parts)


@pytest.mark.parametrize(
    ("n_step", "chunk_length", "device"), [(1, 1, "cpu"), (3, 2, "cpu"), (3, 8, "cpu"), (3, 2, "learner")]
)
def test_the_smallest_accepted_capacity_can_be_trained_with(refuse, root, n_step, chunk_length, device):
    words = (
        *CARTPOLE,
        *shlex.split("--num_envs_per_actor 1 --rate_limiter.error_buffer 100 --agent.n_step"),
        str(n_step),
        "--actor.chunk_length",
        str(chunk_length),
        "--learner.replay_device",
        device,
        "--steps",
        "300",
        "--memory.capacity",
    )
    assert f"at least {n_step + 2}" in refuse(*words, str(n_step + 1))[0]
    assert train(root, *words, str(n_step + 2)).counters.updates > 50


@pytest.mark.parametrize(
    ("row", "game", "closest"),
    [
        ("dqn-pong", "pongg", "pong"),
        ("dqn-cartpole", "CartPol-v1", "CartPole-v1"),
        ("dqn-minatar-breakout", "brekout", "breakout"),
    ],
)
def test_f06_a_misspelt_game_is_refused_with_the_closest(row, game, closest, refuse):
    assert closest in refuse("--config", row, "--game", game)[0].split(game)[-1]


def test_surround_is_accepted_though_gymnasium_does_not_list_it(read):
    assert read("--game", "surround", "--memory.capacity", "20000").game == "surround"


def test_f07_a_missing_package_is_refused_with_its_pip_command(refuse, read, monkeypatch):
    from core.envs import minatar

    minatar._game_module.cache_clear()
    monkeypatch.setitem(sys.modules, "minatar", None)
    assert 'pip install -e ".[minatar]"' in refuse("--config", "dqn-minatar-breakout")[0]
    read("--config", "dqn-cartpole")


def test_recording_without_its_packages_names_the_pip_command(refuse, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    told = refuse("--config", "dqn-cartpole", "--mode", "2", "--model_file", str(tmp_path / "x.pth"), "--record")
    assert 'pip install -e ".[video]"' in told[0]


def test_recording_with_a_broken_package_is_refused_in_one_line(refuse, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "imageio_ffmpeg", raising=False)
    (tmp_path / "imageio_ffmpeg.py").write_text("raise RuntimeError('no ffmpeg for this machine')\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = refuse("--config", "dqn-cartpole", "--evaluator.record_every", "1")
    assert (
        len(told) == 1
        and "imageio_ffmpeg, which cannot be imported (RuntimeError: no ffmpeg for this machine" in told[0]
    )


def test_recording_without_a_package_that_draws_names_it(refuse, monkeypatch):
    from gymnasium.envs.classic_control import CartPoleEnv
    from gymnasium.error import DependencyNotInstalled

    def draw(env):
        raise DependencyNotInstalled("pygame is not installed, run `pip install pygame`")

    monkeypatch.setattr(CartPoleEnv, "render", draw)
    (told,) = refuse("--config", "dqn-cartpole", "--evaluator.record_every", "1")
    assert "game=CartPole-v1 (env_type=gym) cannot be drawn" in told and "run `pip install pygame`" in told


@pytest.mark.parametrize(
    ("word", "instead"), [("--record", "set evaluator.record_every"), ("--render", "opens no window")]
)
def test_render_and_record_are_refused_while_training(refuse, word, instead):
    (told,) = refuse("--config", "dqn-cartpole", word)
    assert f"{word[2:]}=True is for mode 2" in told and instead in told


def test_seconds_count_from_one_start_and_are_not_resumed(read, tmp_path, capsys):
    options = read("--config", "dqn-cartpole", "--machine", "test", "--timestamp", "one", "--seconds", "60")
    options.log_folder.mkdir(parents=True)
    run_registry.save(options, {})
    assert read("--resume", "test_one").seconds is None
    assert "continues without seconds=60.0: seconds count from one start" in capsys.readouterr().out
    assert read("--resume", "test_one", "--seconds", "5").seconds == 5.0 and "seconds" not in capsys.readouterr().out


def test_all_rows_are_listed_only_if_none_is_close(refuse):
    (line,) = refuse("--config", "dqn-cartpol")
    assert "did you mean dqn-cartpole" in line and "there are" not in line
    assert "did you mean dqn-cartpole or " in refuse("--config", "DQN-CartPole")[0]
    assert "; there are 0 dqn-pong-small, 1 " in refuse("--config", "nothing-alike")[0]
    assert re.search(
        r"; there are \d+ sac-pendulum, \d+ sac-halfcheetah, \d+ sac-point-maze$", refuse("--config", "SAC")[0]
    )


def test_a_run_that_has_made_its_steps_asks_for_more(read, refuse, capsys):
    """It is refused with other options: run.json would have options that the run has never learnt with."""
    options = read("--config", "dqn-cartpole", "--machine", "test", "--timestamp", "one", "--steps", "5000")
    options.log_folder.mkdir(parents=True)
    run_registry.save(options, settings_on_file(find_row("dqn-cartpole")))
    (options.checkpoint_folder / "step_000000005000").mkdir(parents=True)
    read("--resume", "test_one")
    asked = "test_one has made 5,000 agent steps: give a larger --steps to train it further"
    assert asked in capsys.readouterr().out
    for words in (["--steps", "3000"], ["--agent.gamma", "0.9"]):
        assert asked in refuse("--resume", "test_one", *words)[0]
    read("--resume", "test_one", "--supervisor.finish_timeout", "3600")  # of a last evaluation that is missing
    assert asked in capsys.readouterr().out
    read("--resume", "test_one", "--steps", "5001", "--agent.gamma", "0.9")
    assert "has made" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--model.dueling", "True"], "cannot continue"),
        (["--machine", "other"], "is not the machine of run test_one"),  # which is found out elsewhere
    ],
)
def test_a_refused_continuation_does_not_say_with_what_it_continues(read, capsys, words, refusal):
    options = read("--config", "dqn-cartpole", "--machine", "test", "--timestamp", "one")
    options.log_folder.mkdir(parents=True)
    run_registry.save(options, {})
    (options.checkpoint_folder / "step_000000005000").mkdir(parents=True)
    with pytest.raises(SystemExit):
        read("--resume", "test_one", "--agent.gamma", "0.9", *words)
    told = capsys.readouterr()
    assert refusal in told.err and "continues with" not in told.out


def test_a_run_is_not_tested_as_one_of_another_row(read, refuse):
    options = read("--config", "dqn-cartpole", "--machine", "test", "--timestamp", "one")
    options.log_folder.mkdir(parents=True)
    run_registry.save(options, {})
    options.model_path.parent.mkdir()
    options.model_path.touch()
    words = "--machine", "test", "--timestamp", "one", "--mode", "2"
    (told,) = refuse("--config", "iqn-cartpole", *words)
    assert "run test_one is of config=dqn-cartpole (agent_type=dqn, model_type=dqn-mlp): leave --config out" in told
    assert read(*words).agent_type == "dqn"


def test_f28_a_memory_that_does_not_fit_is_refused_with_byte_counts(refuse):
    line = refuse("--config", "dqn-pong-uniform", "--memory.capacity", "1e9")[0]
    needed, free = (int(figure.replace(",", "")) for figure in re.findall(r"([\d,]+) (?:bytes|are free)", line))
    assert needed >= 10**9 * 84 * 84 > free


ABSURD = {
    **dict.fromkeys(("agent.burn_in", "num_actors", "evaluator.num_envs", "model.lstm"), "1e9"),
    **dict.fromkeys(("agent.unroll_length", "num_envs_per_actor", "agent.batch_size", "num_learners"), "1e18"),
    **dict.fromkeys(("episodes", "evaluator.episodes", "model.hidden"), "1e30"),
    "learner.threads": "3e9",
    "supervisor.heartbeat_timeout": "1e-300",
}


def test_f49_absurd_numbers_are_refused_without_allocating(refuse):
    before, began = psutil.Process().memory_info().rss, time.process_time()
    lines = refuse("--config", "r2d2-recall", *(f"--{name}={value}" for name, value in ABSURD.items()))
    named = [re.match(r"error: (\S+)=\S+ must be at (?:most|least) ", line) for line in lines]
    assert sorted(match[1] for match in named if match) == sorted(ABSURD) and all(named)
    assert time.process_time() - began < 1 and psutil.Process().memory_info().rss - before < 50 << 20


@pytest.mark.parametrize("name", ["evaluator.num_envs", "num_envs_per_actor", "num_actors"])
def test_f49_environments_and_processes_count_in_needed_memory(name, refuse, monkeypatch):
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 2 << 30)
    words = "--memory.capacity", "20000000", "--rate_limiter.error_buffer", "20000000", "--evaluator.episodes", "10000"
    (line,) = refuse("--config", "dqn-pong-small", *words, f"--{name}", "4096")
    assert "beside the replay and 2,147,483,648 are free: lower one of num_actors=" in line and f"{name}=4096" in line


def test_environments_of_a_test_count_in_needed_memory(refuse, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 1 << 30)
    words = (
        "--mode",
        "2",
        "--model_file",
        str(tmp_path / "x.pth"),
        *shlex.split("--episodes 10000 --evaluator.num_envs 10000"),
    )
    assert "lower one of episodes=10000, evaluator.num_envs=10000" in refuse("--config", "dqn-pong-small", *words)[0]


def test_f50_a_relative_root_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert read_options(["--config", "dqn-cartpole", "--root", "here"]).root == str(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_options(["--config", "dqn-cartpole", "--root=~/there"]).root == str(tmp_path / "there")


def test_f36_absent_cuda_is_refused_with_the_available_devices(refuse, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for device in ("cuda", "cuda:3", "tpu"):
        assert "which has cpu" in refuse("--config", "dqn-cartpole", "--device", device)[0]


@pytest.mark.parametrize(
    "device, parts",
    [
        ("cuda", ["num_learners=3 need a GPU each", "has 2", "device=cpu"]),
        ("auto", ["num_learners=3 need a GPU each"]),
        ("cuda:1", ["device='cuda:1' is one", "must be cuda or cpu"]),
    ],
)
def test_learners_need_one_gpu_each(refuse, read, monkeypatch, device, parts):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    words = ("--config", "dqn-cartpole", "--num_actors", "3", "--device", device, "--num_learners")
    told = "\n".join(refuse(*words, "3"))
    assert all(part in told for part in parts)
    if device != "cuda:1":
        assert read(*words, "2").device == "cuda"


def test_device_auto_is_cuda_if_available(read, monkeypatch):
    for present, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda present=present: present)
        assert read("--config", "dqn-cartpole").device == device


def test_rendering_without_a_display_is_refused_with_a_hint(refuse, monkeypatch, tmp_path):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert (
        "--record"
        in refuse("--config", "dqn-cartpole", "--mode", "2", "--model_file", str(tmp_path / "x.pth"), "--render")[0]
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [("dqn-minatar-breakout", "MinAtar opens no window; use --record"), ("dqn-tictactoe", "draws no pictures")],
)
def test_an_environment_without_a_window_is_refused(refuse, monkeypatch, tmp_path, config, reason):
    monkeypatch.setenv("DISPLAY", ":0")
    (told,) = refuse("--config", config, "--mode", "2", "--model_file", str(tmp_path / "x.pth"), "--render")
    assert told.startswith("error: render=True: ") and reason in told


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"agent.learning_rte": 1.0}, "did you mean agent.learning_rate"),
        ({"agent.learning_rate": "fast"}, "agent.learning_rate='fast'"),
        ({"memory_type": "sharde"}, "did you mean shared"),
        ({"agent.n_step": 0}, "agent.n_step=0"),
    ],
)
def test_a_mistake_in_a_config_is_reported_like_a_bad_option(change, part, refuse, monkeypatch):
    for name, value in change.items():
        monkeypatch.setitem(find_row("dqn-cartpole"), name, value)
    assert part in "\n".join(refuse("--config", "dqn-cartpole"))


# earlier runs -----------------------------------------------------------------------------------------------------
@pytest.fixture
def run(root, read):
    """Return a function that claims a run as main does and leaves the files of a finished run."""

    def started(*words):
        chosen = run_registry.claim(read(*words))
        run_registry.save(chosen, settings_on_file(find_row(chosen.config)), validation.environment_spec(chosen).name)
        (chosen.checkpoint_folder / "step_000000000007").mkdir(parents=True)
        chosen.model_path.touch()
        return chosen

    return started


def test_a_resumed_run_keeps_its_options_and_takes_new_ones(read, run, capsys):
    before = run(
        "--config", "dqn-cartpole", "--agent.learning_rate", "5e-4", "--agent.gamma", "0.98", "--steps", "1100"
    )
    after = read("--resume", before.signature, "--agent.learning_rate", "1e-5", "--steps", "1200")
    assert after.signature == before.signature and after.config == "dqn-cartpole"
    assert (after.agent.learning_rate, after.agent.gamma, after.steps) == (1e-5, 0.98, 1_200)
    told = capsys.readouterr().out
    assert "agent.learning_rate=1e-05 (was 0.0005)" in told and "steps=1200 (was 1100)" in told and "gamma" not in told


def test_a_run_whose_own_class_is_gone_is_not_resumed(refuse, run, tmp_path, monkeypatch):
    module = tmp_path / "own_agent_that_goes.py"
    module.write_text("from core.agents.dqn import DQN\nclass Mine(DQN):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = run("--config", "dqn-cartpole", "--timestamp", "gone", "--agent_type", "own_agent_that_goes:Mine")
    module.unlink()
    monkeypatch.delitem(sys.modules, "own_agent_that_goes")
    (line,) = refuse("--resume", before.signature)
    assert line.endswith("unknown agent_type 'own_agent_that_goes:Mine': there is no module own_agent_that_goes")


def test_a_resumed_run_takes_changes_of_its_config(read, run, monkeypatch):
    before = run("--config", "dqn-cartpole", "--agent.gamma", "0.98")
    monkeypatch.setitem(find_row("dqn-cartpole"), "agent.learning_rate", 0.5)
    after = read("--resume", before.signature)
    assert (after.agent.learning_rate, after.agent.gamma) == (0.5, 0.98)


@pytest.mark.parametrize(
    ("config", "option", "value"),
    [
        ("dqn-cartpole", "game", "Acrobot-v1"),
        ("dqn-cartpole", "model.hidden", "7"),
        ("dqn-cartpole", "config", "dqn-pong"),
        ("dqn-cartpole", "agent.optimizer", "rmsprop"),
        ("dqn-cartpole", "agent.rmsprop_centered", "false"),
        ("rainbow-cartpole", "agent.distribution", "quantile"),
        ("rainbow-cartpole", "agent.v_max", "1000"),
        ("r2d2-cartpole", "agent.rescaling_eps", "0.5"),
        ("impala-cartpole", "agent.squash_actions", "True"),
    ],
)
def test_options_that_cannot_change_are_refused_on_resume(config, option, value, refuse, run):
    continuous = ("--game", "Pendulum-v1") if option == "agent.squash_actions" else ()
    before = run("--config", config, *continuous)
    told = "\n".join(refuse("--resume", before.signature, f"--{option}", value))
    assert f"{option}=" in told and f"cannot continue run {before.signature}" in told


def holding_replay(run):
    """Return a run, the newest checkpoint of which holds the replay now."""
    for step, name in ((100, "clock.pt"), (200, "memory.pt")):
        checkpoint = run.checkpoint_folder / f"step_{step:012}"
        checkpoint.mkdir()
        (checkpoint / name).touch()
    return run


def test_the_size_of_a_stored_replay_cannot_change(refuse, read, run):
    with_replay = holding_replay(run("--config", "dqn-cartpole", "--num_actors", "2", "--timestamp", "with"))
    without = run("--config", "dqn-cartpole", "--num_actors", "2", "--timestamp", "without")
    assert "num_learners=2 cannot continue" in "\n".join(
        refuse("--resume", with_replay.signature, "--num_learners", "2")
    )
    assert read("--resume", without.signature, "--num_learners", "2").num_learners == 2
    assert "memory.capacity=60000 cannot continue" in "\n".join(
        refuse("--resume", with_replay.signature, "--memory.capacity", "60000")
    )
    assert read("--resume", without.signature, "--memory.capacity", "60000").memory.capacity == 60_000
    for setting, value in (("replay.frame_compression", "lz4"), ("replay.max_frame_bytes", "100000000")):
        told = "\n".join(refuse("--resume", with_replay.signature, f"--{setting}", value))
        assert f"{setting}=" in told and "cannot continue" in told


@pytest.mark.parametrize("config", ["impala-cartpole", "impact-cartpole", "replay-minatar-breakout"])
def test_the_batch_size_cannot_change_where_it_gives_a_replay_its_size(config, refuse, read, run):
    words = ("--config", config, "--agent.lr_schedule", "constant", "--timestamp")
    with_replay, without = holding_replay(run(*words, "with")), run(*words, "without")
    (line,) = refuse("--resume", with_replay.signature, "--agent.batch_size", "3")
    assert "agent.batch_size=3 cannot continue" in line
    assert read("--resume", without.signature, "--agent.batch_size", "3").batch_size == 3


def test_a_file_among_the_checkpoints_is_not_the_newest(refuse, run):
    with_replay = holding_replay(run("--config", "dqn-cartpole", "--timestamp", "with"))
    (with_replay.checkpoint_folder / "step_000000000200.onnx").touch()
    assert "memory.capacity=60000 cannot" in refuse("--resume", with_replay.signature, "--memory.capacity", "60000")[0]


@pytest.mark.parametrize(
    "config, option, words, kept",
    [
        ("sac-pendulum", "agent.temperature", [], True),
        ("sac-pendulum", "agent.temperature", ["--agent.learn_temperature", "false"], False),
        ("impact-cartpole", "agent.kl_coefficient", [], False),  # was 0, which a checkpoint does not hand on
        ("impact-cartpole", "agent.kl_coefficient", ["--agent.kl_coefficient", "0.5"], True),
    ],
)
def test_an_option_that_is_learnt_is_kept_from_the_checkpoint(config, option, words, kept, read, run, capsys):
    before = run("--config", config, *words)
    read("--resume", before.signature, f"--{option}", "0.25")
    told = capsys.readouterr().out
    assert (f"keeps the {option} that it has learnt: {option}=0.25 is for new runs" in told) == kept
    assert (f"continues with {option}=0.25" in told) != kept


def test_the_batch_size_of_a_replay_of_steps_can_change(read, run):
    with_replay = holding_replay(run("--config", "dqn-cartpole", "--timestamp", "with"))
    assert read("--resume", with_replay.signature, "--agent.batch_size", "3").batch_size == 3


def test_the_windows_of_a_stored_replay_cannot_change(refuse, read, run):
    with_replay = holding_replay(run("--config", "r2d2-cartpole", "--timestamp", "with"))
    without = run("--config", "r2d2-cartpole", "--timestamp", "without")
    for setting, value in (("agent.burn_in", 3), ("agent.sequence_period", 9)):
        assert f"{setting}={value} cannot continue" in "\n".join(
            refuse("--resume", with_replay.signature, f"--{setting}", str(value))
        )
        assert (
            getattr(
                read("--resume", without.signature, f"--{setting}", str(value)).agent, setting.removeprefix("agent.")
            )
            == value
        )


def test_a_gpu_run_is_tested_and_resumed_without_a_gpu(refuse, read, run, monkeypatch):
    def gpus(count):
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)

    gpus(2)
    before = run(
        *shlex.split(
            "--config dqn-cartpole --device cuda --actor.device cuda:1 --learner.cuda_graph on --learner.precision tf32"
        )
    )
    gpus(0)
    assert read("--config", "dqn-cartpole", "--mode", "2").device == "cpu"
    told = refuse("--resume", before.signature)
    assert [line.partition(" needs")[0] for line in told] == [
        "error: learner.cuda_graph=on",
        "error: learner.precision=tf32",
    ]
    after = read("--resume", before.signature, "--learner.cuda_graph", "off", "--learner.precision", "float32")
    assert (after.device, after.actor.device) == ("cpu", "cpu")


def test_a_run_without_run_json_needs_its_config_named(refuse, read, run):
    before = run("--config", "dqn-cartpole", "--machine", "m", "--timestamp", "1")
    (before.log_folder / "run.json").unlink()
    for words in (["--resume", "m_1"], ["--mode", "2", "--machine", "m", "--timestamp", "1"]):
        assert "run m_1 has no run.json" in refuse(*words)[0]
        assert read(*words, "--config", "dqn-minatar-breakout").config == "dqn-minatar-breakout"


def test_newest_is_the_newest_run_of_the_config(read, run):
    first = run("--config", "dqn-cartpole", "--timestamp", "1")
    run("--config", "dqn-minatar-breakout", "--timestamp", "2")
    second = run("--config", "dqn-cartpole", "--timestamp", "3")
    assert read("--config", "dqn-cartpole", "--resume", "newest").signature == second.signature
    assert read("--config", "dqn-cartpole", "--mode", "2").model_path == second.model_path
    assert read("--config", "dqn-cartpole", "--mode", "2", "--timestamp", "1").model_path == first.model_path


def test_newest_is_a_run_that_has_a_checkpoint(read, run):
    first, second = run("--config", "dqn-cartpole"), run("--config", "dqn-cartpole")
    (second.checkpoint_folder / "step_000000000007").rmdir()
    assert read("--config", "dqn-cartpole", "--resume", "newest").signature == first.signature


def test_newest_matches_the_given_game_agent_and_model(read, run, refuse, capsys):
    cartpole = run("--config", "dqn-cartpole", "--timestamp", "1")
    other = run("--config", "dqn-cartpole", "--timestamp", "2", "--game", "Acrobot-v1")
    prioritized = run(
        "--config", "dqn-cartpole", "--timestamp", "3", "--memory_type", "prioritized", "--model.hidden", "17"
    )
    run("--config", "dqn-cartpole", "--timestamp", "4", "--agent_type", "rainbow", "--model_type", "rainbow-mlp")
    for newest in (["--resume", "newest"], ["--mode", "2"]):
        for words, expected in (
            ([], prioritized),
            (["--game", "CartPole-v1", "--model.hidden", str(cartpole.model.hidden)], cartpole),
            (["--game", "Acrobot-v1"], other),
        ):
            assert read("--config", "dqn-cartpole", *newest, *words).signature == expected.signature
            told = capsys.readouterr().out.splitlines()[-1]
            assert f"run {expected.signature}: dqn-cartpole" in told and f"game={expected.game}" in told
        (line,) = refuse("--config", "dqn-cartpole", "--game", "MountainCar-v0", *newest, code=3)
        assert "game=MountainCar-v0" in line
        assert line.endswith(
            "its newest run, local_4, has agent_type=rainbow, model_type=rainbow-mlp, game=CartPole-v1"
        )


def test_newest_matches_every_spelling_of_a_game(read, run, refuse):
    small = ("--config", "dqn-pong-small", "--memory.capacity", "20000")
    pong = run(*small, "--game", "PongNoFrameskip-v4", "--timestamp", "1")
    invaders = run(*small, "--game", "SpaceInvaders", "--timestamp", "2")
    assert (
        read(*small, "--mode", "2").signature
        == read(*small, "--mode", "2", "--game", "Pong").signature
        == pong.signature
    )
    assert read(*small, "--mode", "2", "--game", "space_invaders").signature == invaders.signature
    assert "train one first" in refuse(*small, "--mode", "2", "--game", "breakout", code=3)[0]


def test_a_model_of_another_game_is_refused(read, root, capsys):
    trained = train(root, *CARTPOLE, "--timestamp", "one", "--steps", "100").options
    metadata = model_file.load_weights(trained.model_path)[1]
    assert (metadata["game"], metadata["environment"], metadata["env_type"]) == ("CartPole-v1", "CartPole-v1", "gym")
    models = trained.model_path, trained.checkpoint_folder
    for model, words in itertools.product(models, (["--mode", "2"], [])):
        chosen = read("--config", "dqn-cartpole", "--game", "CartPole-v0", "--model_file", str(model), *words)
        with pytest.raises(
            ConfigurationError,
            match=r"is of game=CartPole-v1 \(env_type=gym\) and game=CartPole-v0 is .* give --game CartPole-v1",
        ) as refused:
            create_context(chosen)
        assert refused.value.code == 3 and not chosen.log_folder.exists()
    capsys.readouterr()
    create_context(read("--config", "dqn-cartpole", "--mode", "2", "--model_file", str(trained.model_path)))
    assert capsys.readouterr().out == (
        f"testing model file {trained.model_path}: config=dqn-cartpole, game=CartPole-v1, "
        f"agent_steps={metadata['agent_steps']}, score={metadata['score']}\n"
    )


def test_a_run_can_be_named_by_its_folders(read, run):
    before = run("--config", "dqn-cartpole")
    (newest,) = before.checkpoint_folder.glob("step_*")
    for path in (before.log_folder, before.checkpoint_folder, newest):
        assert read("--resume", str(path)).signature == before.signature


def test_a_run_is_tested_with_its_own_architecture(read, run):
    run("--config", "dqn-cartpole", "--model.hidden", "17")
    assert read("--config", "dqn-cartpole", "--mode", "2").model.hidden == 17


def test_an_unknown_users_home_in_a_path_is_taken_literally(read):
    assert read("--config", "dqn-cartpole", "--mode", "2", "--model_file", "~nobody-here/x.pth").model_file.endswith(
        "/~nobody-here/x.pth"
    )


def test_an_unknown_run_exits_with_3(refuse, run):
    before = run("--config", "dqn-cartpole")
    assert before.signature in refuse("--resume", before.signature + "x", code=3)[0].split("did you mean")[1]
    assert "train one first" in refuse("--config", "dqn-minatar-breakout", "--mode", "2", code=3)[0]


def test_a_taken_timestamp_is_refused_with_a_resume_hint(refuse, run):
    before = run("--config", "dqn-cartpole", "--timestamp", "once")
    assert f"--resume {before.signature}" in refuse("--config", "dqn-cartpole", "--timestamp", "once")[0]


def test_checkpoints_without_their_run_block_a_timestamp(refuse, run):
    before = run("--config", "dqn-cartpole", "--timestamp", "once")
    (before.log_folder / "run.json").unlink()
    before.log_folder.rmdir()
    (line,) = refuse("--config", "dqn-cartpole", "--timestamp", "once")
    assert line.startswith(f"error: {before.checkpoint_folder} has checkpoints, but ") and "remove that folder" in line


# the program ------------------------------------------------------------------------------------------------------
def test_the_program_exits_2_and_creates_nothing(root, tmp_path):
    command = [sys.executable, str(MAIN), "--root", str(root), "--agent.learning_rate", "abc"]
    program = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (
        program.returncode == 2 and "agent.learning_rate='abc'" in program.stderr and "Traceback" not in program.stderr
    )
    assert list(root.iterdir()) == []
