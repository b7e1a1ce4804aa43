"""Converters from files as their authors publish them to the files that the readers want."""

import csv
import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from outergrad_lab.data.files import reading

CIFAR10_ROWS = 2000
"""Training images kept of each class, the first ones."""
AG_NEWS_ROWS = 4330
"""Training rows of the news kept of each class, the first ones."""
PARTS = ("train", "test")
_REVIEW = re.compile(r"aclImdb/(train|test)/(neg|pos)/(\d+)_(\d+)\.txt")


def convert_cifar10(originals: Sequence[Path], folder: Path) -> None:
    """Converts the binary version: records of a label and 3072 pixels."""
    with reading(originals[0]), tarfile.open(originals[0]) as archive:
        train = np.concatenate([_records(archive, f"data_batch_{i}") for i in range(1, 6)])
        kept = _first_of_each(train[:, 0], CIFAR10_ROWS)
        parts = {"train": train[kept], "test": _records(archive, "test_batch")}
    arrays = {f"y_{part}": rows[:, 0] for part, rows in parts.items()}
    arrays |= {f"x_{part}_delta": _differences(rows[:, 1:]) for part, rows in parts.items()}
    np.savez_compressed(folder / "cifar10_subset.npz", allow_pickle=False, **arrays)


def _records(archive: tarfile.TarFile, name: str) -> np.ndarray:
    file = archive.extractfile(f"cifar-10-batches-bin/{name}.bin")
    if file is None:
        raise ValueError(f"{name} is no file")
    return np.frombuffer(file.read(), np.uint8).reshape(-1, 1 + 3 * 32 * 32)


def _first_of_each(labels: np.ndarray, rows: int) -> np.ndarray:
    """Returns the indices of the first rows of each class, in their order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:rows] for c in np.unique(labels)]))


def _differences(pixels: np.ndarray) -> np.ndarray:
    """Returns differences of neighbours along channels, rows and columns, modulo 256."""
    x = pixels.reshape(-1, 3, 32, 32)
    for axis in (1, 2, 3):
        x = np.diff(x, axis=axis, prepend=np.uint8(0))
    return x


def convert_spoken_digits(originals: Sequence[Path], folder: Path) -> None:
    """Converts two texts of blocks of lines, one per utterance, sorted by digit, equally many."""
    arrays: dict[str, np.ndarray] = {}
    for part, path in zip(PARTS, originals, strict=True):
        with reading(path):
            blocks = [np.loadtxt(block, np.float32, ndmin=2) for block in _blocks(path)]
            place = np.arange(len(blocks))
            per_digit = len(blocks) // 10
            arrays |= {
                f"x_{part}": np.stack([_padded(block) for block in blocks]),
                f"len_{part}": np.array([len(block) for block in blocks], np.uint8),
                f"y_{part}": (place // per_digit).astype(np.uint8),
                f"speaker_{part}": (place % per_digit // 10).astype(np.uint8),
            }
    np.savez_compressed(folder / "spoken_arabic_digits.npz", allow_pickle=False, **arrays)


def _blocks(path: Path) -> list[list[str]]:
    blocks = re.split(r"\n\s*\n", path.read_text(encoding="ascii"))
    return [block.strip().splitlines() for block in blocks if block.strip()]


def _padded(frames: np.ndarray, longest: int = 93) -> np.ndarray:
    """Pads frames of 13 numbers with zeros, and clears bits below their five printed digits."""
    rounded = (frames.view(np.uint32) & ~np.uint32(63)).view(np.float32)
    padded = np.zeros((longest, 13), np.float32)
    padded[: len(frames)] = rounded
    return padded


def convert_natops(originals: Sequence[Path], folder: Path) -> None:
    """Converts an archive of texts: a case is a line of channels and a class, between colons."""
    arrays: dict[str, np.ndarray] = {}
    with reading(originals[0]), zipfile.ZipFile(originals[0]) as archive:
        for part in PARTS:
            _, _, body = archive.read(f"NATOPS_{part.upper()}.ts").decode().partition("@data")
            cases = [line.strip().split(":") for line in body.split("\n") if line.strip()]
            channels = [[np.array(c.split(","), np.float32) for c in case[:-1]] for case in cases]
            arrays[f"x_{part}"] = np.array(channels, np.float32).transpose(0, 2, 1)
            arrays[f"y_{part}"] = np.array([float(case[-1]) - 1 for case in cases], np.uint8)
    np.savez_compressed(folder / "natops.npz", allow_pickle=False, **arrays)


def convert_pendigits(originals: Sequence[Path], folder: Path) -> None:
    """Converts two tables with eight points and a digit per line."""
    arrays: dict[str, np.ndarray] = {}
    for part, path in zip(PARTS, originals, strict=True):
        with reading(path):
            table = np.loadtxt(path, np.uint8, delimiter=",", ndmin=2)
            arrays[f"x_{part}"] = table[:, :16].reshape(-1, 8, 2)
            arrays[f"y_{part}"] = table[:, 16]
    np.savez_compressed(folder / "pendigits.npz", allow_pickle=False, **arrays)


def convert_imdb(originals: Sequence[Path], folder: Path) -> None:
    """Converts an archive of one text per review; bad ones come first, by number."""
    found: dict[str, list[tuple[int, int, int, str]]] = {part: [] for part in PARTS}
    with reading(originals[0]), tarfile.open(originals[0]) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None or not (name := _REVIEW.fullmatch(member.name)):
                continue
            part, kind, number, rating = name.groups()
            text = file.read().decode()
            found[part].append((int(kind == "pos"), int(number), int(rating), text))
        if not all(found.values()):
            raise ValueError("no reviews in it")
    for part, rows in found.items():
        table = ((label, rating, number, text) for label, number, rating, text in sorted(rows))
        _write_table(folder / f"{part}.csv.gz", ("label", "rating", "id", "text"), table)


def convert_ag_news(originals: Sequence[Path], folder: Path) -> None:
    """Converts tables of class (from 1), title and description; keeps part of the training rows."""
    train, test = (_read_news(path) for path in originals)
    tested = {row["description"] for row in test}
    train = [row for row in train if row["description"] not in tested]
    labels = np.array([int(row["label"]) for row in train])
    kept = [train[place] for place in _first_of_each(labels, AG_NEWS_ROWS)]
    for name, rows in (("train_subset", kept), ("test", test)):
        columns = ("label", "title", "description")
        table = ([row[column] for column in columns] for row in rows)
        _write_table(folder / f"{name}.csv.gz", columns, table)


def _read_news(path: Path) -> list[Mapping[str, str]]:
    with reading(path):
        rows = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))
        return [
            {"label": str(int(label) - 1), "title": title, "description": description}
            for label, title, description in rows
        ]


def _write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(rows)
