"""Links of README and docs lead somewhere, as a forge resolves them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from places import REPOSITORY
from written import ALL, blocks, prose

LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Of the headings of a page: lower case, letters, digits and hyphens, spaces as hyphens."""
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block.code, "")
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(text)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose(page)):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(REPOSITORY), link
        assert not anchor or anchor in anchors(target), link


def test_the_front_page_is_short():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 120
