"""Models by name."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from outergrad.recipes.data.dataset import Format
from outergrad.recipes.errors import RecipeError
from outergrad.recipes.models.cnn import build_cnn
from outergrad.recipes.models.mlp import build_mlp
from outergrad.recipes.models.recurrent import build_gru, build_lstm
from outergrad.recipes.models.transformers import build_gpt, build_vit

INPUTS: dict[str, Callable[[Format], bool]] = {
    "values": lambda format: not format.tokens,
    "sequences": lambda format: not format.tokens and len(format.shape) == 2,
    "images": lambda format: not format.tokens and len(format.shape) == 3,
    "tokens": lambda format: format.tokens and len(format.shape) == 1,
}
"""What models eat: numbers of any shape, (steps, features), (channels, height, width), (ids,)."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A kind of model.

    Attributes:
        inputs: What it eats, a key of `INPUTS`.
        build: Makes one for a format and widths that fit.
        widths: Its widths where the user gives none.
        any_number: Whether it takes any number of widths, not just as many as it has.
    """

    inputs: str
    build: Callable[[Format, tuple[int, ...]], nn.Module]
    widths: tuple[int, ...] = ()
    any_number: bool = False

    def fits(self, format: Format) -> bool:
        """Whether it eats rows of a format."""
        return INPUTS[self.inputs](format)

    def takes(self, widths: tuple[int, ...]) -> bool:
        """Whether it can have that number of widths."""
        return self.any_number or len(widths) == len(self.widths)


MODELS: dict[str, Model] = {
    "mlp": Model(inputs="values", build=build_mlp, widths=(1024, 1024), any_number=True),
    "gru": Model(inputs="sequences", build=build_gru, widths=(128,)),
    "lstm": Model(inputs="sequences", build=build_lstm, widths=(128,)),
    "vit": Model(inputs="images", build=build_vit),
    "gpt": Model(inputs="tokens", build=build_gpt),
    "cnn": Model(inputs="images", build=build_cnn),
}


def build_model(name: str, format: Format, widths: tuple[int, ...] | None = None) -> nn.Module:
    """Makes a model for a data set.

    Args:
        name: A key of `MODELS`.
        format: What a row of the data is.
        widths: Features of the hidden layers; the model's own default if None.

    Raises:
        RecipeError: The model does not fit the data or the widths.
    """
    require_fit(name, format, widths)
    model = MODELS[name]
    return model.build(format, model.widths if widths is None else widths)


def require_fit(name: str, format: Format, widths: tuple[int, ...] | None) -> None:
    """Raises `RecipeError` where a model does not fit the data or the widths."""
    model = MODELS[name]
    if not model.fits(format):
        fitting = ", ".join(other for other in MODELS if MODELS[other].fits(format))
        raise RecipeError(
            f"--model {name} needs {model.inputs}, but the data has {format}: use {fitting}"
        )
    if widths is not None and not model.takes(widths):
        given = "-".join(map(str, widths)) or "''"
        wanted = f"give {len(model.widths)}" if model.widths else "leave it out"
        raise RecipeError(f"--widths {given} does not fit --model {name}: {wanted}")
