"""LocalMixer: a network of blocks with a loss for every block, patch and group of channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """One block: patches are mixed, then channels, and a head of its own tells classes.

    Args:
        features: Width I of its input.
        channels: Width C of its output.
        patches: Patches P that it mixes; 1 for none.
        groups: Groups G of channels, each normalised by itself.
        classes: Classes K.
        residual: Whether the input is added to the output.
    """

    def __init__(
        self,
        features: int,
        channels: int,
        *,
        patches: int,
        groups: int,
        classes: int,
        residual: bool,
    ) -> None:
        super().__init__()
        # A bias would be the same for all numbers of a patch, and the norm behind takes it away.
        self.token = nn.Linear(patches, patches, bias=False) if patches > 1 else None
        self.channel = nn.Linear(features, channels)
        # Zeros would give the layers below no gradient in the first step.
        self.head = nn.Parameter(torch.randn(channels, classes) / channels**0.5)
        self.patches, self.groups, self.residual = patches, groups, residual

    def forward(self, x_NPI: Tensor, noise: Sequence[Tensor] = ()) -> Tensor:
        """Returns the channels, (N, P, C); noise is added to what its layers put out."""
        return self.run(x_NPI, noise)[0]

    def run(self, x_NPI: Tensor, noise: Sequence[Tensor] = ()) -> tuple[Tensor, list[Tensor]]:
        """Returns the channels, and the input of each of its layers, as `layers` has them.

        Products are formed without a call of the layers: a session that listens at them must not
        hear of a forward that has no backward.
        """
        added, inputs, mixed = iter(noise), [], x_NPI
        if self.token is not None:
            inputs.append(mixed.mT)
            z_NIP = F.linear(mixed.mT, self.token.weight)
            mixed = F.relu(self._normalised(_plus(z_NIP, added).mT, groups=1))
        inputs.append(mixed)
        z_NPC = F.linear(mixed, self.channel.weight, self.channel.bias)
        out = self._normalised(_plus(z_NPC, added), self.groups)
        return F.relu(out + x_NPI if self.residual else out), inputs

    @property
    def layers(self) -> list[nn.Linear]:
        """Linear layers of the block, in the order in which they compute."""
        return [self.channel] if self.token is None else [self.token, self.channel]

    def logits(self, x_NPC: Tensor) -> Tensor:
        """Returns each group's part of the logits at each patch, (N, P, G, K): they add up."""
        parts = x_NPC.unflatten(-1, (self.groups, -1))
        head = self.head.unflatten(0, (self.groups, -1))
        return torch.einsum("npgc,gck->npgk", parts, head) / x_NPC.shape[1]

    @staticmethod
    def _normalised(x: Tensor, groups: int) -> Tensor:
        grouped = x.unflatten(-1, (groups, -1))
        return F.layer_norm(grouped, grouped.shape[-1:]).flatten(-2)


def _plus(z: Tensor, noise: Iterator[Tensor]) -> Tensor:
    added = next(noise, None)
    return z if added is None else z + added


