"""Write pictures to an mp4 or GIF file."""

import math
from pathlib import Path
from typing import Any

import numpy as np

MAX_GIF_RATE = 30.0  # frames per second, because browsers slow down faster GIFs


class Video:
    """A video file, which is readable once it has been closed.

    Args:
        path: The file; its suffix tells the format, .mp4 or .gif.
        rate: Pictures per second.

    Raises:
        ImportError: imageio or imageio-ffmpeg is missing; the message has the pip command.
    """

    def __init__(self, path: Path, rate: float):
        try:
            import imageio
            import imageio_ffmpeg  # noqa: F401
        except Exception as error:  # an installed package may be broken in any way
            raise ImportError("recording a video needs imageio and imageio-ffmpeg: pip install -e .[video]") from error
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
