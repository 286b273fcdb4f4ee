"""The package of what a user runs and edits. Importing any of it first opens missing standard descriptors."""

from core.common.console import open_missing_streams

open_missing_streams()
