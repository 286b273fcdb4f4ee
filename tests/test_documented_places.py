"""Files, headings and extras that the pages name exist."""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PAGES = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")])
PLACE = re.compile(r"`((?:benchmarks|core|docs|tests|utils)/[\w./-]+\.\w+)`")


def anchors(page):
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading():
    for page in PAGES:
        for link in re.findall(r"\]\((?!https://)([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page}: {link} leads nowhere"
            assert not anchor or anchor in anchors(target), f"{page}: {link}: no such heading"


def test_every_named_file_exists():
    named = {name for page in PAGES for name in PLACE.findall(page.read_text())}
    # `make gpu` writes the exception
    assert [name for name in named if not (PROJECT / name).exists()] in ([], ["docs/results/gpu.json"])


def test_contributing_names_every_extra():
    named = re.search(r"Extras are (.*?)\.\n", (PROJECT / "CONTRIBUTING.md").read_text(), re.S)[1]
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.findall(r"`([\w-]+)`", named) == list(extras)
