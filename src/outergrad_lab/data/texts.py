"""Readers of texts: with one class each, and for the prediction of each next token."""

from __future__ import annotations

import csv
import gzip
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outergrad.core.packages import how_to_install
from outergrad.launch.errors import RecipeError
from outergrad_lab.data.cache import Arrays, cached, key_of
from outergrad_lab.data.dataset import Dataset
from outergrad_lab.data.files import as_labels, reading

Decoder = Callable[[Sequence[int]], str]
"""Makes a text of ids."""

VOCABULARY = 8000
PADDING = 0
"""Id that fills a row behind its text."""

try:
    import tokenizers
except ImportError:
    tokenizers = None


def tokenizers_version(data: str) -> str:
    """Returns the version of the tokenizers library, on which the tokens depend.

    Raises:
        RecipeError: It is not installed.
    """
    if tokenizers is None:
        raise RecipeError(f"--data {data} needs tokenizers: {how_to_install('tokenizers')}")
    return tokenizers.__version__


def learn_tokens(texts: Sequence[str]) -> Any:
    """Learns a tokenizer of at most `VOCABULARY` tokens, lower case, the padding included.

    It starts from bytes, so that it can encode every text; decoding gives lower case.
    Source: Sennrich, Haddow and Birch, 2016; over bytes as in GPT-2.
    """
    assert tokenizers is not None
    learnt = tokenizers.Tokenizer(tokenizers.models.BPE())
    learnt.normalizer = tokenizers.normalizers.Lowercase()
    learnt.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["[PAD]"],  # the first gets id 0
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learnt.train_from_iterator(texts, trainer)
    return learnt


def as_tokens(tokenizer: Any, texts: Sequence[str], length: int) -> np.ndarray:
    """Returns ids of the first tokens of each text, padded behind, uint16, (texts, length)."""
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PADDING, pad_token="[PAD]")
    return np.array([row.ids for row in tokenizer.encode_batch(texts)], np.uint16)


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
    frequent = _frequent(often, fewest)
    number = {character: place for place, character in enumerate(frequent)}
    rare = len(frequent)
    ids = torch.tensor([number.get(character, rare) for character in text])
    return ids, rare + (len(often) > rare)


def _frequent(often: Mapping[str, int], fewest: int) -> list[str]:
    """Returns the characters that have an id of their own, in the order of ids."""
    return sorted(character for character in often if often[character] >= fewest)


_RARE = "\N{REPLACEMENT CHARACTER}"


def tinyshakespeare_decoder(folder: Path) -> Decoder:
    """Returns what makes texts of the ids of `read_tinyshakespeare`."""
    return _characters_decoder(_unpacked(folder / "input.txt.gz"))


def war_and_peace_decoder(folder: Path) -> Decoder:
    """Returns what makes texts of the ids of `read_war_and_peace`."""
    return _characters_decoder(_book(_unpacked(folder / "warandpeace.txt.gz")), fewest=10)


def _characters_decoder(text: str, fewest: int = 1) -> Decoder:
    characters = [*_frequent(Counter(text), fewest), _RARE]
    return lambda ids: "".join(characters[place] for place in ids)


def imdb_decoder(folder: Path) -> Decoder:
    """Returns what makes texts, in lower case, of the ids of `read_imdb`."""
    return _tokens_decoder(IMDB, folder)


def ag_news_decoder(folder: Path) -> Decoder:
    """Returns what makes texts, in lower case, of the ids of `read_ag_news`."""
    return _tokens_decoder(AG_NEWS, folder)


def film_reviews_decoder(folder: Path) -> Decoder:
    """Returns what makes texts, in lower case, of the ids of `read_film_reviews`."""
    return _tokens_decoder(FILM_REVIEWS, folder)


def _tokens_decoder(texts: Texts, folder: Path) -> Decoder:
    """Learns the tokens as the reader did, when the first text is asked for."""

    @cache
    def learnt() -> Any:
        train, _ = _part(texts, folder / texts.train)
        return learn_tokens(train)

    return lambda ids: learnt().decode([*ids])


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


FILM_REVIEWS = replace(IMDB, name="film-reviews", length=sys.maxsize)
"""The same reviews, with all of their words."""


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


def read_film_reviews(folder: Path) -> Dataset:
    """Reads all words of IMDB's reviews, for the prediction of each next token.

    Reviews follow each other, with the padding's id between them, in rows of 129 tokens without
    overlap, as characters of a book.
    """
    paths = (folder / IMDB.train, folder / IMDB.test)
    settings = ("film-reviews", ROW, VOCABULARY, tokenizers_version("film-reviews"))
    arrays = cached("film-reviews", key_of(settings, paths), partial(_make_running, *paths))
    rows = [torch.from_numpy(arrays[part].astype(np.int64)) for part in ("train", "test")]
    halves = [half for part in rows for half in (part[:, :-1], part[:, 1:])]
    return Dataset(*halves, classes=VOCABULARY)


def _make_running(train: Path, test: Path) -> Arrays:
    (train_texts, _), (test_texts, _) = (_part(FILM_REVIEWS, path) for path in (train, test))
    tokenizer = learn_tokens(train_texts)
    return {"train": _running(tokenizer, train_texts), "test": _running(tokenizer, test_texts)}


def _running(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """Returns rows of ids of texts that follow each other, uint16, (rows, 129)."""
    encoded = (np.array([*row.ids, PADDING], np.uint16) for row in tokenizer.encode_batch(texts))
    ids = np.concatenate([*encoded])
    return ids[: len(ids) // ROW * ROW].reshape(-1, ROW)


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
