import dataclasses
import json
import math
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from core.checkpoint.model_file import save_weights
from core.checkpoint.run_checkpoint import CheckpointError
from core.env import Env
from core.evaluation.episodes import EpisodeResults, RenderedStep, play_episodes
from core.runtime.context import Context
from core.runtime.log_buffers import LogRings
from core.runtime.options import EvaluatorParams, VideoParams
from core.runtime.parameter_store import ParameterStore
from core.runtime.run_state import RateLimiterParams, RunCounters, RunState
from core.single_processes import tester as mode_2  # pytest would collect the name tester
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep

ENDLESS = 10**9


@dataclass(frozen=True)
class Params:
    sticky: float = 0.25


class Countdown(Env):
    """Play in environment e episodes of lengths[e] steps; step k of an episode has reward (e + 1) * k.

    Environments in `timed` end their episodes by truncation.
    """

    Params = Params
    lengths: tuple[int, ...] = (3, 5, 2)
    timed: tuple[int, ...] = ()
    threshold: float | None = None
    made: list["Countdown"] = []

    def __init__(
        self,
        params: Params,
        game: str,
        num_envs: int,
        *,
        training: bool = True,
        num_threads: int = 1,
        render_mode: str | None = None,
    ):
        self.num_envs, self.training, self.render_mode = num_envs, training, render_mode
        self.spec = EnvSpec(
            game, ArraySpec((2,), "float32"), 0, Discrete(3), frames_per_step=4, reward_threshold=self.threshold
        )
        self.seeds: list[int] = []
        self.actions: list[np.ndarray] = []
        self.closed = False
        Countdown.made.append(self)

    def reset(self, seed: int) -> TimeStep:
        self.seeds.append(seed)
        self.steps, self.ended = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, bool)
        return self._timestep(np.ones(self.num_envs, bool), np.zeros(self.num_envs, bool))

    def step(self, action: np.ndarray) -> TimeStep:
        self.actions.append(action.copy())
        first = self.ended
        self.steps = np.where(first, 0, self.steps + 1)
        self.ended = self.steps == np.array(self.lengths[: self.num_envs])
        return self._timestep(first, self.ended)

    def _timestep(self, first: np.ndarray, last: np.ndarray) -> TimeStep:
        raw = (np.arange(self.num_envs) + 1) * self.steps
        timed = np.isin(np.arange(self.num_envs), self.timed)
        return TimeStep(
            np.stack([self.steps, first], -1).astype(np.float32),
            np.sign(raw).astype(np.float32),
            np.where(last & ~timed, 0, 1).astype(np.float32),
            first,
            last,
            raw.astype(np.float32),
        )

    def render(self) -> np.ndarray:
        assert self.render_mode == "rgb_array"
        return np.full((21, 16, 3), self.steps[0] * 40 % 256, np.uint8)

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def human_normalized(game: str, score: float) -> float:
        return score / 100


class Network(nn.Module):
    """Hold a recurrent state that counts the steps of the running episode."""

    def __init__(self, recurrent: bool = True):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.recurrent = recurrent

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        return (torch.zeros(batch_size, 1),) if self.recurrent else ()


class Output(NamedTuple):
    action: np.ndarray
    extras: dict
    state: tuple[Tensor, ...]


class Player:
    """Assert at each step that the recurrent state is as old as the episode."""

    def __init__(self, recurrent: bool = True):
        self.model = Network(recurrent)
        self.initial_state = self.model.initial_state
        self.explorations: list[Any] = []

    def act(self, timestep: TimeStep, state: tuple[Tensor, ...], exploration: Any) -> Output:
        assert torch.is_inference_mode_enabled()
        self.explorations.append(exploration)
        if self.model.recurrent:
            assert np.array_equal(state[0][:, 0].numpy()[~timestep.last], timestep.observation[~timestep.last, 0])
        return Output(timestep.observation[:, 0].astype(np.int64) % 3, {}, tuple(part + 1 for part in state))

    def policy_diagnostics(self, output: Output) -> dict[str, np.ndarray]:
        return {"action doubled": output.action * 2}

    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> Any:
        return SimpleNamespace(statistics=lambda: {"epsilon": 0.01}, num_envs=num_envs)


@pytest.fixture(autouse=True)
def _countdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Countdown, "made", [])


def run(generator: Generator[bool, None, EpisodeResults]) -> EpisodeResults:
    while True:
        try:
            assert next(generator) is True
        except StopIteration as stop:
            return stop.value


def play(episodes: int, num_envs: int = 3, max_steps: int = 1_000, **keywords: Any) -> EpisodeResults:
    return run(play_episodes(Player(), Countdown(Params(), "game", num_envs), episodes, max_steps, None, 7, **keywords))  # type: ignore[arg-type]


