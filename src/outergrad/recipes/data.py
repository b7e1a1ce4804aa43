"""Data sets: where their files lie and how they are read."""

import gzip
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outergrad.recipes.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Labelled images, flattened, with values in [0, 1].

    Attributes:
        x_train: Training images, float32, (rows, features).
        y_train: Their classes, int64, (rows,).
        x_test: Test images, as ``x_train``.
        y_test: Their classes.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def features(self) -> int:
        """Values per image."""
        return self.x_train.shape[1]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.y_train.max()) + 1


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a data set comes from.

    Attributes:
        summary: What it is, in a few words.
        read: Reads it from the folder that holds its files.
        files: MD5 checksum of each file it needs.
        url: Folder on the net that holds the files.
    """

    summary: str
    read: Callable[[Path], Dataset]
    files: Mapping[str, str] = field(default_factory=dict)
    url: str = ""


def load(name: str, data_dir: Path) -> Dataset:
    """Reads a data set.

    Args:
        name: A key of `SOURCES`.
        data_dir: Its files lie in ``data_dir / name``.

    Raises:
        RecipeError: A file is absent or damaged.
    """
    require_files(name, data_dir)
    return SOURCES[name].read(data_dir / name)


def require_files(name: str, data_dir: Path) -> None:
    """Raises `RecipeError` that says which files of a data set to put where."""
    missing = missing_files(name, data_dir)
    if missing:
        raise RecipeError(
            f"{name} is not there: put {', '.join(missing)} into {data_dir / name} "
            f"(--data-dir or OUTERGRAD_DATA), or run: {get_command(name, data_dir)}"
        )


def missing_files(name: str, data_dir: Path) -> list[str]:
    """Names the files of a data set that are not in ``data_dir / name``."""
    return [file for file in SOURCES[name].files if not (data_dir / name / file).is_file()]


def get_command(name: str, data_dir: Path) -> str:
    """The command that downloads a data set."""
    return f"outergrad data get {name} --data-dir {data_dir}"


def read_digits(_folder: Path) -> Dataset:
    """Reads the digits that scikit-learn ships: four fifths to train on, one to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        x / 16, y, test_size=0.2, stratify=y, random_state=0
    )
    return Dataset(
        x_train=torch.tensor(x_train, dtype=torch.float32),
        y_train=torch.tensor(y_train),
        x_test=torch.tensor(x_test, dtype=torch.float32),
        y_test=torch.tensor(y_test),
    )


def read_mnist(folder: Path) -> Dataset:
    """Reads MNIST from its four original files."""
    return Dataset(
        x_train=_read_images(folder / "train-images-idx3-ubyte.gz"),
        y_train=_read_labels(folder / "train-labels-idx1-ubyte.gz"),
        x_test=_read_images(folder / "t10k-images-idx3-ubyte.gz"),
        y_test=_read_labels(folder / "t10k-labels-idx1-ubyte.gz"),
    )


def _read_images(path: Path) -> Tensor:
    return torch.from_numpy(read_idx(path, dimensions=3)).flatten(1).float() / 255


def _read_labels(path: Path) -> Tensor:
    return torch.from_numpy(read_idx(path, dimensions=1)).long()


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads a gzipped IDX file of unsigned bytes.

    Raises:
        RecipeError: The file is not such a file, or damaged.
    """
    try:
        content = gzip.decompress(path.read_bytes())
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        if magic != 0x0800 + dimensions:
            raise ValueError(f"magic number {magic:#x}")
        values = np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions))
        return values.reshape(shape).copy()
    except (OSError, EOFError, ValueError, struct.error) as error:
        raise RecipeError(
            f"{path} is damaged ({error}): remove it and run: "
            f"{get_command(path.parent.name, path.parent.parent)}"
        ) from error


SOURCES: dict[str, Source] = {
    "digits": Source(
        summary="1797 handwritten digits of 8x8 pixels, shipped with scikit-learn",
        read=read_digits,
    ),
    "mnist": Source(
        summary="70000 handwritten digits of 28x28 pixels, 11 MB",
        read=read_mnist,
        files={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    ),
}
