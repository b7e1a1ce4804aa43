"""Readers of texts for the prediction of the next character."""

import gzip
import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from outergrad_lab.data.dataset import Dataset
from outergrad_lab.data.files import reading

ROW = 129
TEST_SHARE = 0.1
BOOK = re.compile(r"\*\*\* START OF.*?\n(.*)\nEnd of (?:the )?Project Gutenberg", re.DOTALL)


def read_tinyshakespeare(folder: Path) -> Dataset:
    """Reads Shakespeare, for the prediction of each next character."""
    path = folder / "input.txt.gz"
    with reading(path):
        return _next_characters(_unpacked(path))


def read_war_and_peace(folder: Path) -> Dataset:
    """Reads War and Peace without its notices, for the prediction of each next character.

    Characters that come fewer than 10 times share one id, the last.
    """
    path = folder / "warandpeace.txt.gz"
    with reading(path):
        return _next_characters(_book(_unpacked(path)), fewest=10)


def _unpacked(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def _book(text: str) -> str:
    """Returns the text between Project Gutenberg's header and licence.

    Raises:
        ValueError: Header or licence are missing.
    """
    found = BOOK.search(text)
    if not found:
        raise ValueError("no notices of Project Gutenberg")
    return found[1].strip()


def _next_characters(text: str, fewest: int = 1) -> Dataset:
    """Cuts a text into rows of 129 characters without overlap.

    The first 128 characters of a row are the input, the last 128 the labels. The end of the text
    is the test.

    Args:
        text: The text.
        fewest: Characters that come less often share one id.

    Raises:
        ValueError: The text is too short to be trained on and tested.
    """
    ids, classes = _as_ids(text, fewest)
    rows = ids[: len(ids) // ROW * ROW].view(-1, ROW)
    tests = int(TEST_SHARE * len(rows))
    if not tests:
        raise ValueError(f"{len(text)} characters are too few")
    train, test = rows.split([len(rows) - tests, tests])
    return Dataset(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:], classes=classes)


def _as_ids(text: str, fewest: int) -> tuple[Tensor, int]:
    """Returns ids of the characters in their order, one id for rare ones, and the number of ids."""
    often = Counter(text)
    frequent = sorted(character for character in often if often[character] >= fewest)
    number = {character: place for place, character in enumerate(frequent)}
    rare = len(frequent)
    ids = torch.tensor([number.get(character, rare) for character in text])
    return ids, rare + (len(often) > rare)
