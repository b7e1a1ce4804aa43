"""Readers of sequences of numbers."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outergrad_lab.data.dataset import Dataset
from outergrad_lab.data.files import as_labels, read_parts, reading_arrays

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