def test_every_environment_plays_an_equal_share_of_episodes() -> None:
    results = play(7)
    # Environment e scores (e + 1) * (1 + ... + length): 6, 30, 9; the shares are 3, 2, 2.
    assert results.returns.tolist() == [6, 30, 9, 6, 30, 9, 6]
    assert results.lengths.tolist() == [3, 5, 2, 3, 5, 2, 3]
    assert not results.truncated.any()


@pytest.mark.parametrize(("episodes", "num_envs"), [(1, 1), (1, 3), (4, 1), (6, 3), (2, 3)])
def test_exactly_the_requested_number_of_episodes_is_played(episodes: int, num_envs: int) -> None:
    assert [len(array) for array in play(episodes, num_envs)[:3]] == [episodes] * 3


def test_a_time_limit_of_the_environment_counts_as_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Countdown, "timed", (1,))
    assert play(6).truncated.tolist() == [False, True, False] * 2


def test_an_endless_episode_is_truncated_at_max_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Countdown, "lengths", (ENDLESS, 5, 2))
    results = play(9, max_steps=10)
    assert results.returns.tolist() == [55, 30, 9] * 3  # 1 + ... + 10
    assert results.lengths.tolist() == [10, 5, 2] * 3
    assert results.truncated.tolist() == [True, False, False] * 3
    seeds = Countdown.made[0].seeds
    assert len(seeds) == len(set(seeds)) == 3


def test_a_truncated_environment_waits_for_its_own_episode_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Countdown, "lengths", (7, 3))
    results = play(12, num_envs=2, max_steps=4)
    assert results.returns.tolist() == [10, 12] * 6  # 1 + 2 + 3 + 4, and 2 * (1 + 2 + 3)
    assert results.truncated.tolist() == [True, False] * 6


def test_an_episode_that_ends_at_max_steps_is_not_truncated() -> None:
    results = play(3, max_steps=5)
    assert results.lengths.tolist() == [3, 5, 2] and not results.truncated.any()


def test_a_seed_determines_the_reset() -> None:
    for seed in (7, 7, 8):
        run(play_episodes(Player(), Countdown(Params(), "game", 2), 2, 100, None, seed))  # type: ignore[arg-type]
    first, second, third = (env.seeds for env in Countdown.made)
    assert first == second != third


def test_success_or_the_score_threshold_marks_an_episode_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    def solved(threshold: float | None, said: dict[int, bool]) -> list[bool] | None:
        env = Countdown(Params(), "game", 3)
        env.spec = dataclasses.replace(env.spec, reward_threshold=threshold)
        monkeypatch.setattr(env, "success", said.get)
        results = run(play_episodes(Player(), env, 6, 1_000, None, 7))  # type: ignore[arg-type]
        assert results.returns.tolist() == [6, 30, 9] * 2
        return None if results.solved is None else results.solved.tolist()

    assert solved(None, {}) is None
    assert solved(None, {0: True}) == [True, False, False] * 2  # the others are silent, because they fail
    assert solved(9, {}) == [False, True, True] * 2
    assert solved(None, {0: True, 1: False, 2: True}) == [True, False, True] * 2
    assert solved(9, {0: True, 1: False}) == [True, False, False] * 2


