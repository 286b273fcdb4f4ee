"""Writing pictures to an mp4."""

from pathlib import Path
from typing import Any

import numpy as np

EMULATOR_FRAMES = 60.0  # a second


class Video:
    """An mp4 that plays at the game's speed. `close` finishes the file, which is readable from then on.

    Raises ImportError with the pip command when imageio or its ffmpeg is missing.
    """

    def __init__(self, path: Path, frames_per_step: int):
        try:
            import imageio
            import imageio_ffmpeg  # noqa: F401
        except ImportError as error:
            raise ImportError("recording a video needs imageio: pip install -e .[video]") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        # yuv420p wants even sides; the default of 16 would stretch 210 x 160
        self._writer: Any = imageio.get_writer(path, format="FFMPEG", fps=EMULATOR_FRAMES / frames_per_step, macro_block_size=2,
                                               output_params=["-loglevel", "error"])

    def add(self, picture: np.ndarray) -> None:
        """picture: [H, W, 3] uint8."""
        self._writer.append_data(picture)

    def close(self) -> None:
        self._writer.close()
