"""Readers of text."""

import gzip
from pathlib import Path

import torch

from outergrad.recipes.data.dataset import Dataset
from outergrad.recipes.data.files import reading

ROW = 129
TEST_SHARE = 0.1


def read_tinyshakespeare(folder: Path) -> Dataset:
    """Reads Shakespeare, to guess each next character.

    A row is 129 characters, none of which is in another row: the first 128 are the input, the
    last 128 the labels. The end of the text is the test.
    """
    text = _read_text(folder / "input.txt.gz")
    characters = sorted(set(text))
    number = {character: place for place, character in enumerate(characters)}
    ids = torch.tensor([number[character] for character in text])
    rows = ids[: len(ids) // ROW * ROW].view(-1, ROW)
    tests = int(TEST_SHARE * len(rows))
    train, test = rows.split([len(rows) - tests, tests])
    return Dataset(
        x_train=train[:, :-1],
        y_train=train[:, 1:],
        x_test=test[:, :-1],
        y_test=test[:, 1:],
        classes=len(characters),
    )


def _read_text(path: Path) -> str:
    with reading(path):
        text = gzip.decompress(path.read_bytes()).decode()
        if len(text) * TEST_SHARE < ROW:
            raise ValueError(f"{len(text)} characters are too few")
        return text
