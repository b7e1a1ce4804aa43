"""Forward gradients by perturbed activities: no error passes through more than one layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn import functional as F

from outergrad.forward.local_mixer import Block, LocalMixer
from outergrad.forward.one_at_a_time import differentiated
from outergrad.forward.signs import signs


def forward_loss(model: LocalMixer, x: Tensor, labels_N: Tensor, seed: int) -> Tensor:
    """Returns a loss whose backward leaves forward gradients in a model's parameters.

    Random signs u are added to what every linear layer puts out, z = W a. One pass of forward
    differentiation tells how much each local loss changes along them, s (N, P, G). Then

        Δ̂ = s u,        Ŵ-gradient = Σ Δ̂ aᵀ

    whose mean over u is the gradient of the block's own loss, E[u uᵀ] = 1. Backward passes through
    single layers, never from one to the next; heads have exact gradients. The value is the sum of
    the blocks' losses.

    The variance for a layer grows with the numbers that its local loss depends on, and falls as
    1/N; that of perturbed weights does not fall with N.

    Choose it where a device has no room for what backward must keep. **It saves no message by
    itself.** Δ̂ can be made again from a seed and N · P · G numbers, but a is the data of the site
    and can not: whoever should form the gradient needs a. So estimates travel as gradients do, by
    any method: `og.distribute(model, og.DAD())` sends the rows of a and Δ̂. Where only some
    hundred bytes may travel, take `SeededGradients`.

    Source: Ren et al., Scaling Forward Gradient With Local Losses, arXiv 2210.03310. They draw
    normal numbers; signs have a smaller variance.

    Args:
        model: Model whose losses are differentiated.
        x: Samples, (N, P, I), or (N, I) if P is 1.
        labels_N: Their classes.
        seed: Seed of the signs; another one for every step and site.
    """
    inputs, outputs, drawn = _course(model, x, seed)

    def losses(*noise: Sequence[Tensor]) -> Tensor:
        return model.local_losses(x, labels_N, noise)

    zeros = [[torch.zeros_like(u) for u in layers] for layers in drawn]
    s_BNPG = differentiated(lambda: jvp(losses, tuple(zeros), tuple(drawn)))[1]
    found = torch.zeros((), dtype=s_BNPG.dtype, device=s_BNPG.device)
    for b, block in enumerate(model.each_block()):
        logits_NK = block.logits(outputs[b]).sum((1, 2))
        found = found + F.cross_entropy(logits_NK, labels_N)
        for layer, a, u in zip(block.layers, inputs[b], drawn[b], strict=True):
            delta = u * spread(s_BNPG[b], layer is block.token, u) / len(labels_N)
            moved = (layer(a) * delta).sum()
            found = found + (moved - moved.detach())
    return found


def spread(s_NPG: Tensor, mixes_patches: bool, u: Tensor) -> Tensor:
    """Returns the derivatives that count for each output of a layer, in the shape of its signs.

    Args:
        s_NPG: Derivatives of the losses of a block.
        mixes_patches: Whether the outputs of the layer are patches, (N, I, P), in which all groups
            take part; else they are channels, (N, P, C), each of one group.
        u: Signs of the layer.
    """
    if mixes_patches:
        return s_NPG.sum(-1)[:, None, :].expand_as(u)
    return s_NPG.repeat_interleave(u.shape[-1] // s_NPG.shape[-1], dim=-1)


def _course(
    model: LocalMixer, x: Tensor, seed: int
) -> tuple[list[list[Tensor]], list[Tensor], list[list[Tensor]]]:
    """Returns the inputs of all layers, the outputs of all blocks, and signs for all layers."""
    inputs, outputs, drawn = [], [], []
    with torch.no_grad():
        h = model.as_patches(x)
        for b, block in enumerate(model.each_block()):
            h, own = block.run(h)
            inputs.append(own)
            outputs.append(h)
            drawn.append([_signs_of(block, k, own[k], seed, b) for k in range(len(own))])
    return inputs, outputs, drawn


def _signs_of(block: Block, k: int, a: Tensor, seed: int, b: int) -> Tensor:
    return signs((*a.shape[:-1], block.layers[k].out_features), a, seed, b, k)
