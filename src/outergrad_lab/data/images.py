"""Readers of images."""

from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outergrad_lab.data.cache import Arrays, cached, key_of
from outergrad_lab.data.dataset import Dataset
from outergrad_lab.data.files import as_labels, read_idx, read_parts, reading

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
