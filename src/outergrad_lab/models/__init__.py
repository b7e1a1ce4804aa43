"""Models by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from outergrad.launch.errors import RecipeError
from outergrad_lab.data.dataset import Format
from outergrad_lab.models.small import (
    ACTIVATIONS,
    Activation,
    build_cnn,
    build_mlp,
    build_plain_convolutions,
    build_recurrent,
    build_two_convolutions,
)
from outergrad_lab.models.transformers import build_bag, build_encoder, build_gpt, build_vit

INPUTS: dict[str, Callable[[Format], bool]] = {
    "values": lambda format: not format.tokens,
    "sequences": lambda format: not format.tokens and len(format.shape) == 2,
    "images": lambda format: not format.tokens and len(format.shape) == 3,
    "tokens with a label each": lambda format: format.label_shape != (),
    "tokens with a label per row": lambda format: format.vocabulary is not None,
}
"""Model inputs: numbers of any shape, (steps, features), (channels, height, width), or (ids,)."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A kind of model.

    Attributes:
        inputs: Kind of its inputs, a key of `INPUTS`.
        build: Makes one for a format, features of hidden layers that fit, and their activation.
        widths: Its widths where the user gives none.
        any_number: Whether it takes any number of widths.
        further: Number of widths that it can have besides its own, if not any number.
        activation: Its activation where the user names none; None if that cannot be chosen.
        activation_from: Least number of widths with which it has a place for an activation.
    """

    inputs: str
    build: Callable[[Format, tuple[int, ...], Activation], nn.Module]
    widths: tuple[int, ...] = ()
    any_number: bool = False
    further: int = 0
    activation: str | None = None
    activation_from: int = 0

    def fits(self, format: Format) -> bool:
        """True if its inputs can be rows of a format."""
        return INPUTS[self.inputs](format)

    def takes(self, widths: tuple[int, ...]) -> bool:
        """True if it can have that number of widths."""
        return self.any_number or 0 <= len(widths) - len(self.widths) <= self.further

    def has_place(self, widths: tuple[int, ...]) -> bool:
        """True if an activation can be chosen for layers of these widths."""
        return self.activation is not None and len(widths) >= self.activation_from


_RECURRENT: dict[str, Any] = {
    "inputs": "sequences",
    "widths": (128,),
    "further": 1,
    "activation": "relu",
    "activation_from": 2,
}
MODELS: dict[str, Model] = {
    "mlp": Model(
        inputs="values",
        build=build_mlp,
        widths=(1024, 1024),
        any_number=True,
        activation="relu",
        activation_from=1,
    ),
    "gru": Model(build=partial(build_recurrent, nn.GRU), **_RECURRENT),
    "lstm": Model(build=partial(build_recurrent, nn.LSTM), **_RECURRENT),
    "vit": Model(inputs="images", build=build_vit, activation="gelu"),
    "encoder": Model(
        inputs="tokens with a label per row",
        build=build_encoder,
        widths=(128,),
        activation="gelu",
    ),
    "bag": Model(inputs="tokens with a label per row", build=build_bag, widths=(32,)),
    "gpt": Model(inputs="tokens with a label each", build=build_gpt, widths=(256,)),
    "cnn": Model(inputs="images", build=build_cnn),
    "two-convolutions": Model(inputs="images", build=build_two_convolutions, widths=(16, 32, 256)),
    "plain-convolutions": Model(
        inputs="images",
        build=build_plain_convolutions,
        widths=(16, 32, 32),
        activation="tanh",
    ),
}


def build_model(
    name: str,
    format: Format,
    widths: tuple[int, ...] | None = None,
    activation: str | None = None,
) -> nn.Module:
    """Makes a model for a data set.

    Args:
        name: A key of `MODELS`.
        format: Form of a row of the data.
        widths: Features of the hidden layers; the model's own default if None.
        activation: A key of `ACTIVATIONS`; the model's own if None.

    Raises:
        RecipeError: The model does not fit the data, the widths or the activation.
    """
    require_fit(name, format, widths, activation)
    model = MODELS[name]
    kind = activation or model.activation or "linear"
    chosen = model.widths if widths is None else widths
    return model.build(format, chosen, ACTIVATIONS[kind])


def require_fit(
    name: str,
    format: Format,
    widths: tuple[int, ...] | None,
    activation: str | None = None,
) -> None:
    """Raises `RecipeError` where a model does not fit the data, the widths or the activation."""
    _require_inputs(name, format)
    if widths is not None:
        _require_widths(name, widths)
    if activation is not None:
        _require_place(name, MODELS[name].widths if widths is None else widths, activation)


def _require_inputs(name: str, format: Format) -> None:
    model = MODELS[name]
    if not model.fits(format):
        fitting = ", ".join(other for other in MODELS if MODELS[other].fits(format))
        raise RecipeError(
            f"--model {name} needs {model.inputs}, but the data has {format}: use {fitting}"
        )


def _require_widths(name: str, widths: tuple[int, ...]) -> None:
    model = MODELS[name]
    if not model.takes(widths):
        numbers = range(len(model.widths), len(model.widths) + model.further + 1)
        wanted = f"give {' or '.join(map(str, numbers))}" if model.widths else "leave it out"
        raise RecipeError(f"--widths {_written(widths)} does not fit --model {name}: {wanted}")


def _require_place(name: str, widths: tuple[int, ...], activation: str) -> None:
    model = MODELS[name]
    if model.has_place(widths):
        return
    where, wanted = f"--model {name}", "leave it out"
    if model.activation is not None:
        where += f" with --widths {_written(widths)}"
        plural = "s" if model.activation_from > 1 else ""
        wanted += f", or give {model.activation_from} width{plural}"
    raise RecipeError(f"--activation {activation} has no place in {where}: {wanted}")


def _written(widths: tuple[int, ...]) -> str:
    return "-".join(map(str, widths)) or "''"
