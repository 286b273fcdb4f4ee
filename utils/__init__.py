"""What a user runs and edits, and files on disk. Importing any of it first opens missing standard descriptors (utils/descriptors.py)."""

from utils.descriptors import open_missing

open_missing()
