"""Recordings show frames, captions and curves, and become readable files."""

import dataclasses
import json
import re
import shlex
from types import SimpleNamespace

import numpy as np
import pytest

from core.agent import ActorOutput
from core.agents.base.action_values import QLearning
from core.agents.base.actor_critic import ActorCriticAgent
from core.evaluation import video
from core.evaluation.episodes import RenderedStep
from core.evaluation.video import (
    BACKGROUND,
    HISTORY,
    PANEL_WIDTH,
    EpisodeRenderer,
    Video,
    curve_strip,
    observation_sheet,
    record_episode,
)
from core.ops.policy_distributions import Categorical, MultiCategorical
from core.runtime.options import EvaluatorParams, VideoParams
from core.runtime.run_state import RunState
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import TimeStep
from utils.config.command_line import read_options
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context

imageio = pytest.importorskip("imageio")
STACK = EnvSpec("game", ArraySpec((8, 8), "uint8"), 4, Discrete(3), frames_per_step=4, is_image=True, max_value=255.0)
PLANES = EnvSpec("game", ArraySpec((5, 5, 3 + 2), "uint8"), 0, Discrete(3), is_image=True)
COLOUR = EnvSpec("game", ArraySpec((5, 5, 3), "uint8"), 2, Discrete(3), is_image=True, max_value=255.0)
VECTOR = EnvSpec("game", ArraySpec((5,), "float32"), 0, Discrete(3))


def scene(step, height=21, width=15, spec=STACK):
    """Return step `step` of an episode.

    Step 0 is a reset; the action that led to step k is k, and the agent's value before it is 10 k.
    """
    outlook = {"value": np.float32(10 * step), "probabilities": np.float32([0.2, 0.8])} if step else {}
    return RenderedStep(
        np.full((height, width, 3), 50 + step, np.uint8),
        np.full(spec.observation_shape, step, spec.frame.dtype),
        float(-step),
        step,
        np.int64(step) if step else None,
        outlook,
    )


@pytest.fixture
def shoot(monkeypatch, tmp_path):
    """Return a function that renders these steps, or as many of an episode, and returns the frames."""

    def make(steps, **settings):
        frames = []
        monkeypatch.setattr(Video, "add", lambda self, picture: frames.append(picture.copy()))
        spec = settings.pop("spec", STACK)
        made = EpisodeRenderer(tmp_path / "film.mp4", VideoParams(**settings), spec)
        for step in steps if isinstance(steps, list) else range(steps):
            made.add(scene(step, spec=spec))
        made.close()
        return frames

    return make


def test_without_overlay_the_frame_is_the_games_own(shoot):
    frames = shoot(4)
    assert [frame.shape for frame in frames] == [(21, 15, 3)] * 4
    assert [int(frame.mean()) for frame in frames] == [50, 51, 52, 53]


@pytest.mark.parametrize("spec", [STACK, PLANES, COLOUR, VECTOR])
@pytest.mark.parametrize("settings", [{"overlay": True}, {"panel": True}, {"overlay": True, "panel": True}])
def test_all_frames_of_a_video_have_the_same_even_size(shoot, settings, spec):
    shapes = {frame.shape for frame in shoot(4, spec=spec, **settings)}
    assert len(shapes) == 1
    height, width, _ = shapes.pop()
    assert height % 2 == width % 2 == 0 and width > 15 and height >= 320


def test_an_enlarged_frame_keeps_its_pixels_above_the_caption(shoot):
    frame = shoot(1, overlay=True)[0]
    assert (frame[:336, :240] == 50).all()  # 21 x 15, enlarged sixteen times
    assert (frame[336:362, :240] > 200).any()


def test_the_caption_names_the_action_chosen_in_its_frame(shoot, monkeypatch):
    told = []
    original = video.caption
    monkeypatch.setattr(video, "caption", lambda *words: told.append((words[0].length, words[1])) or original(*words))
    shoot([0, 1, 2, 0, 1], overlay=True)
    # An environment ignores the action that follows the end of an episode.
    assert told == [(0, 1), (1, 2), (2, None), (0, 1), (1, None)]


def test_the_caption_names_actions_of_any_shape():
    action = np.float32([[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]])
    assert (video.caption(scene(1), action, 400) == video.caption(scene(1), action.ravel(), 400)).all()


def test_the_curves_of_a_frame_end_with_its_own_value(shoot, monkeypatch):
    drawn = []
    original = video.curve_strip

    def noted(name, history):
        drawn.append((name, [part.tolist() for part in history]))
        return original(name, history)

    monkeypatch.setattr(video, "curve_strip", noted)
    shoot([0, 1, 2, 0, 1], panel=True)
    values = [history for name, history in drawn if name == "value"]
    first, second = [[10.0]], [[10.0], [20.0]]
    assert values == [first, second, second, [*second, [10.0]], [*second, [10.0]]]  # none at the end of an episode
    assert {len(history[-1]) for name, history in drawn if name == "probabilities"} == {2}


