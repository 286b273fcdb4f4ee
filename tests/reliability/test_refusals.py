"""The program refuses model files and run files that are no good, with exit code and message (F08, F44, F45, F48)."""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from core.checkpoint.model_file import save_weights
from core.specs import ArraySpec, Discrete, EnvSpec
from tests.core.checkpoint.test_run_checkpoint import Malicious
from utils.config.rows import find_row, from_row, settings_on_file

CARTPOLE = ("--config", "dqn-cartpole")
TEST = (*CARTPOLE, "--mode", "2", "--model_file")


def model_files(folder: Path) -> None:
    """Write files that are no model of CartPole; test_run_checkpoint.py covers every truncation and bare pickles."""
    save_weights(folder / "foreign.pth", {"weight": torch.zeros(3)}, {})
    whole = (folder / "foreign.pth").read_bytes()
    (folder / "truncated.pth").write_bytes(whole[: len(whole) // 2])
    (folder / "random.pth").write_bytes(random.Random(1).randbytes(5_000))
    torch.save({"weights": {"a": Malicious(folder / "victim")}, "metadata": {}}, folder / "malicious.pth")
    torch.save({"weights": {"a": torch.eye(3).to_sparse()}, "metadata": {}}, folder / "sparse.pth")
    os.mkfifo(folder / "fifo.pth")
    spec = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 0, Discrete(2))
    weights = from_row(find_row(CARTPOLE[1]))[0].make_agent(spec).model.state_dict()
    save_weights(folder / "taken.pth", weights, {})
    (folder / "taken_test.json").mkdir()
    next(iter(weights.values()))[0] = float("nan")
    save_weights(folder / "spoilt.pth", weights, {})


def refusals(files: Path) -> dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]]:
    """Return for each name the words of a command line, the exit code and parts of the message."""
    return {
        "run file": (("--resume", "test_one"), 2, ("agent.learning_rate", "seed", "steps")),
        "missing": ((*TEST, str(files / "missing.pth")), 3, ("missing.pth does not exist",)),
        "truncated": ((*TEST, str(files / "truncated.pth")), 3, ("truncated.pth is truncated or damaged",)),
        "random": ((*TEST, str(files / "random.pth")), 3, ("random.pth is not a model file",)),
        "foreign": ((*TEST, str(files / "foreign.pth")), 3, ("foreign.pth is of another architecture",)),
        "sparse": ((*TEST, str(files / "sparse.pth")), 3, ("sparse.pth holds weights.a, which is sparse",)),
        "fifo": ((*TEST, str(files / "fifo.pth")), 3, ("fifo.pth is no regular file",)),
        "spoilt": ((*TEST, str(files / "spoilt.pth")), 3, ("spoilt.pth holds", "that are no finite float32 numbers")),
        "taken": ((*TEST, str(files / "taken.pth"), "--episodes", "1"), 2, ("mode 2 cannot write", "taken_test.json")),
        "malicious": (
            (*TEST, str(files / "malicious.pth")),
            3,
            ("malicious.pth carries something else", "nothing in it was executed"),
        ),
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    model_files(folder)
    return folder


@pytest.fixture
def refused(files, root, start_here):
    """Return a function that starts the case of a name and checks the refusal."""

    def check(name):
        words, exit_code, parts = refusals(files)[name]
        if name == "run file":
            (root / "logs" / "test_one").mkdir(parents=True)
            # options of the config that differ from these would be applied first
            on_file = settings_on_file(find_row("dqn-cartpole"))
            absurd = {
                "config": "dqn-cartpole",
                "options": dict.fromkeys(("agent.learning_rate", "seed", "steps"), 10**400),
                "file": on_file,
                "exit_code": 10**400,
            }
            (root / "logs" / "test_one" / "run.json").write_text(json.dumps(absurd))
        program = start_here(root, *words)
        assert program.returncode == exit_code, program.stderr
        assert all(part in program.stderr for part in parts), program.stderr
        assert all(line.startswith("error: ") for line in program.stderr.splitlines())
        assert not [path for path in root.rglob("*") if path.name not in ("logs", "models", "test_one", "run.json")]
        return program

    return check


@pytest.mark.parametrize("kind", ["missing", "truncated", "random", "foreign", "malicious"])
def test_f08_a_file_that_is_no_model_is_refused_and_not_executed(refused, files, kind):
    refused(kind)
    assert not (files / "victim").exists()


@pytest.mark.parametrize("kind", ["sparse", "fifo", "spoilt"])
def test_f44_a_model_file_of_unusable_tensors_is_refused(refused, kind):
    assert refused(kind).stderr.count("\n") == 1


def test_f45_mode_2_checks_its_output_path_before_playing(refused):
    assert "episode" not in refused("taken").stdout


def test_f48_absurd_numbers_in_run_json_are_refused_on_resume(refused):
    refused("run file")
