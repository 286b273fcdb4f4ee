"""Files, headings and extras that the pages name exist."""

import re
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
PAGES = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")])
PLACE = re.compile(r"`((?:benchmarks|core|docs|tests|utils)/[\w./-]+\.\w+)`")


def anchors(page):
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_named_file_exists(page):
    for name in PLACE.findall(page.read_text()):
        # `make gpu` writes the exception
        assert (PROJECT / name).exists() or name == "docs/results/gpu.json", f"{name} is not there"


def test_contributing_names_every_extra():
    named = re.search(r"Extras are (.*?)\.\n", (PROJECT / "CONTRIBUTING.md").read_text(), re.S)[1]
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.findall(r"`([\w-]+)`", named) == list(extras)
