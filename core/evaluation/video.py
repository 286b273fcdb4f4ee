"""Record episodes as mp4 or GIF: the game's picture and, if asked, a caption, the network's input and value curves."""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from core.agent import Agent
from core.common.console import log_to_stderr
from core.evaluation.episodes import RenderedStep, play_episodes
from core.runtime.context import Context
from core.runtime.options import VideoParams
from core.specs import EnvSpec

MAX_GIF_RATE = 30.0  # frames per second, because browsers slow down faster GIFs


class Video:
    """A video file, which is readable once it has been closed.

    Args:
        path: The file; its suffix tells the format, .mp4 or .gif.
        rate: Pictures per second.
    """

    def __init__(self, path: Path, rate: float):
        import imageio  # options that record are refused without this extra

        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._count = path, 0
        self._stride = math.ceil(rate / MAX_GIF_RATE) if path.suffix == ".gif" else 1
        self._writer: Any
        if path.suffix == ".gif":
            self._writer = imageio.get_writer(path, mode="I", duration=1_000 * self._stride / rate, loop=0)
        else:
            # yuv420p needs even sides, and the default block size of 16 would stretch 210 x 160 pictures
            self._writer = imageio.get_writer(
                path, format="FFMPEG", fps=rate, macro_block_size=2, output_params=["-loglevel", "error"]
            )

    def add(self, picture: np.ndarray) -> None:
        """Append a picture [H, W, 3] uint8; all have the same size. Raises OSError once the disk is full."""
        if self._count % self._stride == 0:
            try:
                self._writer.append_data(picture)
            except StopIteration:  # ffmpeg ended on an earlier picture
                raise OSError("ffmpeg has ended") from None
        self._count += 1

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


MIN_HEIGHT = 320  # pixels to which a small picture is enlarged if anything is drawn beside it
CAPTION_HEIGHT = 26
PANEL_WIDTH, STRIP_HEIGHT, LABEL_HEIGHT = 320, 96, 18
HISTORY = 200  # steps that a curve shows
FONT, FOREGROUND, BACKGROUND = cv2.FONT_HERSHEY_SIMPLEX, (235, 235, 235), 40
# The palette of Okabe and Ito, which colour-blind viewers can distinguish
COLOURS = ((86, 180, 233), (230, 159, 0), (0, 158, 115), (240, 228, 66), (213, 94, 0), (204, 121, 167))


