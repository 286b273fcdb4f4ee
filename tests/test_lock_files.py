"""The lock files pin what pyproject.toml requests for `make train` and `make test`, with hashes, except torch."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]
DECLARED = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
LOCKS = {"": "requirements.lock", "test": "requirements-test.lock", "dev": "requirements-dev.lock"}  # of extras


def requested(extra: str) -> set[tuple[str, str]]:
    """Return the (name, version) pairs that the project requests, with those of an extra and of its extras."""
    found: set[tuple[str, str]] = set()
    for line in [*DECLARED["dependencies"], *(DECLARED["optional-dependencies"][extra] if extra else ())]:
        requirement = Requirement(line)
        if requirement.name == DECLARED["name"]:
            found = found.union(*map(requested, requirement.extras))
        else:
            (version,) = requirement.specifier
            assert version.operator == "==", f"{line} is not pinned"
            found.add((canonicalize_name(requirement.name), version.version))
    return found


ENTRY = r"(?m)^([\w.-]+)(?:\[[\w,-]+\])?=="  # of a lock file: a package with its extras


def locked(name: str) -> dict[str, set[str]]:
    """Return the locked versions of each package; a package may have one version per range of Python."""
    versions: dict[str, set[str]] = {}
    for package, version in re.findall(rf"{ENTRY}([^\s;]+)", (PROJECT / name).read_text()):
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
        open_names |= {
            canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
        } - found
    return found


@pytest.mark.parametrize("extra", LOCKS)
def test_every_requested_version_is_locked(extra):
    versions = locked(LOCKS[extra])
    wrong = {(name, version) for name, version in requested(extra) if versions.get(name) != {version}}
    assert {name for name, _ in wrong} == {"torch"}, "run `make lock`"


@pytest.mark.parametrize("extra", LOCKS)
def test_everything_those_need_is_locked(extra):
    needs = installed_needs({name for name, _ in requested(extra)})
    missing = needs - set(locked(LOCKS[extra])) - {"torch"}
    assert not {name for name in missing if not name.startswith(("nvidia-", "cuda-", "triton"))}, "run `make lock`"


@pytest.mark.parametrize("lock", LOCKS.values())
def test_every_locked_package_has_a_hash(lock):
    text = (PROJECT / lock).read_text()
    starts = [match.start() for match in re.finditer(ENTRY, text)]
    entries = [text[start:end] for start, end in zip(starts, [*starts[1:], None])]
    assert len(entries) > 20 and all("--hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("lock", ["requirements-test.lock", "requirements-dev.lock"])
def test_packages_are_locked_with_their_extras(lock):
    """pip takes coverage[toml], which pytest-cov needs, in its newest version if only coverage is locked."""
    assert re.search(r"(?m)^coverage\[toml\]==", (PROJECT / lock).read_text()), "make lock strips extras"


def test_all_lock_files_pin_the_same_versions():
    base, tests, everything = map(locked, LOCKS.values())
    assert {name: tests.get(name) for name in base} == base
    assert {name: everything.get(name) for name in tests} == tests
