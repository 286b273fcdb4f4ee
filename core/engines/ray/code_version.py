"""Compares the code of a node with the code that main runs."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from core.engines.run_end import BAD_OPTIONS

PROJECT = Path(__file__).resolve().parents[3]
PACKAGES = ("core", "utils")


class CodeMismatchError(RuntimeError):
    """A node has another version of the project than main."""

    exit_code = BAD_OPTIONS


def code_digests() -> dict[str, str]:
    """Return the digest of each of the project's files, by its path in the project."""
    files = [path for package in PACKAGES for path in (PROJECT / package).rglob("*.py")]
    return {
        str(path.relative_to(PROJECT)): hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() for path in files
    }


def check_code(expected: Mapping[str, str], node: str) -> None:
    """Compare the files here, on `node`, with main's. Raises CodeMismatchError, which names a file that differs."""
    own = code_digests()
    if differing := sorted(path for path in own.keys() | expected.keys() if own.get(path) != expected.get(path)):
        more = f" and {len(differing) - 1} more files" if len(differing) > 1 else ""
        raise CodeMismatchError(
            f"node {node} has another version of the code than main: {differing[0]}{more} differ in {PROJECT}; "
            "bring that folder to main's version, then continue the run"
        )