def test_the_network_input_is_tiled_frame_by_frame():
    stack = np.arange(4, dtype=np.uint8)[:, None, None] * 60 * np.ones((4, 8, 8), np.uint8)
    sheet = observation_sheet(stack, STACK)
    half = PANEL_WIDTH // 2
    assert [int(sheet[row * half + 70, column * half + 70, 0]) for row in range(2) for column in range(2)] == [
        0,
        60,
        120,
        180,
    ]
    assert (sheet[half - 1, :] == BACKGROUND).all()  # the border between the tiles
    planes = np.zeros((5, 5, 5), np.uint8)
    planes[2, 2, 4] = 1
    side = PANEL_WIDTH // 3
    sheet = observation_sheet(planes, PLANES)
    assert sheet.shape == (2 * side, PANEL_WIDTH, 3)
    # the fifth of five planes, three per line
    assert (np.argwhere(sheet[..., 0] == 255).min(0) // side).tolist() == [1, 1]
    assert observation_sheet(np.zeros(5, np.float32), VECTOR).shape == (0, PANEL_WIDTH, 3)


def test_a_curve_rises_to_its_newest_value_at_the_right_edge():
    picture = curve_strip("value", [np.array([float(value)]) for value in range(HISTORY)])
    rows, columns = np.nonzero(picture[video.LABEL_HEIGHT :, :, 2] > 150)
    assert PANEL_WIDTH - 3 <= columns.max() <= PANEL_WIDTH - 1 and columns.min() <= 3
    assert rows[columns == columns.max()].max() < rows[columns == columns.min()].min()


def test_agents_describe_their_output_for_a_step():
    output = ActorOutput(
        np.zeros(1, np.int64),
        {
            "q_max": np.float32([3]),
            "q_taken": np.float32([1]),
            "value": np.float32([2]),
            "logits": np.log(np.float32([[1, 3]])),
        },
        (),
    )
    assert QLearning.policy_diagnostics(None, output)["value, best and taken"].tolist() == [[3, 1]]
    agent = SimpleNamespace(_has_numbers=False, policy=Categorical())
    found = ActorCriticAgent.policy_diagnostics(agent, output)
    assert found["value"].tolist() == [2] and found["action probabilities"][0].tolist() == pytest.approx([0.25, 0.75])
    agent.policy, output.extras["logits"] = MultiCategorical([2, 2]), np.log(np.float32([[1, 3, 1, 4]]))
    found = ActorCriticAgent.policy_diagnostics(agent, output)["action probabilities"]
    assert found[0].tolist() == pytest.approx([0.25, 0.75, 0.2, 0.8])
    agent._has_numbers, output.extras["drawn_action"] = True, np.float32([[0.5, -3]])
    found = ActorCriticAgent.policy_diagnostics(agent, output)
    assert {name: values.tolist() for name, values in found.items()} == {"value": [2], "actions": [[0.5, -3]]}


@pytest.mark.parametrize(
    ("spec", "fps", "rate"),
    [
        (STACK, None, 15),
        (PLANES, None, 60),
        (PLANES, 12.5, 12.5),
        (dataclasses.replace(STACK, frame_rate=50.0), None, 12.5),
    ],
)
def test_a_video_plays_at_the_games_rate_or_at_video_fps(spec, fps, rate, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(video, "Video", lambda path, rate: asked.append(rate))
    EpisodeRenderer(tmp_path / "a.mp4", VideoParams(fps=fps), spec)
    assert asked == [rate]


@pytest.mark.parametrize(
    ("name", "asked", "written", "rate"),
    [
        ("a.mp4", 15, 10, 15),
        ("a.gif", 15, 10, 15),
        ("a.gif", 60, 5, 30),
        ("a.mp4", 60, 10, 60),
        ("a.gif", 0.01, 10, 0.01),  # the smallest video.fps
    ],
)
def test_a_video_file_has_all_frames_at_the_requested_rate(tmp_path, name, asked, written, rate):
    video = Video(tmp_path / name, asked)
    for number in range(10):
        video.add(np.full((20, 16, 3), 20 * number, np.uint8))
    video.close()
    with imageio.get_reader(tmp_path / name) as reader:
        pictures, facts = list(reader.iter_data()), reader.get_meta_data()
    assert len(pictures) == written and pictures[0].shape[:2] == (20, 16)
    stride = 10 // written
    assert abs(float(pictures[-1][..., :3].mean()) - 20 * stride * (written - 1)) < 10
    # a GIF has a resolution of 10 ms
    assert facts["fps"] == rate if "fps" in facts else abs(facts["duration"] - 1000 / rate) < 10


def test_the_evaluator_records_every_second_evaluation(root):
    options = read_options(
        [
            "--root",
            str(root),
            *shlex.split(
                "--config dqn-minatar-breakout --engine inline --rate_limiter.min_replay_size 50 "
                "--memory.capacity 1000 --agent.batch_size 2 --evaluator.steps 40 --evaluator.episodes 1 "
                "--evaluator.max_steps 3 --evaluator.record_every 2 --evaluator.record_steps 4 --steps 170"
            ),
        ]
    )
    context, agent = create_context(options)
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict)) == 0
    lines = map(json.loads, (context.options.log_folder / "metrics.jsonl").read_text().splitlines())
    evaluations = [line["step"] for line in lines if "evaluator/episodic_return_mean" in line["values"]]
    files = sorted((context.options.log_folder / "videos").iterdir())
    assert len(evaluations) >= 3 and [file.name for file in files] == [
        f"step_{step:012}.mp4" for step in evaluations[1::2]
    ]
    with imageio.get_reader(files[0]) as reader:
        assert len(list(reader.iter_data())) == 1 + 4  # the reset and each step


