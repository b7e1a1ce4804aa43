"""Common form of all data sets for a training loop."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SYNTHETIC_TEST_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Format:
    """Form of one row of a data set.

    Attributes:
        shape: Shape of its input.
        classes: Number of classes, or of different tokens where labels are tokens, too.
        tokens: Whether inputs are int64 ids.
        vocabulary: Number of different tokens, where a row of tokens has one label; None where it
            has a label for each position, or is not made of tokens.
    """

    shape: tuple[int, ...]
    classes: int
    tokens: bool = False
    vocabulary: int | None = None

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of the labels of one row: one number, or one for each position."""
        return self.shape if self.tokens and self.vocabulary is None else ()

    def __str__(self) -> str:
        """Formats it for an error, as ``rows of 3 x 32 x 32 numbers in 10 classes``."""
        what = "tokens" if self.tokens else "numbers"
        if self.vocabulary is not None:
            what += f" out of {self.vocabulary}"
        return f"rows of {' x '.join(map(str, self.shape))} {what} in {self.classes} classes"


@dataclass(frozen=True)
class Dataset:
    """Labelled rows to train on and to be tested on.

    Attributes:
        x_train: Training inputs, float32 or ids in int64, (rows, *shape).
        y_train: Their labels, int64, (rows, *format.label_shape).
        x_test: Test inputs, as ``x_train``.
        y_test: Their labels.
        classes: Number of classes.
        vocabulary: As `Format.vocabulary`.
        groups_train: Person that each training row is from, int64, (rows,), where that is known.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    vocabulary: int | None = None
    groups_train: Tensor | None = None

    @property
    def format(self) -> Format:
        """Form of one row."""
        return Format(
            shape=tuple(self.x_train.shape[1:]),
            classes=self.classes,
            tokens=not self.x_train.is_floating_point(),
            vocabulary=self.vocabulary,
        )

    def to(self, dtype: torch.dtype) -> "Dataset":
        """Returns the data set with inputs of another precision; ids stay what they are."""
        return self if self.format.tokens else self.mapped(lambda x: x.to(dtype))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Dataset":
        """Returns the data set with `change` applied to all inputs."""
        return replace(self, x_train=change(self.x_train), x_test=change(self.x_test))

    def standardised(self, dims: tuple[int, ...]) -> "Dataset":
        """Scales training inputs to mean 0 and variance 1 over ``dims``, test inputs alike."""
        variance, mean = torch.var_mean(self.x_train, dims, keepdim=True)
        return self.mapped(lambda x: (x - mean) / variance.sqrt())


def synthetic(format: Format, rows: int, seed: int) -> Dataset:
    """Returns random data, for when only the time or the bytes of a step matter.

    Args:
        format: Form of a row.
        rows: Number of training rows; there are a few test rows besides.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    train = _random_rows(format, rows, generator)
    test = _random_rows(format, SYNTHETIC_TEST_ROWS, generator)
    return Dataset(*train, *test, classes=format.classes, vocabulary=format.vocabulary)


def _random_rows(format: Format, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (rows, *format.shape)
    if format.tokens:
        x = torch.randint(format.vocabulary or format.classes, shape, generator=generator)
    else:
        x = torch.randn(shape, generator=generator)
    labels = (rows, *format.label_shape)
    return x, torch.randint(format.classes, labels, generator=generator)
