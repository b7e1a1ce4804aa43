"""Texts as tokens, and the cache that keeps them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import SOURCES, load, texts
from outergrad_lab.data.cache import cached, key_of
from outergrad_lab.data.texts import PADDING, as_tokens, learn_tokens
from small_files import TRAIN, write

TEXTS = ["The cat, the HAT", "a cat\nin a hat \u00e9\u20ac", "", "cats " * 50]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("OUTERGRAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def digest(array) -> str:
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def test_tokens_give_their_text_back():
    tokenizer = learn_tokens(TEXTS)
    for text, ids in zip(TEXTS, as_tokens(tokenizer, TEXTS, 300), strict=True):
        assert tokenizer.decode(ids.tolist()) == text.lower()
    unseen = "zebra \u4e16"
    assert tokenizer.decode(tokenizer.encode(unseen).ids) == unseen


@pytest.mark.parametrize("length", [3, 9, 300])
def test_rows_are_padded_behind_or_cut(length):
    tokenizer = learn_tokens(TEXTS)
    whole, rows = (as_tokens(tokenizer, TEXTS, size) for size in (300, length))
    assert rows.shape == (len(TEXTS), length)
    assert (rows == whole[:, :length]).all()
    assert PADDING == 0
    text = whole != PADDING
    assert (text[:, :-1] >= text[:, 1:]).all(), "no text behind padding"
    assert text.sum(axis=1)[2] == 0


def test_the_same_texts_give_the_same_tokens():
    first, second = (learn_tokens(TEXTS).get_vocab() for _ in range(2))
    assert first == second
    assert len(first) <= texts.VOCABULARY


@pytest.mark.parametrize("name", ["imdb", "ag-news"])
def test_a_text_stays_with_its_class(folder, tmp_path, name):
    write(name, tmp_path)
    data = load(name, tmp_path)
    by_words = {tuple(x.tolist()): int(y) for x, y in zip(data.x_train, data.y_train, strict=True)}
    assert len(by_words) == TRAIN, "texts differ"
    # The files hold row 0 of class 0, row 1 of class 1, and so on; imdb's are shuffled.
    shuffled = data.y_train.tolist() != [row % data.classes for row in range(TRAIN)]
    assert shuffled == (name == "imdb")
    assert data.y_train.bincount().tolist() == [TRAIN // data.classes] * data.classes


def test_markup_is_left_out_and_capitals_are_made_small(folder, tmp_path, monkeypatch):
    learnt = []
    monkeypatch.setattr(
        texts, "learn_tokens", lambda of: learnt.append(learn_tokens(of)) or learnt[0]
    )
    write("ag-news", tmp_path)
    row = load("ag-news", tmp_path).x_train[0]
    assert learnt[0].decode(row.tolist()) == 'it, "one" 0. the end \u00e9'
    assert len(row) == texts.AG_NEWS.length


@pytest.mark.parametrize("content", [None, b"", b"PK damaged", b"foreign"])
def test_a_cache_that_is_no_good_is_made_anew(folder, tmp_path, content):
    write("imdb", tmp_path)
    first = load("imdb", tmp_path)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    if content is None:
        path.unlink()
    elif content == b"foreign":
        np.savez(path, x_train=np.zeros((1, 128)), key="another")
    else:
        path.write_bytes(content or whole[:-30])
    again = load("imdb", tmp_path)
    assert first.x_train.equal(again.x_train)
    assert first.y_test.equal(again.y_test)
    assert [file.name for file in folder.iterdir()] == [path.name], "nothing else is left"
    assert path.read_bytes()[:2] == b"PK"


def test_what_is_cached_is_not_made_again(folder):
    arrays, made = {"x": np.arange(3)}, []

    def make():
        made.append(1)
        return arrays

    for _ in range(2):
        assert digest(cached("some", "key", make)["x"]) == digest(arrays["x"])
    assert len(made) == 1
    cached("some", "other key", make)
    assert len(made) == 2


def test_other_files_or_settings_are_other_keys(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1"), two.write_text("2")
    made_from = [("a", [one, two]), ("b", [one, two]), ("a", [two, one])]
    keys = [key_of(settings, files) for settings, files in made_from]
    assert len(set(keys)) == 3
    assert keys[0] == key_of("a", [one, two])


@pytest.mark.parametrize("home", [True, False], ids=["under a file", "no home"])
def test_a_folder_that_cannot_be_written_to_costs_only_time(tmp_path, monkeypatch, home):
    (tmp_path / "file").write_text("")
    if home:
        monkeypatch.setenv("OUTERGRAD_CACHE", str(tmp_path / "file" / "cache"))
    else:
        monkeypatch.delenv("OUTERGRAD_CACHE")
        monkeypatch.setattr(Path, "home", no_home)
    write("ag-news", tmp_path)
    assert load("ag-news", tmp_path).format == SOURCES["ag-news"].format


def no_home():
    raise RuntimeError("no home directory")


def test_a_missing_library_is_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "tokenizers", None)
    write("imdb", tmp_path)
    with pytest.raises(RecipeError, match=r"imdb needs tokenizers: pip install 'tokenizers>=0.20'"):
        load("imdb", tmp_path)


def test_a_text_is_read_as_far_as_it_becomes_tokens(folder, tmp_path):
    write("ag-news", tmp_path)
    x = load("ag-news", tmp_path).x_train
    assert x.dtype == torch.int64
    assert (x[:, 0] != PADDING).all()
    assert (x[:, -1] == PADDING).all()