class LocalMixer(nn.Module):
    """A classifier whose blocks learn by losses of their own, one for each patch and group.

    Block b > 0 mixes patches and then channels, h ← ReLU(norm(W relu(norm(T h))) + h); block 0
    embeds. Nothing is differentiated through the border of two blocks. The loss of patch p and
    group g is the cross entropy of the whole block's logits

        Σ_pg x_pg H_g / P

    of which only the part of p and g is differentiated. So all losses of a block are equal in
    value, and their gradients add up to that of the block's own loss. Smaller losses make the
    directional derivative of one depend on fewer random directions.

    Choose it for forward gradients, `forward_loss` or `SeededGradients`, whose error grows with
    the number of directions behind one loss. Trained by backward it is a worse network than one
    with a single loss.

    Source: Ren et al., Scaling Forward Gradient With Local Losses, arXiv 2210.03310, section 4.
    Left out are the linear layer per group at the end of a block, and the predictor's own norm.
    Channels are normalised by group, so that a group's losses depend on no channel of another.

    Args:
        features: Numbers I per patch.
        classes: Classes K.
        channels: Width C of every block.
        groups: Groups G; C must be a multiple of G with at least two channels per group.
        patches: Patches P per sample.
        blocks: Number of blocks B.

    Raises:
        ValueError: channels cannot be divided into groups, or a number is below 1.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        channels: int = 64,
        groups: int = 1,
        patches: int = 1,
        blocks: int = 2,
    ) -> None:
        super().__init__()
        if min(features, classes, channels, groups, patches, blocks) < 1:
            raise ValueError("LocalMixer: every number must be 1 or more")
        if channels % groups or channels < 2 * groups:
            raise ValueError(
                f"LocalMixer: channels={channels}, groups={groups}: make channels a multiple of "
                f"groups, with 2 or more in each, or a group's norm leaves nothing of it"
            )
        self.features, self.groups, self.patches = features, groups, patches
        self.blocks = nn.ModuleList(
            Block(
                features if b == 0 else channels,
                channels,
                patches=1 if b == 0 else patches,
                groups=groups,
                classes=classes,
                residual=b > 0,
            )
            for b in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the last block's logits, (N, K), of samples (N, P, I), or (N, I) if P is 1."""
        h = self.as_patches(x)
        for block in self.each_block():
            h = block(h)
        return self.each_block()[-1].logits(h).sum((1, 2))

    def local_losses(
        self, x: Tensor, labels_N: Tensor, noise: Sequence[Sequence[Tensor]] = ()
    ) -> Tensor:
        """Returns the losses of all blocks, samples, patches and groups, (B, N, P, G).

        Args:
            x: Samples, (N, P, I), or (N, I) if P is 1.
            labels_N: Their classes.
            noise: For every block a tensor per layer, added to the layer's output, by which
                activities are perturbed; empty for none.
        """
        h, found = self.as_patches(x), []
        for b, block in enumerate(self.each_block()):
            h = block(h.detach(), noise[b] if noise else ())
            found.append(own_losses(block.logits(h), labels_N))
        return torch.stack(found)

    def owners(self) -> dict[str, Tensor]:
        """Returns which losses each row of a parameter moves: 0 or 1, (B · G, rows).

        Rows are along a parameter's first dimension; losses are numbered by block and then group,
        as `local_losses(...).mean(1).sum(1).flatten()` has them. It is `SeededGradients.owners`.
        """
        found: dict[str, Tensor] = {}
        for b, block in enumerate(self.each_block()):
            of_block = torch.zeros(len(self.blocks), self.groups, 1)
            of_block[b] = 1
            per_group = torch.zeros(len(self.blocks), self.groups, self.groups)
            per_group[b] = torch.eye(self.groups)
            for name, p in block.named_parameters():
                by_group = not name.startswith("token")
                rows = len(p) // self.groups if by_group else len(p)
                owned = per_group if by_group else of_block
                found[f"blocks.{b}.{name}"] = owned.flatten(0, 1).repeat_interleave(rows, dim=1)
        return found

    def each_block(self) -> list[Block]:
        """Returns its blocks, in their order."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def as_patches(self, x: Tensor) -> Tensor:
        """Returns samples as (N, P, I).

        Raises:
            ValueError: they are of another shape.
        """
        x_NPI = x[:, None] if x.dim() == 2 else x
        if x_NPI.dim() != 3 or x_NPI.shape[1:] != (self.patches, self.features):
            raise ValueError(
                f"LocalMixer: a batch of shape {tuple(x.shape)}; give (samples, "
                f"{self.patches} patches, {self.features} features)"
            )
        return x_NPI


def own_losses(logits_NPGK: Tensor, labels_N: Tensor) -> Tensor:
    """Returns the cross entropy of the summed logits, (N, P, G), each through one part alone."""
    whole_NK = logits_NPGK.sum((1, 2))
    others = (whole_NK[:, None, None] - logits_NPGK).detach()
    log_shares = F.log_softmax(others + logits_NPGK, dim=-1)
    index = labels_N[:, None, None, None].expand(*log_shares.shape[:-1], 1)
    return -log_shares.gather(-1, index).squeeze(-1)
