"""Gradients by sample of models of other libraries, which know nothing of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from by_sample import SampleCase, floats, ids
from ranks import run_on_lasting_groups
from single_backwards import Seeing, check_norms_and_clipped_mean, check_opacus


class Logits(nn.Module):
    """A model of transformers, called with ids alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids).logits


def timm_vit(**options: Any) -> SampleCase:
    from timm_alone import timm

    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    make = timm().create_model
    model = make("vit_tiny_patch16_224", **size, num_classes=5, init_values=0.1, **options)
    return SampleCase(model, floats(3, 16, 16))


def of_transformers(name: str) -> SampleCase:
    pytest.importorskip("transformers")
    import zoo_text

    return SampleCase(Logits(getattr(zoo_text, name)()), [x + 3 for x in ids(6)])


def lora(base: str, *, dora: bool = False) -> SampleCase:
    pytest.importorskip("peft")
    from zoo_others import adapted

    return SampleCase(Logits(adapted(base, dora=dora)), [x + 3 for x in ids(6)])


MODELS: dict[str, Callable[[], SampleCase]] = {
    "timm's vit": timm_vit,
    "timm's vit, registers": lambda: timm_vit(
        reg_tokens=2, no_embed_class=True, dynamic_img_size=True, qk_norm=True
    ),
    "gpt2": lambda: of_transformers("gpt2"),
    "bert": lambda: of_transformers("bert"),
    "llama": lambda: of_transformers("llama"),
    "lora on llama": lambda: lora("llama"),
    "lora on gpt2": lambda: lora("gpt2"),
}
OPACUS = {
    "gpt2": "takes positions that all samples share for those of one sample",
    "bert": "refuses a head whose bias belongs to two modules",
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


def rules() -> Any:
    """With one for GPT-2's Conv1D."""
    transformers = pytest.importorskip("outergrad.integrations.transformers")
    return transformers.RULES


def built(name: str) -> SampleCase:
    torch.manual_seed(5)
    return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_clipped_mean_of_the_zoo(name):
    check_norms_and_clipped_mean(built(name), rules())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_opacus_in_the_zoo(name):
    if name in OPACUS:
        pytest.skip(f"Opacus {OPACUS[name]}")
    check_opacus(built(name))


def test_dora_is_refused():
    """Magnitudes of DoRA, whose matrices are used outside of samples."""

    def body(rank, group):
        about = {"group": group, "transform": Seeing(1.0, []), "rules": rules()}
        with pytest.raises(ValueError, match=r"lora_magnitude_vector.*use_dora=False"):
            og.distribute(lora("llama", dora=True).model, og.DAD(), **about)

    run_on_lasting_groups(1, body)
