"""Readers of images, and of sequences of numbers."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outergrad_lab.data.cache import Arrays, cached, key_of
from outergrad_lab.data.dataset import Dataset
from outergrad_lab.data.files import as_labels, read_idx, read_parts, reading, reading_arrays

_PARTS = ("x_train", "y_train", "x_test", "y_test")


def read_digits(_folder: Path) -> Dataset:
    """Reads the digits that scikit-learn ships: four fifths to train on, one to test.

    They are cached, because importing scikit-learn takes a second.
    """
    arrays = cached("digits", key_of([version("scikit-learn")], []), _split_digits)
    parts = (torch.from_numpy(arrays[name]) for name in _PARTS)
    return Dataset(*parts, classes=10).to(torch.float32)


def _split_digits() -> Arrays:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.2, stratify=y, random_state=0)
    x_train, x_test, y_train, y_test = parts
    return dict(zip(_PARTS, (x_train, y_train, x_test, y_test), strict=True))


def read_mnist(folder: Path) -> Dataset:
    """Reads MNIST from its four original files, flattened, with values in [0, 1]."""
    parts = _read_mnist_part(folder, "train"), _read_mnist_part(folder, "t10k")
    return Dataset(*parts[0], *parts[1], classes=10)


def _read_mnist_part(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images_path = folder / f"{part}-images-idx3-ubyte.gz"
    labels_path = folder / f"{part}-labels-idx1-ubyte.gz"
    images, labels = read_idx(images_path, dimensions=3), read_idx(labels_path, dimensions=1)
    with reading(images_path):
        x = torch.from_numpy(images.reshape(len(images), 784)).float() / 255
    with reading(labels_path):
        return x, as_labels(labels, len(images), classes=10)


def read_mnist_512(folder: Path) -> Dataset:
    """Reads MNIST and keeps the 512 pixels that vary most in training, in their order."""
    data = read_mnist(folder)
    pixels = data.x_train.var(dim=0).topk(512).indices.sort().values
    return data.mapped(lambda x: x[:, pixels])


def read_cifar10(folder: Path) -> Dataset:
    """Reads 20000 + 10000 images of CIFAR-10, standardised per channel.

    The arrays ``x_train_delta`` and ``x_test_delta``, uint8, (rows, 3, 32, 32), hold the
    differences of neighbours along channels, rows and columns, which compress better.
    """
    path = folder / "cifar10_subset.npz"
    return read_parts(path, "x_{}_delta", "y_{}", 10, _add_up).standardised(dims=(0, 2, 3))


def _add_up(differences: np.ndarray) -> Tensor:
    """Returns pixels from 0 to 255, float32; the sums wrap around as the differences did."""
    pixels = differences.reshape(-1, 3, 32, 32)
    for axis in (1, 2, 3):
        pixels = np.cumsum(pixels, axis=axis, dtype=np.uint8)
    return torch.from_numpy(pixels).float()


def read_pneumonia(folder: Path) -> Dataset:
    """Reads PneumoniaMNIST: X-rays of one channel, 0 normal or 1 pneumonia, in [0, 1]."""

    def in_one_channel(images: np.ndarray) -> Tensor:
        return torch.from_numpy(images.reshape(-1, 1, 28, 28)).float() / 255

    path = folder / "pneumoniamnist.npz"
    return read_parts(path, "{}_images", "{}_labels", 2, in_one_channel)


FRAMES = 40
SPEAKERS = 66
"""Number of speakers in the training rows of spoken digits; others speak in the test."""


def read_spoken_digits(folder: Path) -> Dataset:
    """Reads spoken Arabic digits: the first 40 frames of 13 coefficients, standardised.

    Arrays of the file: ``x_train``, float32, (rows, frames, 13); ``len_train``, number of frames
    that are sound; ``y_train``, the digits; and likewise with ``test``. ``speaker_train`` numbers
    the speakers of the rows, on the assumption that the ten utterances of a speaker are adjacent.
    """
    path = folder / "spoken_arabic_digits.npz"
    with reading_arrays(path) as arrays:
        x_train, sound_train = _first_frames(arrays["x_train"], arrays["len_train"])
        x_test, sound_test = _first_frames(arrays["x_test"], arrays["len_test"])
        y_train = as_labels(arrays["y_train"], len(x_train), classes=10)
        y_test = as_labels(arrays["y_test"], len(x_test), classes=10)
        speakers = as_labels(arrays["speaker_train"], len(x_train), classes=SPEAKERS)
    variance, mean = torch.var_mean(x_train[sound_train], dim=0)
    # Silence after the sound becomes the mean, 0, whatever the mean was.
    x_train = (x_train - mean) / variance.sqrt() * sound_train[..., None]
    x_test = (x_test - mean) / variance.sqrt() * sound_test[..., None]
    return Dataset(x_train, y_train, x_test, y_test, classes=10, groups_train=speakers)


def _first_frames(frames: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
    """Returns the first frames, (rows, 40, 13), and which of them are sound, (rows, 40)."""
    x = frames[:, :FRAMES].reshape(len(lengths), FRAMES, 13)
    sound = torch.arange(FRAMES) < torch.from_numpy(lengths.astype(np.int64))[:, None]
    return torch.from_numpy(x).float(), sound


def read_natops(folder: Path) -> Dataset:
    """Reads gestures of aircraft handlers: 51 frames of 24 coordinates, standardised."""
    return _read_plain(folder / "natops.npz", shape=(51, 24), classes=6)


def read_pendigits(folder: Path) -> Dataset:
    """Reads handwritten digits: 8 positions of the pen, x and y, standardised."""
    return _read_plain(folder / "pendigits.npz", shape=(8, 2), classes=10)


def _read_plain(path: Path, shape: tuple[int, int], classes: int) -> Dataset:
    """Reads arrays ``x_train``, ``y_train``, ``x_test`` and ``y_test``; sequences of one length."""

    def in_shape(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.reshape(-1, *shape)).float()

    return read_parts(path, "x_{}", "y_{}", classes, in_shape).standardised(dims=(0, 1))
