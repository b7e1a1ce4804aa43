from __future__ import annotations

import csv
import gzip
import sys
from pathlib import Path

import pytest
import torch

from covering import LONG
from outergrad.launch.errors import RecipeError
from outergrad_lab.data import SOURCES, Dataset, Format, load, missing_files, synthetic

FORMATS = {
    "flat": Format(shape=(7,), classes=3),
    "sequences": Format(shape=(5, 4), classes=2),
    "images": Format(shape=(3, 8, 8), classes=1000),
    "tokens": Format(shape=(6,), classes=9, tokens=True),
    "texts": Format(shape=(6,), classes=3, tokens=True, vocabulary=11),
}
ROWS = {
    "digits": (1437, 360),
    "mnist": (60000, 10000),
    "mnist-512": (60000, 10000),
    "cifar10": (20000, 10000),
    "pneumonia": (4708, 624),
    "spoken-digits": (6600, 2200),
    "natops": (180, 180),
    "pendigits": (7494, 3498),
    "tinyshakespeare": (7782, 864),
    "war-and-peace": (22383, 2487),
    "imdb": (25000, 25000),
    "ag-news": (17320, 7600),
}
TEXTS = {"imdb", "ag-news"}
SCALED_TO_ONE = {"digits", "mnist", "mnist-512", "pneumonia"}


def real(name: str, data_dir: Path) -> Dataset:
    """A real data set, where its files are."""
    missing = missing_files(name, data_dir)
    if missing:
        pytest.skip(f"no {', '.join(missing)} in {data_dir}")
    return load(name, data_dir)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_synthetic_data_has_the_format_that_was_asked_for(format):
    data = synthetic(format, rows=5, seed=0)
    assert data.format == format
    assert len(data.x_train) == len(data.y_train) == 5
    assert len(data.x_test) == len(data.y_test) > 0
    assert data.y_train.shape[1:] == format.label_shape
    assert format.label_shape == (format.shape if format.classes == 9 else ())
    assert 0 <= data.y_train.min() <= data.y_train.max() < format.classes
    if format.tokens:
        assert data.x_train.max() < (format.vocabulary or format.classes)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_seed_decides_synthetic_data(format):
    first, second, other = (synthetic(format, rows=5, seed=seed) for seed in (1, 1, 2))
    assert first.x_train.equal(second.x_train)
    assert not first.x_train.equal(other.x_train)
    assert not first.x_train.equal(first.x_test[:5])


def test_digits_are_split_by_class(tmp_path):
    data = load("digits", tmp_path)
    everything = torch.cat([data.y_train, data.y_test]).bincount()
    assert (data.y_test.bincount() - everything / 5).abs().max() <= 1


def test_digits_are_the_same_every_time(tmp_path, monkeypatch):
    """Also from the cache, where scikit-learn is not asked."""
    monkeypatch.setenv("OUTERGRAD_CACHE", str(tmp_path))
    first = load("digits", tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    again = load("digits", tmp_path)
    for split in ("x_train", "y_train", "x_test", "y_test"):
        assert getattr(first, split).equal(getattr(again, split))


def tenth(name: str, data_dir: Path, folder: Path) -> Dataset:
    """Every tenth of the texts, as all of them take half a minute; all are counted."""
    if missing := missing_files(name, data_dir):
        pytest.skip(f"no {', '.join(missing)} in {data_dir}")
    own, counts = SOURCES[name].folder or name, []
    (folder / own).mkdir()
    for file in SOURCES[name].files:
        with gzip.open(data_dir / own / file, "rt", newline="") as whole:
            columns, *rows = csv.reader(whole)
        counts.append(len(rows))
        with gzip.open(folder / own / file, "wt", newline="") as part:
            csv.writer(part).writerows([columns, *rows[::10]])
    assert tuple(counts) == ROWS["imdb" if name == "film-reviews" else name]
    return load(name, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_real_data_is_what_its_source_says(data_dir, tmp_path, name):
    few = not LONG and name in TEXTS
    data = tenth(name, data_dir, tmp_path) if few else real(name, data_dir)
    counts = tuple(count // (10 if few else 1) for count in ROWS[name])
    assert data.format == SOURCES[name].format
    assert (len(data.x_train), len(data.x_test)) == counts
    assert (len(data.y_train), len(data.y_test)) == counts
    assert data.y_train.unique().equal(torch.arange(data.classes))
    assert data.y_test.max() < data.classes
    if not data.format.tokens:
        assert_scaled(data.x_train, between_0_and_1=name in SCALED_TO_ONE)
    if name in TEXTS:
        assert_whole_words_and_shuffled(data)


def assert_scaled(x: torch.Tensor, *, between_0_and_1: bool) -> None:
    """Checks that all values are in the range that training wants."""
    if between_0_and_1:
        assert (x.min(), x.max()) == (0, 1)
    else:
        assert abs(x.mean()) < 1e-3
        assert x.std() == pytest.approx(1, abs=0.05)


def test_real_mnist_is_in_its_order(data_dir):
    assert real("mnist", data_dir).y_train[:5].tolist() == [5, 0, 4, 1, 9]


def test_real_text_is_predicted_one_character_ahead(data_dir):
    data = real("tinyshakespeare", data_dir)
    assert data.x_train[:, 1:].equal(data.y_train[:, :-1])
    start = "First Citizen:\nBefore we proceed"
    codes = dict(zip(start, data.x_train[0, : len(start)].tolist(), strict=False))
    assert [codes[letter] for letter in start] == data.x_train[0, : len(start)].tolist()
    assert len(set(codes.values())) == len(codes)


def test_rare_characters_of_war_and_peace_share_an_id(data_dir):
    data = real("war-and-peace", data_dir)
    often = torch.cat([data.y_train.flatten(), data.y_test.flatten()]).bincount()
    assert 10 < often[-1] < 100
    assert often[:-1].min() >= 8, "of ten, but for the first of a row"
    assert data.x_train[:, 1:].equal(data.y_train[:, :-1])


@pytest.mark.slow
def test_reviews_follow_each_other_one_token_ahead(data_dir, tmp_path):
    data = tenth("film-reviews", data_dir, tmp_path)
    assert data.format == SOURCES["film-reviews"].format
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        assert x[:, 1:].equal(y[:, :-1])
        assert 5000 < len(x) < 8000, "a tenth of 25000 reviews, of 312 tokens each"
        ends = (x == 0).sum() / 2500
        assert 0.95 < ends <= 1, "an end of each review"


def assert_whole_words_and_shuffled(data: Dataset) -> None:
    assert (data.x_train != 0).any(dim=1).all(), "an empty text"
    assert data.x_train.max() > 7900
    assert 0.1 < data.y_train[:1000].float().mean() / data.y_train.float().mean() < 1.9


def test_every_source_can_be_had():
    assert all(source.summary for source in SOURCES.values())
    for source in SOURCES.values():
        assert all(source.files.values()) == bool(source.url) or not source.files
        assert {*source.originals} in (set(), {*source.files})
        assert source.origin


@pytest.mark.parametrize("name", [name for name in SOURCES if SOURCES[name].files])
def test_absent_files_are_named_with_their_place_and_the_remedy(tmp_path, name):
    with pytest.raises(RecipeError) as caught:
        load(name, tmp_path)
    source, said = SOURCES[name], str(caught.value)
    assert f"put {', '.join(source.files)} into {tmp_path / (source.folder or name)}" in said
    if source.can_be_fetched:
        assert f"outergrad data get {name} --data-dir {tmp_path}" in said
    else:
        assert source.origin in said
        assert "data get" not in said
