"""What every data set looks like to a training loop."""

from dataclasses import dataclass

import torch
from torch import Tensor

SYNTHETIC_TEST_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Format:
    """What one row of a data set is.

    Attributes:
        shape: Shape of its input.
        classes: Number of classes; of different tokens, where rows are made of them.
        tokens: Whether inputs are int64 ids, with a label for each position.
    """

    shape: tuple[int, ...]
    classes: int
    tokens: bool = False

    def __str__(self) -> str:
        """Writes it for an error, as ``rows of 3 x 32 x 32 numbers in 10 classes``."""
        what = "tokens" if self.tokens else "numbers"
        return f"rows of {' x '.join(map(str, self.shape))} {what} in {self.classes} classes"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Labelled rows to train on and to be tested on.

    Attributes:
        x_train: Training inputs, float32 or ids in int64, (rows, *shape).
        y_train: Their labels, int64, (rows,); (rows, *shape) where rows are tokens.
        x_test: Test inputs, as ``x_train``.
        y_test: Their labels.
        classes: Number of classes.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int

    @property
    def format(self) -> Format:
        """What one row is."""
        return Format(
            shape=tuple(self.x_train.shape[1:]),
            classes=self.classes,
            tokens=not self.x_train.is_floating_point(),
        )


def synthetic(format: Format, rows: int, seed: int) -> Dataset:
    """Makes up random data, for when only the time or the bytes of a step matter.

    Args:
        format: What a row is.
        rows: Number of training rows; there are a few test rows besides.
        seed: Of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    x_train, y_train = _random_rows(format, rows, generator)
    x_test, y_test = _random_rows(format, SYNTHETIC_TEST_ROWS, generator)
    return Dataset(
        x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=format.classes
    )


def _random_rows(format: Format, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Independent inputs and labels."""
    shape = (rows, *format.shape)
    if format.tokens:
        x = torch.randint(format.classes, shape, generator=generator)
    else:
        x = torch.randn(shape, generator=generator)
    labels = shape if format.tokens else (rows,)
    return x, torch.randint(format.classes, labels, generator=generator)
