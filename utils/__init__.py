"""What a user runs and edits, and files on disk. Importing any of it first opens missing standard descriptors
(core/common/descriptors.py)."""

from core.common.descriptors import open_missing

open_missing()
