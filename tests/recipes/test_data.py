from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
import torch

from outergrad.recipes.data import SOURCES, load, read_idx
from outergrad.recipes.errors import RecipeError


def idx(values: np.ndarray) -> bytes:
    header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
    return gzip.compress(header + values.astype(np.uint8).tobytes())


@pytest.fixture
def small_mnist(tmp_path):
    """Files of the same format with few rows."""
    random = np.random.default_rng(0)
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name, rows in (("train", 12), ("t10k", 5)):
        images = random.integers(0, 256, (rows, 28, 28))
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(rows) % 10))
    return tmp_path


def test_digits_are_scaled_and_split_by_class(tmp_path):
    data = load("digits", tmp_path)
    assert (len(data.x_train), len(data.x_test)) == (1437, 360)
    assert (data.features, data.classes) == (64, 10)
    assert data.x_train.min() == 0
    assert data.x_train.max() == 1
    everything = torch.cat([data.y_train, data.y_test]).bincount()
    assert (data.y_test.bincount() - everything / 5).abs().max() <= 1


def test_digits_are_the_same_every_time(tmp_path):
    assert load("digits", tmp_path).x_test.equal(load("digits", tmp_path).x_test)


def test_mnist_is_read_from_its_files(small_mnist):
    data = load("mnist", small_mnist)
    assert data.x_train.shape == (12, 784)
    assert data.x_test.shape == (5, 784)
    assert data.y_test.tolist() == [0, 1, 2, 3, 4]
    content = gzip.decompress((small_mnist / "mnist/t10k-images-idx3-ubyte.gz").read_bytes())
    assert data.x_test[1, 2] == content[16 + 784 + 2] / np.float32(255)


def test_real_mnist(data_dir):
    data = load("mnist", data_dir)
    assert data.x_train.shape == (60000, 784)
    assert data.y_train[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.y_test.bincount().sum() == 10000
    assert 0.1 < data.x_train.mean() < 0.2


def test_an_absent_file_is_named_with_its_place_and_the_remedy(small_mnist):
    (small_mnist / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(RecipeError) as caught:
        load("mnist", small_mnist)
    said = str(caught.value)
    assert f"put t10k-labels-idx1-ubyte.gz into {small_mnist / 'mnist'}" in said
    assert "train-images" not in said
    assert f"outergrad data get mnist --data-dir {small_mnist}" in said


GOOD = idx(np.ones((3, 2, 2)))
DAMAGED = {
    "not gzip": b"<html>not found</html>",
    "empty": b"",
    "cut short": GOOD[:-12],
    "no header": gzip.compress(b"\0\0\x08"),
    "labels instead of images": idx(np.ones(12)),
    "rows missing": gzip.compress(gzip.decompress(GOOD)[:-1]),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"images\.gz is damaged .* remove it"):
        read_idx(path, dimensions=3)


def test_every_source_says_what_it_is():
    assert all(source.summary for source in SOURCES.values())
    assert all(source.url for source in SOURCES.values() if source.files)