def test_a_video_writer_that_ended_raises_oserror(tmp_path):
    video = Video(tmp_path / "a.mp4", 15)
    ended = iter([])
    video._writer.append_data = lambda picture: next(ended)
    with pytest.raises(OSError, match="ffmpeg has ended"):
        video.add(np.zeros((20, 16, 3), np.uint8))
    video.close()


class Drawn:
    """Act as an agent and as an environment of endless episodes that can be rendered."""

    def __init__(self):
        self.spec, self.closed = STACK, False

    def evaluation_exploration(self, num_envs, generator):
        return None

    def initial_state(self, num_envs):
        return ()

    def act(self, timestep, state, exploration):
        return ActorOutput(np.zeros(1, np.int64), {}, state)

    def policy_diagnostics(self, output):
        return {}

    def reset(self, seed):
        no = np.zeros(1, bool)
        return TimeStep(
            np.zeros((1, *STACK.observation_shape), np.uint8), np.zeros(1), np.ones(1), ~no, no, np.zeros(1)
        )

    def step(self, action):
        return self.reset(0)._replace(first=np.zeros(1, bool))

    def render(self):
        return np.zeros((21, 16, 3), np.uint8)

    def close(self):
        self.closed = True


def context_of(drawn, folder):
    evaluator = EvaluatorParams(record_steps=9)
    return SimpleNamespace(
        options=SimpleNamespace(video=VideoParams(), evaluator=evaluator, log_folder=folder),
        spec=STACK,
        run_state=RunState(1),
        seed=lambda role, index, salt: 0,
        make_env=lambda num_envs, **settings: drawn,
    )


@pytest.mark.parametrize("writes", [0, 2])
def test_a_full_disk_ends_the_video_but_not_the_run(writes, tmp_path, monkeypatch, capsys):
    drawn, written = Drawn(), []

    def full(self, picture):
        written.append(picture)
        if len(written) > writes:
            raise OSError("No space left on device")

    monkeypatch.setattr(Video, "add", full)
    list(record_episode(context_of(drawn, tmp_path), 0, drawn, 12))
    assert re.search(
        r"video .*/step_000000000012\.mp4 not written, training goes on, and the next .*: No space left on device",
        capsys.readouterr().err,
    )
    assert drawn.closed


def test_an_interrupted_recording_is_readable(tmp_path):
    drawn = Drawn()
    context = context_of(drawn, tmp_path)
    for number, _ in enumerate(record_episode(context, 0, drawn, 12), 1):
        if number == 3:
            context.run_state.stop(interrupt=True)
    assert drawn.closed
    with imageio.get_reader(tmp_path / "videos" / "step_000000000012.mp4") as reader:
        assert len(list(reader.iter_data())) == 1 + 3  # the reset and the steps before the run ended


def test_recording_is_refused_if_the_environment_cannot_render(root, monkeypatch, capsys):
    from core.envs.minatar import MinAtarEnv

    monkeypatch.setattr(
        MinAtarEnv, "render", lambda self: (_ for _ in ()).throw(NotImplementedError("MinAtarEnv draws no pictures"))
    )
    with pytest.raises(SystemExit) as refused:
        read_options(["--root", str(root), "--config", "dqn-minatar-breakout", "--evaluator.record_every", "1"])
    assert refused.value.code == 2
    assert "evaluator.record_every=1: MinAtarEnv draws no pictures" in capsys.readouterr().err
