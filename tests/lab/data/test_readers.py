"""Readers, on small files that are sound or damaged."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import SOURCES, load
from outergrad_lab.data.files import DamagedFileError, read_idx
from small_files import RARE, TEST, TRAIN, WRITERS, idx, pixels, write

FILES = [(name, file) for name in SOURCES for file in SOURCES[name].files]
ARCHIVES = [(name, file) for name, file in FILES if file.endswith(".npz")]


def rewrite(path, **changes: np.ndarray | None) -> None:
    """Changes arrays of an archive, or leaves them out."""
    with np.load(path) as arrays:
        kept = {name: arrays[name] for name in arrays if changes.get(name, True) is not None}
    np.savez(path, **kept | {name: array for name, array in changes.items() if array is not None})


def refused(name: str, data_dir, file: str) -> str:
    """What is said about a file that cannot be read."""
    with pytest.raises(RecipeError) as caught:
        load(name, data_dir)
    said = str(caught.value)
    assert "\n" not in said
    assert f"{file} is damaged (" in said
    assert f"put {file} into " in said
    return said


def test_there_are_small_files_for_every_reader():
    assert WRITERS.keys() == {name for name in SOURCES if SOURCES[name].files}


@pytest.mark.parametrize("name", WRITERS)
def test_small_files_are_read(tmp_path, name):
    write(name, tmp_path)
    data = load(name, tmp_path)
    assert data.format == SOURCES[name].format
    assert data.x_train.float().isfinite().all()
    assert data.y_train.dtype == torch.int64
    if not data.format.tokens:
        assert (len(data.x_train), len(data.x_test)) == (TRAIN, TEST)
        assert data.y_test.tolist() == [row % data.classes for row in range(TEST)]


@pytest.mark.parametrize(("name", "file"), FILES)
@pytest.mark.parametrize("content", [b"", b"<html>not found</html>"], ids=["empty", "a web page"])
def test_what_is_no_such_file_is_named(tmp_path, name, file, content):
    (write(name, tmp_path) / file).write_bytes(content)
    said = refused(name, tmp_path, file)
    assert ("outergrad data get" in said) == SOURCES[name].can_be_fetched


@pytest.mark.parametrize(("name", "file"), FILES)
def test_a_file_that_is_cut_short_is_named(tmp_path, name, file):
    path = write(name, tmp_path) / file
    path.write_bytes(path.read_bytes()[:-20])
    refused(name, tmp_path, file)


@pytest.mark.parametrize(("name", "file"), ARCHIVES)
def test_an_array_that_is_absent_is_named(tmp_path, name, file):
    path = write(name, tmp_path) / file
    array = "test_labels" if name == "pneumonia" else "y_test"
    rewrite(path, **{array: None})
    assert array in refused(name, tmp_path, file)


@pytest.mark.parametrize(("name", "file"), ARCHIVES)
@pytest.mark.parametrize("wrong", [np.arange(5), np.full(TRAIN, 99)], ids=["few", "no classes"])
def test_labels_must_fit_the_rows_and_the_classes(tmp_path, name, file, wrong):
    path = write(name, tmp_path) / file
    rewrite(path, **{"train_labels" if name == "pneumonia" else "y_train": wrong})
    assert "labels" in refused(name, tmp_path, file)


@pytest.mark.parametrize(("name", "file"), ARCHIVES)
def test_rows_must_have_their_shape(tmp_path, name, file):
    path = write(name, tmp_path) / file
    array = {"pneumonia": "train_images", "cifar10": "x_train_delta"}.get(name, "x_train")
    rewrite(path, **{array: pixels(TRAIN, 7, 11)})
    refused(name, tmp_path, file)


def test_mnist_labels_must_be_as_many_as_the_images(tmp_path):
    folder = write("mnist", tmp_path)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(3)))
    said = refused("mnist", tmp_path, "t10k-labels-idx1-ubyte.gz")
    assert f"3 labels for {TEST} rows" in said


def test_another_text_is_told(tmp_path):
    folder = write("tinyshakespeare", tmp_path)
    (folder / "input.txt.gz").write_bytes(gzip.compress(b"to be or not " * 999))
    with pytest.raises(RecipeError, match=r"7 classes, not .* 65 classes: put input\.txt\.gz"):
        load("tinyshakespeare", tmp_path)


def test_a_short_text_is_told(tmp_path):
    folder = write("tinyshakespeare", tmp_path)
    (folder / "input.txt.gz").write_bytes(gzip.compress(b"to be"))
    assert "5 characters are too few" in refused("tinyshakespeare", tmp_path, "input.txt.gz")


def test_a_book_without_its_notices_is_told(tmp_path):
    folder = write("war-and-peace", tmp_path)
    (folder / "warandpeace.txt.gz").write_bytes(gzip.compress(b"to be or not " * 999))
    said = refused("war-and-peace", tmp_path, "warandpeace.txt.gz")
    assert "no notices of Project Gutenberg" in said


def test_a_book_is_what_its_notices_enclose_with_one_id_for_rare_characters(tmp_path):
    write("war-and-peace", tmp_path)
    data = load("war-and-peace", tmp_path)
    assert data.x_train[0, :93].tolist() == list(range(92, -1, -1))
    assert data.y_test[-1].max() < data.classes - 1 == 93
    ids = torch.cat([data.x_train[:, :1], data.y_train], dim=1).flatten()
    assert (ids == 93).sum() == len(RARE)


@pytest.mark.parametrize("content", [b"label,text\n7,so so", b"label,text\n", b"label\n1"])
def test_texts_must_have_a_class_and_a_text(tmp_path, content):
    folder = write("imdb", tmp_path)
    (folder / "test.csv.gz").write_bytes(gzip.compress(content))
    refused("imdb", tmp_path, "test.csv.gz")


def test_mnist_512_keeps_the_pixels_that_vary(tmp_path):
    folder = write("mnist", tmp_path)
    images = pixels(TRAIN, 28, 28)
    images[:, :7] = 200
    (folder / "train-images-idx3-ubyte.gz").write_bytes(idx(images))
    whole, part = load("mnist", tmp_path), load("mnist-512", tmp_path)
    assert (part.x_train.var(dim=0) > 0).all()
    columns = [whole.x_train.T.tolist().index(column) for column in part.x_train.T.tolist()]
    assert columns == sorted(columns)
    assert part.x_test.equal(whole.x_test[:, columns])


def test_cifar10_adds_up_differences(tmp_path):
    images = pixels(TRAIN, 3, 32, 32)
    differences = images
    for axis in (3, 2, 1):
        differences = np.diff(differences, axis=axis, prepend=np.uint8(0))
    rewrite(write("cifar10", tmp_path) / "cifar10_subset.npz", x_train_delta=differences)
    x = load("cifar10", tmp_path).x_train
    expected = torch.from_numpy(images).double()
    expected -= expected.mean((0, 2, 3), keepdim=True)
    expected /= expected.std((0, 2, 3), keepdim=True)
    assert torch.allclose(x.double(), expected, atol=1e-5)


def test_spoken_digits_are_silent_after_their_end(tmp_path):
    write("spoken-digits", tmp_path)
    data = load("spoken-digits", tmp_path)
    for row, x in enumerate(data.x_train):
        assert x[: row + 1].abs().max() > 0
        assert (x[row + 1 :] == 0).all()
    assert (data.x_test != 0).all(dim=2).any(dim=1).all()


GOOD = idx(np.ones((3, 2, 2)))
DAMAGED = {
    "cut short": GOOD[:-12],
    "no header": gzip.compress(b"\0\0\x08"),
    "labels instead of images": idx(np.ones(12)),
    "rows missing": gzip.compress(gzip.decompress(GOOD)[:-1]),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_idx_file_is_named(tmp_path, content):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"images\.gz is damaged "):
        read_idx(path, dimensions=3)
