"""Norms and clipped means of gradients by sample, of layers and of models, are the oracle's.

The oracle takes a backward per sample in float64, clips, and takes the mean.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from by_sample import CASES, SampleCase, floats, ids
from single_backwards import check_norms_and_clipped_mean, check_opacus


class OfItself(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


class First(OfItself):
    """The first result of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def images(*layers: nn.Module, size: int = 8) -> SampleCase:
    return SampleCase(nn.Sequential(*layers), floats(4, size, size))


def gpt() -> SampleCase:
    """The lab's GPT: positions looked up once, a head that shares the embedding's table."""
    from outergrad_lab.data.dataset import Format
    from outergrad_lab.models.transformers import GPT

    model = GPT(Format(shape=(6,), classes=20, tokens=True, vocabulary=20), 16, 2)
    return SampleCase(model, ids(6))


def gpt_of_a_square() -> SampleCase:
    """With as many samples as positions."""
    return SampleCase(gpt().model, ids(6, counts=(6, 6)))


def vit() -> SampleCase:
    """The lab's, of PyTorch's own encoder layers."""
    from outergrad_lab.data.dataset import Format
    from outergrad_lab.models.transformers import VisionTransformer

    model = VisionTransformer(Format(shape=(3, 8, 8), classes=5), width=24, depth=2)
    return SampleCase(model, floats(3, 8, 8))


MODELS: dict[str, Callable[[], SampleCase]] = {
    "conv2d, stride, dilation, groups": lambda: images(
        nn.Conv2d(4, 4, 3, padding=1, stride=2, dilation=2, groups=2)
    ),
    "conv3d": lambda: SampleCase(
        nn.Sequential(nn.Conv3d(2, 4, 2, stride=2, groups=2), nn.Tanh(), nn.Conv3d(4, 3, 1)),
        floats(2, 5, 5, 5),
    ),
    "group norm": lambda: images(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()),
    "instance norm": lambda: images(
        nn.Conv2d(4, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 2, 3)
    ),
    "instance norm, running": lambda: images(
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.Conv2d(4, 8, 3)
    ),
    "prelu": lambda: images(nn.Conv2d(4, 8, 3), nn.PReLU(8), nn.Conv2d(8, 2, 3)),
    "attention, learnt keys": lambda: SampleCase(
        OfItself(nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)), floats(4, 8)
    ),
    "lstm": lambda: SampleCase(First(nn.LSTM(8, 5, 2, batch_first=True)), floats(4, 8)),
    "gpt": gpt,
    "gpt, as many samples as positions": gpt_of_a_square,
    "vit": vit,
}
TABLE = CASES | MODELS
OPACUS = {
    "embedding": "counts the row of padding, which has no gradient",
    "bags": "refuses ids of two dimensions",
    "positions of all": "adds what all samples share to the first one",
    "gpt": "adds what all samples share to the first one",
    "gpt, as many samples as positions": "takes positions for samples",
    "instance norm, running": "refuses running statistics",
    "checkpointed": "loses the layers of a checkpoint",
    "used by one": "has no gradient of a layer that is not used",
}
"""Where Opacus 1.6 refuses, or is not what the oracle says."""
OWN_CLASSES = "attention", "gru", "lstm", "cell", "vit"
"""Recurrent layers and attention, for which Opacus has classes of its own."""


def built(name: str) -> SampleCase:
    torch.manual_seed(5)
    return TABLE[name]()


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", TABLE)
def test_norms_and_clipped_mean(name):
    check_norms_and_clipped_mean(built(name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in TABLE if not name.startswith(OWN_CLASSES)])
def test_opacus_has_the_same_norms(name):
    if name in OPACUS:
        pytest.skip(f"Opacus {OPACUS[name]}")
    check_opacus(built(name))
