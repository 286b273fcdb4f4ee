"""The lock files hold everything that make train and make test install, with hashes; torch goes first, by itself."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]
LOCKS = {"requirements.txt": "requirements.lock", "requirements-dev.txt": "requirements-dev.lock"}


def requested(name: str) -> set[tuple[str, str]]:
    """Return the (name, version) pairs of a requirements file and of those it includes."""
    lines = [line.split("#")[0].strip() for line in (PROJECT / name).read_text().splitlines()]
    included = [requested(line.split()[1]) for line in lines if line.startswith("-r ")]
    own = {(canonicalize_name(line.split("==")[0]), line.split("==")[1]) for line in lines if "==" in line}
    return own.union(*included)


def locked(name: str) -> dict[str, set[str]]:
    """Return the locked versions of each package; a package may have one version per range of Python."""
    versions: dict[str, set[str]] = {}
    for package, version in re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", (PROJECT / name).read_text()):
        versions.setdefault(canonicalize_name(package), set()).add(version)
    return versions


def installed_needs(names: set[str]) -> set[str]:
    """Return these packages and their transitive requirements, by the metadata of the installed packages."""
    found, open_names = set(), set(names)
    while open_names:
        name = open_names.pop()
        found.add(name)
        try:
            needs = [Requirement(line) for line in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            continue
        open_names |= {canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})} - found
    return found


@pytest.mark.parametrize("requirements", LOCKS)
def test_every_requested_version_is_locked(requirements):
    versions = locked(LOCKS[requirements])
    wrong = {(name, version) for name, version in requested(requirements) if versions.get(name) != {version}}
    assert {name for name, _ in wrong} == {"torch"}, "run `make lock`"


@pytest.mark.parametrize("requirements", LOCKS)
def test_everything_those_need_is_locked(requirements):
    needs = installed_needs({name for name, _ in requested(requirements)})
    missing = needs - set(locked(LOCKS[requirements])) - {"torch"}
    assert not {name for name in missing if not name.startswith(("nvidia-", "cuda-", "triton"))}, "run `make lock`"


@pytest.mark.parametrize("lock", LOCKS.values())
def test_every_locked_package_has_a_hash(lock):
    entries = re.split(r"(?m)^(?=[\w.-]+==)", (PROJECT / lock).read_text())[1:]
    assert len(entries) > 20 and all("--hash=sha256:" in entry for entry in entries)


def test_both_lock_files_pin_the_same_versions():
    base, everything = locked("requirements.lock"), locked("requirements-dev.lock")
    assert {name: everything.get(name) for name in base} == base