class EpisodeRenderer:
    """A video of rendered steps. A step is drawn once the next one is known, because that names the action taken."""

    def __init__(self, path: Path, params: VideoParams, spec: EnvSpec):
        self.video = Video(path, params.fps or spec.frame_rate / spec.frames_per_step)
        self._params, self._spec = params, spec
        self._previous: RenderedStep | None = None
        self._curves: dict[str, deque[np.ndarray]] = {}

    def add(self, step: RenderedStep) -> None:
        """Draw the previous step, and keep this one."""
        if self._previous is not None:
            self._draw(self._previous, step)
        self._previous = step

    def close(self) -> None:
        """Draw the last step and finish the file."""
        try:
            if self._previous is not None:
                self._draw(self._previous, None)
        finally:
            self.video.close()

    def _draw(self, step: RenderedStep, following: RenderedStep | None) -> None:
        if following is None or not following.length:  # the episode ended with this step, and no action was taken
            return self.video.add(self.frame(step, None))
        for name, values in following.diagnostics.items():
            self._curves.setdefault(name, deque(maxlen=HISTORY)).append(np.atleast_1d(values))
        self.video.add(self.frame(step, following.action))

    def frame(self, step: RenderedStep, action: np.ndarray | None) -> np.ndarray:
        """Return a frame [H, W, 3] uint8, which is the game's picture unless an overlay or a panel is asked for.

        Args:
            step: The step to draw.
            action: The action that was taken in it; None at the end of an episode.
        """
        if not (self._params.overlay or self._params.panel):
            return step.picture
        scale = -(-MIN_HEIGHT // len(step.picture))
        frame = step.picture.repeat(scale, 0).repeat(scale, 1)
        if self._params.overlay:
            frame = np.concatenate([frame, caption(step, action, frame.shape[1])])
        if self._params.panel:
            strips = [curve_strip(name, list(curve)) for name, curve in self._curves.items()]
            panel = np.concatenate([observation_sheet(step.observation, self._spec), *strips])
            height = max(len(frame), len(panel))
            frame = np.concatenate([_pad(frame, height, frame.shape[1]), _pad(panel, height, PANEL_WIDTH)], 1)
        return _pad(frame, len(frame) + len(frame) % 2, frame.shape[1] + frame.shape[1] % 2)  # yuv420p needs even sides


def caption(step: RenderedStep, action: np.ndarray | None, width: int) -> np.ndarray:
    """Return a line with score, step and action, [CAPTION_HEIGHT, width, 3]."""
    line = np.full((CAPTION_HEIGHT, width, 3), BACKGROUND, np.uint8)
    action_text = "-" if action is None else " ".join(f"{value:.4g}" for value in np.ravel(action)[:4])
    text = f"score {step.score:g}  step {step.length}  action {action_text}"
    cv2.putText(line, text, (6, 18), FONT, 0.45, FOREGROUND, 1, cv2.LINE_AA)
    return line


def observation_sheet(observation: np.ndarray, spec: EnvSpec) -> np.ndarray:
    """Return every frame of a stack, or every plane, side by side, [H, PANEL_WIDTH, 3]; H is 0 for vectors."""
    tiles = _tiles(observation, spec)
    if not tiles:
        return np.zeros((0, PANEL_WIDTH, 3), np.uint8)
    columns = int(np.ceil(np.sqrt(len(tiles))))
    width = PANEL_WIDTH // columns
    height = max(width * tiles[0].shape[0] // tiles[0].shape[1], 3)
    sheet = np.full((-(-len(tiles) // columns) * height, PANEL_WIDTH, 3), BACKGROUND, np.uint8)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        top, left = row * height, column * width
        scaled = cv2.resize(tile, (width - 2, height - 2), interpolation=cv2.INTER_NEAREST)
        sheet[top : top + height - 2, left : left + width - 2] = scaled
    return sheet


def _tiles(observation: np.ndarray, spec: EnvSpec) -> list[np.ndarray]:
    """Return the pictures in an observation, each [H, W, 3] uint8."""
    if not spec.is_image:
        return []
    frames = list(observation) if spec.frame_stack else [observation]
    shape = spec.picture_shape
    frames = [frame.reshape(-1)[: math.prod(shape)].reshape(shape) for frame in frames]  # without the vector beside it
    if len(shape) == 3 and shape[2] == 3:
        return [_scaled(frame, spec) for frame in frames]
    planes = [plane for frame in frames for plane in np.moveaxis(np.atleast_3d(frame), 2, 0)]
    return [np.repeat(_scaled(plane, spec)[..., None], 3, 2) for plane in planes]


def _scaled(pixels: np.ndarray, spec: EnvSpec) -> np.ndarray:
    return (pixels * (255.0 / spec.max_value)).astype(np.uint8)


def curve_strip(name: str, history: list[np.ndarray]) -> np.ndarray:
    """Return curves of an [N] value over the last steps, newest at the right edge, [STRIP_HEIGHT, PANEL_WIDTH, 3]."""
    picture = np.full((STRIP_HEIGHT, PANEL_WIDTH, 3), BACKGROUND, np.uint8)
    values = np.stack(history)  # [steps, N]
    low, high = float(values.min()), float(values.max())
    newest = " ".join(f"{value:.3g}" for value in values[-1][:4])
    cv2.putText(picture, f"{name} {newest}", (6, 13), FONT, 0.4, FOREGROUND, 1, cv2.LINE_AA)
    x = PANEL_WIDTH - 2 - (PANEL_WIDTH - 4) / (HISTORY - 1) * np.arange(len(values) - 1, -1, -1)
    for number, curve in enumerate(values.T):
        y = STRIP_HEIGHT - 4 - (STRIP_HEIGHT - LABEL_HEIGHT - 6) * (curve - low) / ((high - low) or 1.0)
        points = np.stack([x, y], 1).round().astype(np.int32)
        cv2.polylines(picture, [points], False, COLOURS[number % len(COLOURS)], 1, cv2.LINE_AA)
    return picture


def _pad(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the picture with black pixels added below and to the right."""
    return np.pad(picture, ((0, height - len(picture)), (0, width - picture.shape[1]), (0, 0)))


def record_episode(context: Context, index: int, agent: Agent, agent_steps: int) -> Iterator[bool]:
    """Play an episode of this evaluator into a video, which is named by the run's `agent_steps`.

    Yields True after each step. A full disk is reported and training continues.
    """
    options, seed = context.options, context.seed("evaluator", index, agent_steps)
    path = options.log_folder / "videos" / f"step_{agent_steps:012}.{options.video.format}"
    with closing(context.make_env(1, training=False, render_mode="rgb_array")) as env:
        exploration = agent.evaluation_exploration(1, np.random.default_rng(seed))
        try:
            with closing(EpisodeRenderer(path, options.video, context.spec)) as renderer:
                max_steps = options.evaluator.record_steps
                playing = play_episodes(agent, env, 1, max_steps, exploration, seed, renderer.add)
                yield from context.run_state.until_interrupted(playing)
        except OSError as error:
            log_to_stderr(f"video {path} not written, training goes on, and the next is tried when it is due: {error}")