def test_a_test_reports_the_share_solved_if_known(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    context = make_context(tmp_path)
    model = save_model(context)
    assert all(mode_2.tester(context, 0))
    report = json.loads(model.with_name("run 1_test.json").read_text())
    assert (
        "solved_share" not in report["summary"]
        and "solved" not in report
        and "solved_share" not in capsys.readouterr().out
    )
    Countdown.threshold = 9
    try:
        assert all(mode_2.tester(context, 0))
    finally:
        Countdown.threshold = None
    report = json.loads(model.with_name("run 1_test.json").read_text())
    assert report["solved"] == [False, True, True, False, True, True, False]
    assert report["summary"]["solved_share"] == pytest.approx(4 / 7) and "solved_share 0.57" in capsys.readouterr().out


def test_feed_forward_agents_have_an_empty_state() -> None:
    agent = Player(recurrent=False)
    assert run(play_episodes(agent, Countdown(Params(), "game", 2), 2, 100, "exploration", 1)).lengths.tolist() == [
        3,
        5,
    ]  # type: ignore[arg-type]
    assert set(agent.explorations) == {"exploration"}


def test_rendered_steps_show_environment_0_with_score_and_action() -> None:
    scenes: list[RenderedStep] = []
    env = Countdown(Params(), "game", 2, render_mode="rgb_array")
    run(play_episodes(Player(), env, 3, 100, None, 7, scenes.append))  # type: ignore[arg-type]
    assert [(scene.length, scene.score) for scene in scenes] == [
        (0, 0),
        (1, 1),
        (2, 3),
        (3, 6),
        (0, 0),
        (1, 1),
        (2, 3),
        (3, 6),
    ]
    assert [int(scene.picture[0, 0, 0]) for scene in scenes] == [40 * scene.length for scene in scenes]
    assert [int(scene.observation[0]) for scene in scenes] == [scene.length for scene in scenes]
    assert [None if scene.action is None else int(scene.action) for scene in scenes] == [None, 0, 1, 2, 0, 0, 1, 2]
    assert [scene.diagnostics.get("action doubled") for scene in scenes] == [None, 0, 2, 4, 0, 0, 2, 4]


def test_rendered_steps_keep_their_picture_if_the_environment_draws_over_it() -> None:
    class Redrawing(Countdown):
        canvas = np.zeros((21, 16, 3), np.uint8)

        def render(self) -> np.ndarray:
            self.canvas[:] = super().render()
            return self.canvas

    scenes: list[RenderedStep] = []
    env = Redrawing(Params(), "game", 1, render_mode="rgb_array")
    run(play_episodes(Player(), env, 1, 100, None, 7, scenes.append))  # type: ignore[arg-type]
    assert [int(scene.picture[0, 0, 0]) for scene in scenes] == [0, 40, 80, 120]


# mode 2 -----------------------------------------------------------------------------------------------------------
def make_context(folder: Path, **settings: Any) -> Context:
    options = SimpleNamespace(
        **{
            "model_file": None,
            "model_path": folder / "models" / "run 1.pth",
            "device": "cpu",
            "episodes": 7,
            "render": False,
            "record": False,
            "video": VideoParams(),
            "seed": 3,
            "game": "game",
            "env": Params(),
            "env_type": "countdown",
            "env_class": Countdown,
            "evaluator": EvaluatorParams(num_envs=3, max_steps=1_000),
            "rate_limiter": RateLimiterParams(),
            "make_agent": lambda spec, device, precision: Player(),
            "to_dict": lambda: {"all": "options"},
            **settings,
        }
    )
    spec = EnvSpec("game", ArraySpec((2,), "float32"), 0, Discrete(3), frames_per_step=4)
    return Context(
        options,
        spec,
        (("tester", 0),),
        {},
        ParameterStore(1),
        RunCounters(1, 1),
        RunState(1),
        LogRings(1),
        initial_weights=Path(options.model_file or options.model_path),
    )


def save_model(context: Context) -> Path:
    save_weights(context.options.model_path, Network().state_dict(), {"best": 1.5})
    return context.options.model_path


def test_every_return_is_written_and_the_summary_printed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    context = make_context(tmp_path / "ü n")
    model = save_model(context)
    path = model.with_name("run 1_test.json")
    elsewhere = path.with_name(f".temporary_1_{path.name}")
    elsewhere.write_text("of another test of this model")
    assert all(mode_2.tester(context, 0))
    elsewhere.unlink()  # which the test has left alone
    report = json.loads(path.read_text())
    returns = [6, 30, 9, 6, 30, 9, 6]
    mean = sum(returns) / 7
    std = math.sqrt(sum((value - mean) ** 2 for value in returns) / 7)
    assert (
        report["returns"] == returns
        and report["lengths"] == [3, 5, 2, 3, 5, 2, 3]
        and report["truncated"] == [False] * 7
    )
    assert report["summary"] == pytest.approx(
        {
            "episodes": 7,
            "mean": mean,
            "std": std,
            "median": 9,
            "min": 6,
            "max": 30,
            "mean_length": 23 / 7,
            "truncated": 0,
            "human_normalized": mean / 100,
        }
    )
    assert report["protocol"] == {
        "env_type": "countdown",
        "env": {"sticky": 0.25},
        "max_steps": 1_000,
        "num_envs": 3,
        "exploration": {"epsilon": 0.01},
    }
    assert (report["model_file"], report["model"], report["seed"], report["options"]) == (
        str(model),
        {"best": 1.5},
        3,
        {"all": "options"},
    )
    assert (
        report["versions"]["torch"] == torch.__version__.partition("+")[0]
        or report["versions"]["torch"] == torch.__version__
    )
    printed = capsys.readouterr().out
    assert (
        f"mean {mean:.2f}, std {std:.2f}, median 9.00, min 6.00, max 30.00" in printed
        and "human_normalized 0.14" in printed
    )
    assert str(path) in printed and "episode 7/7" in printed
    env = Countdown.made[0]
    assert env.closed and not env.training
    assert sorted(entry.name for entry in model.parent.iterdir()) == ["run 1.pth", "run 1_test.json"]


def test_the_weights_of_the_file_are_those_that_play(tmp_path: Path) -> None:
    agent = Player()
    context = make_context(
        tmp_path, make_agent=lambda spec, device, precision: agent, model_file=str(tmp_path / "other.pth")
    )
    network = Network()
    save_weights(tmp_path / "other.pth", network.state_dict(), {})
    list(mode_2.tester(context, 0))
    assert torch.equal(agent.model.layer.weight, network.layer.weight)
    assert (tmp_path / "other_test.json").exists()


@pytest.mark.parametrize(("render", "made"), [(False, (2, None)), (True, (1, "human"))])
def test_fewer_episodes_or_a_window_need_fewer_environments(tmp_path: Path, render: bool, made: tuple) -> None:
    context = make_context(tmp_path, episodes=2, render=render)
    save_model(context)
    list(mode_2.tester(context, 0))
    assert (Countdown.made[0].num_envs, Countdown.made[0].render_mode) == made


def test_an_endless_environment_is_truncated_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imageio = pytest.importorskip("imageio")
    monkeypatch.setattr(Countdown, "lengths", (ENDLESS,))
    context = make_context(tmp_path, episodes=2, record=True, evaluator=EvaluatorParams(max_steps=20))
    model = save_model(context)
    list(mode_2.tester(context, 0))
    report = json.loads(model.with_name("run 1_test.json").read_text())
    assert (
        report["returns"] == [210, 210] and report["truncated"] == [True, True] and report["summary"]["truncated"] == 2
    )
    assert (Countdown.made[0].num_envs, Countdown.made[0].render_mode) == (1, "rgb_array")
    with imageio.get_reader(model.with_name("run 1_test.mp4")) as video:
        pictures = list(video.iter_data())
        assert video.get_meta_data()["fps"] == 15
    assert len(pictures) == 1 + 20 + 1 + 20  # two resets, and each step
    assert abs(float(pictures[3].mean()) - 3 * 40) < 10


def test_a_recording_that_cannot_begin_closes_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio", None)
    context = make_context(tmp_path, record=True)
    save_model(context)
    with pytest.raises(ImportError):
        list(mode_2.tester(context, 0))
    assert Countdown.made[0].closed


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), (b"", "is empty"), (bytes(500), "not a model file")]
)
def test_a_file_that_is_no_model_is_refused_before_playing(tmp_path: Path, content: bytes | None, message: str) -> None:
    context = make_context(tmp_path)
    if content is not None:
        context.options.model_path.parent.mkdir()
        context.options.model_path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        list(mode_2.tester(context, 0))
    assert not Countdown.made


