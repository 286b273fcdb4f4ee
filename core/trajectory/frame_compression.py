"""Packed frames as their writer leaves them.

The frames of one chunk and stream are one lz4 block, since neighbouring frames resemble each other. Each actor has an arena of
fixed size: blocks follow one another round it, none is split, and before bytes are overwritten the chunks they belong to are taken
from the readers by raising `oldest`, just as `written` gives rows to them. The newest chunk, the one in the making and the row after it lie
unpacked in a short ring.
"""

import zlib
from typing import Any, Final, Literal

import lz4.block
import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass

USUAL_RATIO = 16      # by which frames of Atari shrink at the least
COPIES_RATIO = 8      # the same for whole unrolls that a rule keeps copies of
RAW: Final = "raw"


@frozen_dataclass
class StorageParams:
    """Options of how frames are stored in the replay."""

    codec: Literal["raw", "lz4"] = RAW
    """Compression of the frames in the replay."""
    bytes: int | None = Field(default=None, ge=1, le=10**15)
    """Bytes that frames may take; None is memory.capacity's for raw frames, a sixteenth of it for lz4."""
    level: int = Field(default=0, ge=0, le=12)
    """Level of lz4: 0 is fast; 1 to 12 are smaller and at least ten times slower."""
    threads: int = Field(default=1, ge=1, le=256)
    """Threads that gather and unpack the frames of a batch."""


class CorruptedBlock(ValueError):
    """Packed frames are not what was written."""

    def __init__(self, problem: str):
        super().__init__(f"{problem}: the replay is damaged. Continue from the last checkpoint; if it happens again the machine's memory "
                         "is not sound")


def compress(frames: np.ndarray, level: int) -> tuple[bytes, int]:
    """A block, and its checksum."""
    data = np.ascontiguousarray(frames).data.cast("B")
    mode: dict[str, Any] = {"mode": "high_compression", "compression": level} if level else {}
    block = lz4.block.compress(data, store_size=False, **mode)
    return block, zlib.crc32(block)


def decompressed(data: Any, check: int, size: int) -> np.ndarray | None:
    """[size] uint8; None for what is not a sound block of that size."""
    if zlib.crc32(data) != check:
        return None
    try:
        frames = np.frombuffer(lz4.block.decompress(data, uncompressed_size=size), np.uint8)
    except lz4.block.LZ4BlockError:
        return None
    return frames if len(frames) == size else None
