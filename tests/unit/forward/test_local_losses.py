"""LocalMixer: local losses add up to the block's own, and nothing passes between blocks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from outergrad.forward import LocalMixer, forward_loss
from outergrad.forward.local_mixer import own_losses

SIZES = {"channels": 6, "groups": 2, "patches": 3, "blocks": 2}


def made(seed=0, **sizes):
    torch.manual_seed(seed)
    model = LocalMixer(4, 3, **{**SIZES, **sizes}).double()
    x = torch.randn(5, model.patches, 4, dtype=torch.float64)
    return model, x, torch.tensor([0, 1, 2, 0, 1])


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def block_losses(model, x, y):
    """Each block's cross entropy, by plain autograd, from the output of the block before."""
    h, losses = model.as_patches(x), []
    for block in model.each_block():
        h = block(h.detach())
        losses.append(cross_entropy(torch.einsum("npc,ck->nk", h, block.head) / h.shape[1], y))
    return losses


@pytest.mark.parametrize("sizes", [{}, {"groups": 1}, {"patches": 1}, {"blocks": 3}])
def test_gradients_of_local_losses_add_up_to_the_blocks(sizes):
    model, x, y = made(**sizes)
    ours = gradients(model, model.local_losses(x, y).mean(1).sum())
    theirs = gradients(model, sum(block_losses(model, x, y)))
    assert ours.keys() == theirs.keys() == dict(model.named_parameters()).keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-10, atol=1e-12)


def test_every_local_loss_of_a_block_has_the_value_of_the_blocks():
    model, x, y = made()
    found = model.local_losses(x, y).mean(1)
    for own, whole in zip(found, block_losses(model, x, y), strict=True):
        torch.testing.assert_close(own, whole.detach().expand_as(own))


def test_a_loss_moves_what_it_owns_and_nothing_else():
    model, x, y = made(blocks=3)
    losses = model.local_losses(x, y).mean(1).sum(1).flatten()
    params = dict(model.named_parameters())
    for number, loss in enumerate(losses):
        found = torch.autograd.grad(
            loss, list(params.values()), retain_graph=True, materialize_grads=True
        )
        for (name, p), grad in zip(params.items(), found, strict=True):
            moved = grad.reshape(len(p), -1).abs().sum(1)
            owned = model.owners()[name][number]
            assert moved[owned == 0].eq(0).all(), name
    # and each row of a head is owned by one loss, each row of a token layer by a block's groups
    assert model.owners()["blocks.0.head"].sum(0).eq(1).all()
    assert model.owners()["blocks.1.token.weight"].sum(0).eq(model.groups).all()


def test_a_part_of_the_logits_is_differentiated_alone():
    logits = torch.randn(4, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 1, 2, 2])
    (grad,) = torch.autograd.grad(own_losses(logits, y)[:, 0, 1].sum(), logits)
    assert grad[:, :, 0].eq(0).all()
    whole = logits.detach().sum((1, 2))
    expected = whole.softmax(-1) - torch.eye(3, dtype=torch.float64)[y]
    torch.testing.assert_close(grad[:, 0, 1], expected)


@pytest.mark.parametrize("sizes", [{"patches": 1}, {}, {"groups": 1}])
def test_the_mean_over_many_signs_is_the_gradient_of_the_local_losses(sizes):
    """Within 4.5 standard errors in each place: of some 150 places one is beyond by 0.1 %."""
    model, x, y = made(**sizes)
    exact = gradients(model, model.local_losses(x, y).mean(1).sum())
    drawn = [gradients(model, forward_loss(model, x, y, seed)) for seed in range(400)]
    for name, grad in exact.items():
        found = torch.stack([one[name] for one in drawn])
        if name.endswith("head"):
            torch.testing.assert_close(found, grad.expand_as(found), rtol=1e-10, atol=1e-12)
            continue
        error = found.std(0) / len(drawn) ** 0.5
        assert ((found.mean(0) - grad).abs() <= 4.5 * error + 1e-12).all(), name
        assert error.max() < 0.5 * grad.abs().max(), f"{name}: too few draws to tell"


def test_the_loss_has_the_value_of_all_blocks_and_repeats_by_its_seed():
    model, x, y = made()
    first, again = forward_loss(model, x, y, 3), forward_loss(model, x, y, 3)
    torch.testing.assert_close(first, sum(block_losses(model, x, y)))
    ours, theirs = gradients(model, first), gradients(model, again)
    other = gradients(model, forward_loss(model, x, y, 4))
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert not ours["blocks.0.channel.weight"].equal(other["blocks.0.channel.weight"])


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"groups": 4}, "multiple of groups"),
        ({"groups": 6}, "2 or more in each"),
        ({"blocks": 0}, "1 or more"),
    ],
)
def test_sizes_that_make_no_groups_are_refused(sizes, said):
    with pytest.raises(ValueError, match=said):
        made(**sizes)


def test_a_batch_of_another_shape_is_refused():
    model, _, _ = made()
    with pytest.raises(ValueError, match=r"3 patches, 4 features"):
        model(torch.randn(5, 4))