def test_an_interrupted_test_prints_a_summary_and_writes_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    context = make_context(tmp_path)
    model = save_model(context)
    generator = mode_2.tester(context, 0)
    for _ in range(4):
        next(generator)
    context.run_state.stop(interrupt=True)
    assert list(generator) == []
    assert Countdown.made[0].closed and [entry.name for entry in model.parent.iterdir()] == [model.name]
    first, second, summary, note = capsys.readouterr().out.splitlines()
    assert first.startswith("episode 1/7: return 9,") and second.startswith("episode 2/7: return 6,")
    assert summary.startswith("run 1.pth on game: episodes 2, mean 7.50, std 1.50, median 7.50, min 6.00, max 9.00,")
    assert note == f"interrupted: {model.with_name('run 1_test.json')} was not written"


def test_a_test_that_is_interrupted_in_its_first_episodes_prints_nothing(tmp_path, capsys) -> None:
    context = make_context(tmp_path)
    save_model(context)
    generator = mode_2.tester(context, 0)
    next(generator)
    context.run_state.stop(interrupt=True)
    assert list(generator) == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [BrokenPipeError, OSError, ValueError])
def test_a_test_with_a_closed_output_still_writes_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def closed(*words: object, flush: bool) -> None:
        raise error

    context = make_context(tmp_path)
    model = save_model(context)
    monkeypatch.setattr("builtins.print", closed)
    assert all(mode_2.tester(context, 0))
    assert json.loads(model.with_name("run 1_test.json").read_text())["summary"]["episodes"] == 7


def test_an_interrupted_test_closes_environment_and_video(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    imageio = pytest.importorskip("imageio")
    context = make_context(tmp_path, record=True)
    model = save_model(context)
    generator = mode_2.tester(context, 0)
    for _ in range(4):
        next(generator)
    context.run_state.stop(interrupt=True)
    assert list(generator) == [] and Countdown.made[0].closed
    assert f"video: {model.with_name('run 1_test.mp4')}" in capsys.readouterr().out
    with imageio.get_reader(model.with_name("run 1_test.mp4")) as video:
        assert len(list(video.iter_data())) == 5
    assert not model.with_name("run 1_test.json").exists()
