"""Lossless compression of frames with lz4.

The frames of one chunk and environment form one lz4 block, because neighbouring frames resemble each other.
core/trajectory/frame_arena.py stores the blocks.
"""

import zlib
from typing import Any, Final, Literal

import lz4.block
import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass

USUAL_RATIO = 16  # compression of Atari frames at the least
COPIES_RATIO = 8  # compression assumed for whole unrolls that a replay strategy copies
RAW: Final = "raw"


@frozen_dataclass
class StorageParams:
    """Options of how frames are stored in the replay."""

    frame_compression: Literal["raw", "lz4"] = RAW
    """Compression of the frames in the replay."""
    max_frame_bytes: int | None = Field(default=None, ge=1, le=10**15)
    """Bytes that frames may take; None is memory.capacity's for raw frames, a sixteenth of it for lz4."""
    compression_level: int = Field(default=0, ge=0, le=12)
    """Level of lz4: 0 is fast; 1 to 12 are smaller and at least ten times slower."""
    gather_threads: int = Field(default=1, ge=1, le=256)
    """Threads that gather and unpack the frames of a batch."""


class CorruptedBlock(ValueError):
    """An error that is raised for a compressed block whose content is not what its writer stored."""

    def __init__(self, problem: str):
        super().__init__(
            f"{problem}: the replay is damaged. Continue from the last checkpoint. If it happens again, "
            "the machine's memory is faulty."
        )


def compress(frames: np.ndarray, level: int) -> tuple[bytes, int]:
    """Return the frames as one block, and its CRC-32 checksum."""
    data = np.ascontiguousarray(frames).data.cast("B")
    mode: dict[str, Any] = {"mode": "high_compression", "compression": level} if level else {}
    block = lz4.block.compress(data, store_size=False, **mode)
    return block, zlib.crc32(block)


def decompressed(data: Any, check: int, size: int) -> np.ndarray | None:
    """Return the bytes of a block, [size] uint8; if its checksum or size is wrong, return None."""
    if zlib.crc32(data) != check:
        return None
    try:
        frames = np.frombuffer(lz4.block.decompress(data, uncompressed_size=size), np.uint8)
    except lz4.block.LZ4BlockError:
        return None
    return frames if len(frames) == size else None
