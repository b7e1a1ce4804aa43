"""Workloads of the benchmarks: a model, its data and its learning rate."""

from dataclasses import dataclass

from torch import nn

from outergrad_lab.data import SOURCES, Format
from outergrad_lab.models import build_model


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training that methods are compared on.

    Attributes:
        summary: Description in a few words.
        model: A key of `MODELS`.
        widths: Features of the model's hidden layers.
        data: The key of `SOURCES` of real data, if there is some.
        made_up: Form of a row of random data, if there is no real data.
        batch_size: Rows per site and step.
        lr: Learning rate of Adam.
    """

    summary: str
    model: str
    widths: tuple[int, ...] = ()
    data: str | None = None
    made_up: Format | None = None
    batch_size: int
    lr: float

    @property
    def format(self) -> Format:
        """Form of a row of the data."""
        found = SOURCES[self.data].format if self.data else self.made_up
        assert found is not None
        return found

    def build(self) -> nn.Module:
        """Makes the model."""
        return build_model(self.model, self.format, self.widths)


WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(
        summary="MLP 784-1024-1024-10 on handwritten digits",
        model="mlp",
        widths=(1024, 1024),
        data="mnist",
        batch_size=32,
        lr=1e-3,
    ),
    "deep-mlp": Workload(
        summary="MLP 512-512-256-128-64-32-16-10 on handwritten digits",
        model="mlp",
        widths=(512, 256, 128, 64, 32, 16),
        data="mnist-512",
        batch_size=32,
        lr=2e-3,
    ),
    "wide-mlp": Workload(
        summary="MLP of ten layers of 1024",
        model="mlp",
        widths=(1024,) * 9,
        made_up=Format(shape=(1024,), classes=1024),
        batch_size=32,
        lr=1e-4,
    ),
    "vgg": Workload(
        summary="classifier of VGG-16, MLP 25088-4096-4096-1000",
        model="mlp",
        widths=(4096, 4096),
        made_up=Format(shape=(25088,), classes=1000),
        batch_size=16,
        lr=1e-4,
    ),
    "gru": Workload(
        summary="GRU of 128 hidden features on spoken digits",
        model="gru",
        widths=(128,),
        data="spoken-digits",
        batch_size=32,
        lr=3e-3,
    ),
    "lstm": Workload(
        summary="LSTM of 128 hidden features on spoken digits",
        model="lstm",
        widths=(128,),
        data="spoken-digits",
        batch_size=32,
        lr=3e-3,
    ),
    "vit": Workload(
        summary="vision transformer of 6 layers on photographs of 32 x 32 pixels",
        model="vit",
        data="cifar10",
        batch_size=16,
        lr=3e-4,
    ),
    "gpt": Workload(
        summary="GPT of 4 layers on Shakespeare, 128 characters per row",
        model="gpt",
        widths=(256,),
        data="tinyshakespeare",
        batch_size=8,
        lr=3e-4,
    ),
    "encoder": Workload(
        summary="text encoder of 2 layers on news, 64 tokens per row",
        model="encoder",
        widths=(128,),
        data="ag-news",
        batch_size=32,
        lr=1e-3,
    ),
    "cnn": Workload(
        summary="residual CNN of 14 layers on photographs of 32 x 32 pixels",
        model="cnn",
        data="cifar10",
        batch_size=16,
        lr=1e-3,
    ),
    "x-rays": Workload(
        summary="CNN of federated averaging on chest X-rays of 28 x 28 pixels",
        model="two-convolutions",
        widths=(16, 32, 256),
        data="pneumonia",
        batch_size=16,
        lr=1e-3,
    ),
}
