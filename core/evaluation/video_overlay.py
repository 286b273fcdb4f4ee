"""What a recording shows: the game's own picture and, if asked, what happened, what the network saw and what the agent made of it."""

from collections import deque
from pathlib import Path

import cv2
import numpy as np

from core.evaluation.episodes import RenderedStep
from core.evaluation.video_writer import Video
from core.runtime.options import VideoParams
from core.specs import EnvSpec

LEAST_HEIGHT = 320      # pixels of a picture that is not shown alone: smaller ones are enlarged
CAPTION_HEIGHT = 26
PANEL_WIDTH, STRIP_HEIGHT, LABEL_HEIGHT = 320, 96, 18
HISTORY = 200           # steps that a curve goes back
FONT, INK, PAPER = cv2.FONT_HERSHEY_SIMPLEX, (235, 235, 235), 40
COLOURS = ((86, 180, 233), (230, 159, 0), (0, 158, 115), (240, 228, 66), (213, 94, 0), (204, 121, 167))  # Okabe and Ito's, for all eyes


class EpisodeRenderer:
    """Scenes in, frames of one size out. A scene is drawn when the next one tells what was done in it."""

    def __init__(self, path: Path, params: VideoParams, spec: EnvSpec):
        self.video = Video(path, params.fps or spec.frame_rate / spec.frames_per_step)
        self._params, self._spec = params, spec
        self._held: RenderedStep | None = None
        self._curves: dict[str, deque[np.ndarray]] = {}

    def add(self, scene: RenderedStep) -> None:
        if self._held is not None:
            self._draw(self._held, scene)
        self._held = scene

    def close(self) -> None:
        try:
            if self._held is not None:
                self._draw(self._held, self._held)
        finally:
            self.video.close()

    def _draw(self, scene: RenderedStep, after: RenderedStep) -> None:
        """`after`: the next scene, with the action chosen in this one."""
        for name, values in after.outlook.items():
            self._curves.setdefault(name, deque(maxlen=HISTORY)).append(np.atleast_1d(values))
        self.video.add(self.frame(scene, after.action))

    def frame(self, scene: RenderedStep, action: np.ndarray | None) -> np.ndarray:
        """[H, W, 3] uint8, the picture untouched where nothing else is asked for."""
        if not (self._params.overlay or self._params.panel):
            return scene.picture
        picture = enlarged(scene.picture, -(-LEAST_HEIGHT // len(scene.picture)))
        if self._params.overlay:
            picture = np.concatenate([picture, caption(scene, action, picture.shape[1])])
        if self._params.panel:
            strips = [strip(name, list(curve)) for name, curve in self._curves.items()]
            panel = np.concatenate([seen(scene.observation, self._spec), *strips])
            height = max(len(picture), len(panel))
            picture = np.concatenate([padded(picture, height), padded(panel, height)], 1)
        return padded(picture, len(picture) + len(picture) % 2, picture.shape[1] + picture.shape[1] % 2)


def caption(scene: RenderedStep, action: np.ndarray | None, width: int) -> np.ndarray:
    """Score, step and action in a line of this width."""
    line = np.full((CAPTION_HEIGHT, width, 3), PAPER, np.uint8)
    chosen = "-" if action is None else " ".join(f"{value:.4g}" for value in np.atleast_1d(action)[:4])
    cv2.putText(line, f"score {scene.score:g}  step {scene.length}  action {chosen}", (6, 18), FONT, 0.45, INK, 1, cv2.LINE_AA)
    return line


def seen(observation: np.ndarray, spec: EnvSpec) -> np.ndarray:
    """Every frame of a stack, or every plane, side by side, [H, PANEL_WIDTH, 3]; nothing for vectors."""
    tiles = _tiles(observation, spec)
    if not tiles:
        return np.zeros((0, PANEL_WIDTH, 3), np.uint8)
    columns = int(np.ceil(np.sqrt(len(tiles))))
    width = PANEL_WIDTH // columns
    height = max(width * tiles[0].shape[0] // tiles[0].shape[1], 3)  # pictures need not be square
    sheet = np.full((-(-len(tiles) // columns) * height, PANEL_WIDTH, 3), PAPER, np.uint8)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        drawn = cv2.resize(tile, (width - 2, height - 2), interpolation=cv2.INTER_NEAREST)
        sheet[row * height:row * height + height - 2, column * width:column * width + width - 2] = drawn
    return sheet


def _tiles(observation: np.ndarray, spec: EnvSpec) -> list[np.ndarray]:
    """Each [H, W, 3] uint8."""
    if not spec.is_image:
        return []
    frames = list(observation) if spec.frame_stack else [observation]
    colour = len(spec.frame.shape) == 3 and spec.frame.shape[2] == 3
    planes = frames if colour else [plane for frame in frames for plane in np.moveaxis(np.atleast_3d(frame), 2, 0)]
    scaled = [(plane * (255.0 / spec.max_value)).astype(np.uint8) for plane in planes]
    return scaled if colour else [np.repeat(plane[..., None], 3, 2) for plane in scaled]


def strip(name: str, history: list[np.ndarray]) -> np.ndarray:
    """The curves of an [N] value over the last steps, newest at the right edge, [STRIP_HEIGHT, PANEL_WIDTH, 3]."""
    picture = np.full((STRIP_HEIGHT, PANEL_WIDTH, 3), PAPER, np.uint8)
    values = np.stack(history)  # [steps, N]
    low, high = float(values.min()), float(values.max())
    newest = " ".join(f"{value:.3g}" for value in values[-1][:4])
    cv2.putText(picture, f"{name} {newest}", (6, 13), FONT, 0.4, INK, 1, cv2.LINE_AA)
    x = PANEL_WIDTH - 2 - (PANEL_WIDTH - 4) / (HISTORY - 1) * np.arange(len(values) - 1, -1, -1)
    for number, line in enumerate(values.T):
        y = STRIP_HEIGHT - 4 - (STRIP_HEIGHT - LABEL_HEIGHT - 6) * (line - low) / ((high - low) or 1.0)
        points = np.stack([x, y], 1).round().astype(np.int32)
        cv2.polylines(picture, [points], False, COLOURS[number % len(COLOURS)], 1, cv2.LINE_AA)
    return picture


def enlarged(picture: np.ndarray, times: int) -> np.ndarray:
    return picture.repeat(times, 0).repeat(times, 1)


def padded(picture: np.ndarray, height: int, width: int | None = None) -> np.ndarray:
    """Black below and to the right."""
    return np.pad(picture, ((0, height - len(picture)), (0, (width or picture.shape[1]) - picture.shape[1]), (0, 0)))
