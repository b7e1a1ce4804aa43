"""Attacks behind a first convolution: images of a batch of one, members by layers inside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outergrad.tools.audit.attacks.deeper import inner_members
from outergrad.tools.audit.attacks.patches import Cut, image_in_span, patches_by_positions
from outergrad.tools.audit.attacks.span import span_of
from outergrad.tools.audit.campaign import Campaign
from outergrad.tools.audit.findings import Finding, Truth
from outergrad.tools.audit.places import places_of
from outergrad.tools.audit.view import View, masked
from outergrad_lab.data.dataset import Format
from outergrad_lab.models import build_model

SMALL = Format(shape=(3, 16, 16), classes=4)
CANARIES = 16
OUTPUTS = 40


def drawn(rows: int, shape: tuple[int, ...], seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *shape, generator=generator), torch.randint(
        4, (rows,), generator=generator
    )


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    names, params = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(cross_entropy(model(x), y), params)
    return dict(zip(names, found, strict=True))


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return build_model("vit", SMALL, ())


def few_patches(bias: bool = True) -> nn.Sequential:
    """A convolution of 16 overlapping patches, each of 64 numbers, and 40 channels."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, OUTPUTS, 8, stride=2, bias=bias)
    return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(OUTPUTS * 16, 4))


def looked(model: nn.Module, view: View, x: Tensor, y: Tensor) -> dict[str, Finding]:
    outside = drawn(CANARIES, tuple(x.shape[1:]), seed=9)
    found = Campaign(model, places_of(model, x[:1])).on(view, Truth(x=x, y=y, outside=outside))
    return {one.attack: one for one in found}


def test_the_image_of_a_vision_transformer_comes_back_by_its_positions():
    model, (x, y) = transformer(), drawn(1, SMALL.shape)
    places = places_of(model, x)
    assert places.patches == "patches"
    assert places.positions == ("positions", 1)  # behind the class token
    found = looked(model, View(gradients=gradients(model, x, y)), x, y)
    assert (found["rows by positions"].exact, found["rows by positions"].false) == (1, 0)
    assert found["rows by patches"].found == 0  # 16 patches of 48 numbers, none of which overlap


def test_two_images_of_a_vision_transformer_give_none():
    model, (x, y) = transformer(), drawn(2, SMALL.shape)
    found = gradients(model, x, y)
    gradient, positions = found["patches.weight"].flatten(1), found["positions"][0, 1:]
    assert len(patches_by_positions(gradient, positions)) == 0


def test_a_position_table_of_noise_or_zeros_gives_no_patches():
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(OUTPUTS, 48, generator=generator)
    noise = torch.randn(16, OUTPUTS, generator=generator)
    assert len(patches_by_positions(gradient, noise)) == 0
    assert len(patches_by_positions(gradient, torch.zeros(16, OUTPUTS))) == 0


def test_an_image_comes_back_of_few_overlapping_patches():
    model, (x, y) = few_patches(), drawn(1, (1, 14, 14))
    found = looked(model, View(gradients=gradients(model, x, y)), x, y)["rows by patches"]
    assert (found.found, found.exact, found.false) == (1, 1, 0)


@pytest.mark.parametrize("rows", [2, 8])
def test_overlapping_patches_of_several_images_give_none(rows):
    model, (x, y) = few_patches(), drawn(rows, (1, 14, 14))
    found = looked(model, View(gradients=gradients(model, x, y)), x, y)["rows by patches"]
    assert (found.found, found.false) == (0, 0)


def test_without_a_bias_nothing_tells_the_size_of_an_image():
    model, (x, y) = few_patches(bias=False), drawn(1, (1, 14, 14))
    gradient = gradients(model, x, y)["0.weight"].flatten(1)
    first = model[0]
    assert isinstance(first, nn.Conv2d)
    cut = Cut.of(first, (1, 14, 14))
    assert cut is not None
    assert len(image_in_span(span_of(gradient), cut, gradient, None)) == 0


def test_an_image_is_that_of_its_patches():
    (x, _), layer = drawn(1, (3, 12, 12)), nn.Conv2d(3, 4, 4, stride=2, padding=1)
    cut = Cut.of(layer, (3, 12, 12))
    assert cut is not None
    torch.testing.assert_close(cut.image(cut.patches(x)[0]), x[0].double())
    assert Cut.of(nn.Conv2d(4, 4, 3, groups=2), (4, 8, 8)) is None
    assert Cut.of(nn.Conv2d(4, 4, 3, padding="same"), (4, 8, 8)) is None


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_members_are_in_the_span_of_a_layer_inside_and_canaries_are_not(rows):
    model, (x, y) = transformer(), drawn(rows, SMALL.shape)
    found = looked(model, View(gradients=gradients(model, x, y)), x, y)["members by inner spans"]
    assert (found.found, found.of) == (rows, rows)
    assert (found.false, found.canaries) == (0, CANARIES)


def test_patches_of_members_are_in_the_span_of_a_wide_kernel():
    model, (x, y) = few_patches(), drawn(1, (1, 14, 14))
    found = looked(model, View(gradients=gradients(model, x, y)), x, y)["members by the span"]
    assert (found.found, found.false) == (1, 0)


@pytest.mark.parametrize("rows", [1, 8])
def test_masked_parts_and_noise_tell_nothing_of_images(rows):
    model, (x, y) = transformer(), drawn(rows, SMALL.shape)
    true = gradients(model, x, y)
    generator = torch.Generator().manual_seed(0)
    noise = {n: torch.randn(g.shape, generator=generator) for n, g in true.items()}
    for view in (masked(View(gradients=true)), View(gradients=noise)):
        for attack, found in looked(model, view, x, y).items():
            if attack.startswith(("rows", "members by the span", "members by inner")):
                assert (found.found, found.false) == (0, 0), attack


def test_another_batch_has_no_members_inside():
    model, (x, _) = transformer(), drawn(8, SMALL.shape)
    told = inner_members(model, gradients(model, *drawn(8, SMALL.shape, seed=5)), x)
    assert told is not None
    assert not bool(told[1].any())
