"""Files of the formats that the readers know, with few rows of random data."""

from __future__ import annotations

import gzip
import string
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from outergrad_lab.data import SOURCES, folder_of

TRAIN, TEST = 24, 12
WORDS = ("one", "two", "three", "four", "five", "six", "seven")
CHARACTERS = string.ascii_letters + " \n!$&',-.:;?3"


def idx(values: np.ndarray) -> bytes:
    """A gzipped IDX file."""
    header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
    return gzip.compress(header + values.astype(np.uint8).tobytes())


def pixels(rows: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows, *shape), dtype=np.uint8)


def labels(rows: int, classes: int) -> np.ndarray:
    return np.arange(rows, dtype=np.uint8) % classes


def write_mnist(folder: Path) -> None:
    for name, rows in (("train", TRAIN), ("t10k", TEST)):
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(idx(pixels(rows, 28, 28)))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(idx(labels(rows, 10)))


def write_cifar10(folder: Path) -> None:
    np.savez(
        folder / "cifar10_subset.npz",
        x_train_delta=pixels(TRAIN, 3, 32, 32),
        y_train=labels(TRAIN, 10),
        x_test_delta=pixels(TEST, 3, 32, 32),
        y_test=labels(TEST, 10),
    )


def write_pneumonia(folder: Path) -> None:
    np.savez(
        folder / "pneumoniamnist.npz",
        train_images=pixels(TRAIN, 28, 28),
        train_labels=labels(TRAIN, 2)[:, None],  # as in the published file
        test_images=pixels(TEST, 28, 28),
        test_labels=labels(TEST, 2)[:, None],
    )


def write_sequences(file: str, steps: int, features: int, classes: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        np.savez(
            folder / file,
            x_train=pixels(TRAIN, steps, features),
            len_train=np.arange(1, 1 + TRAIN, dtype=np.uint8),
            y_train=labels(TRAIN, classes),
            speaker_train=np.arange(TRAIN, dtype=np.uint8) // 3,
            x_test=pixels(TEST, steps, features),
            len_test=np.full(TEST, steps, dtype=np.uint8),
            y_test=labels(TEST, classes),
        )

    return write


def write_text(folder: Path) -> None:
    content = CHARACTERS * (129 * 30 // len(CHARACTERS))
    (folder / "input.txt.gz").write_bytes(gzip.compress(content.encode()))


RARE = "\u00e6\u0153/"
"""Too rare to have ids of their own."""


def write_book(folder: Path) -> None:
    often = "".join(map(chr, range(0x400, 0x400 + 93)))
    book = often[::-1] * 20 + RARE + often * 20
    start, end = "*** START OF THIS ***\n", "\nEnd of the Project Gutenberg EBook 2600\n***"
    (folder / "warandpeace.txt.gz").write_bytes(gzip.compress(f"No.\n{start}{book}{end}".encode()))


def write_classified(*files: str, column: str, classes: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for file, rows in zip(files, (TRAIN, TEST), strict=True):
            texts = [
                f'"It, ""{WORDS[row % 7]}"" {row}.<br />The END \u00e9"' for row in range(rows)
            ]
            lines = [f"{row % classes},{row},{text}" for row, text in enumerate(texts)]
            content = "\n".join([f"label,id,{column}", *lines])
            (folder / file).write_bytes(gzip.compress(content.encode()))

    return write


WRITERS: dict[str, Callable[[Path], None]] = {
    "mnist": write_mnist,
    "mnist-512": write_mnist,
    "cifar10": write_cifar10,
    "pneumonia": write_pneumonia,
    "spoken-digits": write_sequences("spoken_arabic_digits.npz", 93, 13, classes=10),
    "natops": write_sequences("natops.npz", 51, 24, classes=6),
    "pendigits": write_sequences("pendigits.npz", 8, 2, classes=10),
    "tinyshakespeare": write_text,
    "war-and-peace": write_book,
    "imdb": write_classified("train.csv.gz", "test.csv.gz", column="text", classes=2),
    "film-reviews": write_classified("train.csv.gz", "test.csv.gz", column="text", classes=2),
    "ag-news": write_classified(
        "train_subset.csv.gz", "test.csv.gz", column="description", classes=4
    ),
}
"""What writes the files of a data set into a folder."""


def write(name: str, data_dir: Path) -> Path:
    """Writes the files of a data set; returns their folder."""
    folder = folder_of(name, data_dir)
    folder.mkdir()
    WRITERS[name](folder)
    assert {path.name for path in folder.iterdir()} == set(SOURCES[name].files)
    return folder
