"""Readers of texts with one class each."""

import csv
import gzip
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from outergrad_lab.data.cache import Arrays, cached, key_of
from outergrad_lab.data.dataset import Dataset
from outergrad_lab.data.files import as_labels, reading
from outergrad_lab.data.tokens import (
    VOCABULARY,
    as_tokens,
    learn_tokens,
    tokenizers_version,
)

CHARACTERS = 8
"""Characters read of a text per token: about twice as many as a token has on average."""

Part = tuple[list[str], np.ndarray]
"""Texts and their classes, int64, (texts,)."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Files of labelled texts, and how to read them.

    Attributes:
        name: Name of the data set.
        train: File to train on: gzipped CSV with a column ``label``.
        test: File to be tested on.
        column: Name of the column with the text.
        length: Tokens per row.
        classes: Number of classes.
        shuffled: Whether rows are put into a random order, the same every time.
    """

    name: str
    train: str
    test: str
    column: str
    length: int
    classes: int
    shuffled: bool


IMDB = Texts(
    name="imdb",
    train="train.csv.gz",
    test="test.csv.gz",
    column="text",
    length=128,
    classes=2,
    shuffled=True,  # the files are sorted by class
)
AG_NEWS = Texts(
    name="ag-news",
    train="train_subset.csv.gz",
    test="test.csv.gz",
    column="description",
    length=64,
    classes=4,
    shuffled=False,
)


def read_imdb(folder: Path) -> Dataset:
    """Reads reviews of films, 0 bad or 1 good: the first 128 tokens of each."""
    return _read(IMDB, folder)


def read_ag_news(folder: Path) -> Dataset:
    """Reads news without their titles, 0 world, 1 sports, 2 business, 3 science: 64 tokens."""
    return _read(AG_NEWS, folder)


def _read(texts: Texts, folder: Path) -> Dataset:
    """Reads ids and labels, from the cache if these files were read before."""
    paths = (folder / texts.train, folder / texts.test)
    settings = (texts, CHARACTERS, VOCABULARY, tokenizers_version(texts.name))
    arrays = cached(texts.name, key_of(settings, paths), partial(_make, texts, *paths))
    found = {name: torch.from_numpy(arrays[name].astype(np.int64)) for name in arrays}
    return Dataset(**found, classes=texts.classes, vocabulary=VOCABULARY)


def _make(texts: Texts, train: Path, test: Path) -> Arrays:
    """Returns the fields of a `Dataset`; the tokens are learnt from the training texts."""
    (train_texts, y_train), (test_texts, y_test) = (_part(texts, path) for path in (train, test))
    tokenizer = learn_tokens(train_texts)
    return {
        "x_train": as_tokens(tokenizer, train_texts, texts.length),
        "y_train": y_train,
        "x_test": as_tokens(tokenizer, test_texts, texts.length),
        "y_test": y_test,
    }


def _part(texts: Texts, path: Path) -> Part:
    """Returns the rows of one file.

    Raises:
        DamagedFileError: The file is damaged, or of another kind.
    """
    with reading(path):
        rows = list(csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))
        labels = np.array([int(row["label"]) for row in rows])
        as_labels(labels, len(rows), texts.classes)
        order = _order(texts, len(rows))
        return [_beginning(rows[place], texts) for place in order], labels[order]


def _order(texts: Texts, rows: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(rows) if texts.shuffled else np.arange(rows)


def _beginning(row: Mapping[str, str], texts: Texts) -> str:
    """Returns more of the text than becomes tokens, without line breaks in HTML."""
    return row[texts.column].replace("<br />", " ")[: CHARACTERS * texts.length]
