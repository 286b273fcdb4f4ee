"""Steps of every environment are validated, and messages to the user never stop a run."""

import io
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from core.acting.validated_env import ValidatedEnv
from core.common.console import log_to_stderr
from core.common.foreign_code import ForeignCodeError, foreign_code
from core.env import Env
from core.runtime.options import make_env
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep

STREAMS = 3


class Told(Env):
    """Return valid steps except for the given fields."""

    spec = EnvSpec("told", ArraySpec((2,), "float32"), 0, Discrete(2))

    def __init__(self, **told):
        flags = np.zeros(STREAMS, bool)
        numbers = np.zeros(STREAMS, np.float32)
        self.sound = TimeStep(np.zeros((STREAMS, 2), np.float32), numbers, numbers, flags, flags, numbers)
        self.told, self.closed = told, False

    def reset(self, seed):
        return self.sound

    def step(self, action):
        return self.sound._replace(**self.told)

    def close(self):
        self.closed = True


def stepped(**told):
    env = ValidatedEnv(Told(**told), STREAMS)
    env.reset(1)
    return env.step(np.zeros(STREAMS, np.int64))


def numbers(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"reward": numbers(0, np.nan, 0)}, "reward of environment 1 of told at step 1 is nan, expected finite values"),
        ({"discount": numbers(0, 0, np.inf)}, "discount of environment 2 of told at step 1 is inf"),
        ({"raw_reward": numbers(-np.inf, 0, 0)}, "raw_reward of environment 0 of told at step 1 is -inf"),
        (
            {"observation": np.array([[0, 0], [0, np.nan], [0, 0]], np.float32)},
            r"observation of environment 1 .* is nan \(element \[1\]\)",
        ),
        (
            {"observation": np.zeros((STREAMS, 2), np.int64)},
            r"observation of told at step 1 is int64 \[3, 2\], expected float32 \[3, 2\]",
        ),
        ({"observation": np.zeros((STREAMS, 3), np.float32)}, r"is float32 \[3, 3\], expected float32 \[3, 2\]"),
        ({"first": numbers(0, 0, 0)}, r"first of told at step 1 is float32 \[3\], expected bool \[3\]"),
        ({"observation": np.full((STREAMS, 2), 1e39)}, r"environment 0 .* is 1e\+39 .*expected finite values"),
        ({"action_mask": np.ones((STREAMS, 2), bool)}, "told returned an action_mask .* spec says no has_action_mask"),
        ({"last": None}, "last of told at step 1 is None, expected bool"),
        ({"reward": 1.0}, "reward of told at step 1 is 1.0"),
        ({"reward": numbers(1, 2)}, r"is float32 \[2\], expected float32 \[3\]"),
    ],
)
def test_a_faulty_field_names_value_environment_and_step(told, message):
    with pytest.raises(ValueError, match=message):
        stepped(**told)


def test_integers_that_the_memory_cannot_hold_are_refused():
    env = Told(observation=np.full((STREAMS, 2), 300, np.uint16))
    env.spec = replace(env.spec, frame=ArraySpec((2,), "uint8"))
    with pytest.raises(ValueError, match=r"is uint16 \[3, 2\], expected uint8 \[3, 2\]"):
        ValidatedEnv(env, STREAMS).step(np.zeros(STREAMS, np.int64))


def test_environments_are_numbered_within_their_actor():
    env = ValidatedEnv(Told(reward=numbers(0, np.nan, 0)), STREAMS)
    env.set_activity_marker(np.zeros(1), 8)
    with pytest.raises(ValueError, match="reward of environment 9 of told"):
        env.step(np.zeros(STREAMS, np.int64))


def test_numbers_beside_a_picture_must_be_finite():
    frames = np.zeros((STREAMS, 2, 4 + 8), np.uint8)  # a stack of two 2x2 pictures, two numbers beside each
    frame, parts = ArraySpec((12,), "uint8"), {"is_image": True, "max_value": 255.0, "picture_of_parts": (2, 2)}
    told = Told(observation=frames)
    told.spec, told.sound = (
        replace(Told.spec, frame=frame, frame_stack=2, **parts),
        told.sound._replace(observation=frames),
    )
    env = ValidatedEnv(told, STREAMS)
    env.reset(1)
    assert env.step(np.zeros(STREAMS, np.int64)).observation is frames
    frames[1, 1, 8:].view(np.float32)[0] = np.inf
    message = r"environment 1 of told at step 2 is inf \(element \[1\] of the vector beside"
    with pytest.raises(ValueError, match=message):
        env.step(np.zeros(STREAMS, np.int64))


def test_a_success_may_be_a_number_of_numpy(monkeypatch):
    env = ValidatedEnv(Told(), STREAMS)
    for stated, expected in ((np.True_, True), (np.False_, False), (None, None)):
        monkeypatch.setattr(env._env, "success", lambda env_ind, stated=stated: stated)
        assert env.success(0) is expected


def test_a_result_that_is_no_time_step_is_an_error():
    env = ValidatedEnv(Told(), STREAMS)
    env._env.sound = ("observation", 0.0, False)
    with pytest.raises(ValueError, match=r"told returned .* at step 0, expected a TimeStep"):
        env.reset(1)


def test_valid_steps_pass_unchanged_even_at_the_largest_numbers():
    largest = numbers(3e38, 3e38, -3e38)
    assert stepped(reward=largest).reward is largest


class Unreadable(Exception):
    def __str__(self):
        raise ValueError("no text")


ACTION = np.zeros(STREAMS, np.int64)


@pytest.mark.parametrize(
    "call", [("reset", 1), ("step", ACTION), ("send", ACTION), ("render",), ("success", 0), ("close",)]
)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SystemExit(0), r"environment told called sys.exit\(0\)"),
        (ImportError("no levels"), "environment told raised ImportError: no levels"),
        (Unreadable(), r"environment told raised Unreadable: \(its __str__ raises ValueError\)"),
    ],
)
def test_errors_that_would_end_the_process_are_converted(monkeypatch, call, error, message):
    def fail(*_):
        raise error

    env = ValidatedEnv(Told(), STREAMS)
    monkeypatch.setattr(env._env, call[0], fail)
    with pytest.raises(ForeignCodeError, match=message):
        getattr(env, call[0])(*call[1:])


@pytest.mark.parametrize("handled_by_python", [True, False])
def test_keyboardinterrupt_passes_only_if_python_handles_sigint(monkeypatch, handled_by_python):
    monkeypatch.setattr(
        "core.common.foreign_code.signal.getsignal",
        lambda number: signal.default_int_handler if handled_by_python else None,
    )
    with pytest.raises(KeyboardInterrupt if handled_by_python else ForeignCodeError):
        with foreign_code("it"):
            raise KeyboardInterrupt


def test_exits_in_constructors_become_errors_not_import_errors():
    for error, raised in ((SystemExit(0), ForeignCodeError), (ImportError("pip install it"), ImportError)):
        options = SimpleNamespace(env_class=Mock(side_effect=error), env=None, game="told")
        with pytest.raises(raised):
            make_env(options, 1, training=True)


def test_close_and_spec_are_the_environments_own():
    inner = Told()
    env = ValidatedEnv(inner, STREAMS)
    env.close()
    assert inner.closed and env.spec is inner.spec


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_message_that_cannot_be_written_stops_nothing(monkeypatch, capsys):
    log_to_stderr("a word")
    assert capsys.readouterr().err == "a word\n"
    monkeypatch.setattr(sys, "stderr", FullDisk())
    log_to_stderr("a word")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.stderr.close()
    log_to_stderr("a word")
