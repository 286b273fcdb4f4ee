"""Writing pictures to an mp4 or a GIF."""

import math
from pathlib import Path
from typing import Any

import numpy as np

GIF_FRAMES = 30.0       # a second at most: browsers slow down those that want more


class Video:
    """A file of `rate` pictures a second; its suffix says which kind. `close` finishes it, and it is readable from then on.

    Raises ImportError with the pip command when imageio or its ffmpeg is missing.
    """

    def __init__(self, path: Path, rate: float):
        try:
            import imageio
            import imageio_ffmpeg  # noqa: F401
        except Exception as error:  # a package that is there may be broken in any way
            raise ImportError("recording a video needs imageio and imageio-ffmpeg: pip install -e .[video]") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._count = path, 0
        self._stride = math.ceil(rate / GIF_FRAMES) if path.suffix == ".gif" else 1
        self._writer: Any
        if path.suffix == ".gif":
            self._writer = imageio.get_writer(path, mode="I", duration=1_000 * self._stride / rate, loop=0)
        else:  # yuv420p wants even sides; the default of 16 would stretch 210 x 160
            self._writer = imageio.get_writer(path, format="FFMPEG", fps=rate, macro_block_size=2, output_params=["-loglevel", "error"])

    def add(self, picture: np.ndarray) -> None:
        """picture: [H, W, 3] uint8, of one size in a file. Raises OSError once the disk is full."""
        if self._count % self._stride == 0:
            try:
                self._writer.append_data(picture)
            except StopIteration:  # ffmpeg ended on an earlier picture
                raise OSError("ffmpeg has ended") from None
        self._count += 1

    def close(self) -> None:
        self._writer.close()
