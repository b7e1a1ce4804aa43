"""Readers of files that may be damaged."""

import gzip
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outergrad_lab.data.dataset import Dataset


class DamagedFileError(ValueError):
    """A file is damaged, or of another kind.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, reason: Exception) -> None:
        super().__init__(f"{path} is damaged ({' '.join(str(reason).split())})")
        self.path = path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns every error while a file is read into `DamagedFileError`."""
    try:
        yield
    except Exception as error:  # gzip, zipfile and NumPy raise nearly everything
        raise DamagedFileError(path, error) from error


@contextmanager
def reading_arrays(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Yields the arrays of an ``.npz`` file; errors become `DamagedFileError`."""
    with reading(path), path.open("rb") as file, np.load(file) as arrays:
        yield arrays


def read_parts(
    path: Path, inputs: str, labels: str, classes: int, as_inputs: Callable[[np.ndarray], Tensor]
) -> Dataset:
    """Reads the two parts of a data set from an ``.npz`` file.

    Args:
        path: The file.
        inputs: Name of the array of inputs, with ``{}`` for ``train`` or ``test``.
        labels: Name of the array of labels, likewise.
        classes: Number of classes.
        as_inputs: MessageSequence an array of inputs into a tensor, (rows, ...).

    Raises:
        DamagedFileError: The file is damaged, or of other arrays.
    """
    tensors: list[Tensor] = []
    with reading_arrays(path) as arrays:
        for part in ("train", "test"):
            x = as_inputs(arrays[inputs.format(part)])
            tensors += [x, as_labels(arrays[labels.format(part)], len(x), classes)]
    return Dataset(*tensors, classes=classes)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads a gzipped IDX file of unsigned bytes.

    Raises:
        DamagedFileError: The file is not such a file, or cut short.
    """
    with reading(path):
        content = gzip.decompress(path.read_bytes())
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        if magic != 0x0800 + dimensions:
            raise ValueError(f"magic number {magic:#x}")
        values = np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions))
        return values.reshape(shape).copy()


def as_labels(values: np.ndarray, rows: int, classes: int) -> Tensor:
    """Converts numbers to the labels of `rows` rows, int64, (rows,).

    Raises:
        ValueError: There are none, more or fewer, or they are no classes.
    """
    labels = torch.from_numpy(values.astype(np.int64)).flatten()
    if not len(labels) == rows > 0:
        raise ValueError(f"{len(labels)} labels for {rows} rows")
    if not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"labels from {labels.min()} to {labels.max()} for {classes} classes")
    return labels
