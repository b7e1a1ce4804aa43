"""Images of a batch of one, from the gradient of the convolution that they enter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.tools.audit.attacks.span import Span

_AGREEING = 1e-3
"""Relative error of a gradient, formed again from what was found, up to which that is right."""
_ALONE = 1e-2
"""Share of the second least singular value that the least must be below, for one image to fit."""
_MOST_PIXELS = 1024
"""Numbers of an image up to which it is looked for in a span: the work grows with their cube."""


@dataclass(frozen=True)
class Cut:
    """The geometry of a convolution's patches.

    Attributes:
        kernel: Height and width of a patch.
        stride: Pixels from one patch to the next.
        padding: Zeros around the image.
        shape: Of an image, (channels, height, width).
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, layer: nn.Conv2d, shape: Sequence[int]) -> Cut | None:
        """Returns that of a layer; None where patches have holes, or channels are apart."""
        whole = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        if not whole or isinstance(layer.padding, str):
            return None
        kernel, stride, padding = (
            (int(pair[0]), int(pair[1]))
            for pair in (layer.kernel_size, layer.stride, layer.padding)
        )
        return cls(kernel, stride, padding, tuple(shape))

    def patches(self, images: Tensor) -> Tensor:
        """Returns the patches of images in float64, (images, patches, numbers of a kernel)."""
        cut = F.unfold(images.double(), self.kernel, padding=self.padding, stride=self.stride)
        return cut.transpose(1, 2)

    def image(self, patches_PK: Tensor) -> Tensor:
        """Returns the image of patches, the mean where they overlap."""

        def folded(t_PK: Tensor) -> Tensor:
            sides = self.shape[-2:]
            told = {"padding": self.padding, "stride": self.stride}
            return F.fold(t_PK.T[None], sides, self.kernel, **told)[0]

        return folded(patches_PK) / folded(torch.ones_like(patches_PK)).clamp(min=1.0)


def patches_by_positions(gradient_OK: Tensor, positions_PO: Tensor) -> Tensor:
    """Returns the patches of the image of a batch of one, of a transformer with learnt positions.

    A parameter that is added to the outputs of the patches has their deltas as its gradient, one
    row per patch and summed over the images. Of one image these are the Δ of `dW = Δᵀ A`, which is
    solved for the patches A. With more images the sum of the deltas does not give dW, and nothing
    is returned.

    Choose it for vision transformers, whose patches outnumber a kernel's numbers. Source: Lu et
    al., arXiv 2112.14087 (APRIL).

    Args:
        gradient_OK: Gradient of the convolution, (channels out, numbers of a kernel).
        positions_PO: Gradient of the parameter, (patches, channels out).

    Returns:
        Patches in float64, (patches, numbers of a kernel), or none, (0, numbers of a kernel).
    """
    gradient_OK, deltas_OP = gradient_OK.double(), positions_PO.double().T
    if deltas_OP.shape[1] > len(deltas_OP) or not bool(deltas_OP.any()):
        return gradient_OK[:0]
    found_PK = torch.linalg.lstsq(deltas_OP, gradient_OK, driver="gelsd").solution
    error = (deltas_OP @ found_PK - gradient_OK).norm()
    return found_PK if float(error) <= _AGREEING * float(gradient_OK.norm()) else found_PK[:0]


def image_in_span(
    span: Span, cut: Cut, gradient_OK: Tensor, bias_gradient_O: Tensor | None
) -> Tensor:
    """Returns the image all of whose patches are in the span of a convolution's gradient.

    The patches of one image fill a space of as many directions as there are patches. That all
    patches are in it is linear in the image: where patches overlap, it has few solutions. If it
    has one only, up to its size, this is the image. The bias gradient `Σ δ` gives the size, and
    whether it is right.

    Choose it for a first convolution with fewer outputs than its kernel has numbers. Of others the
    span is everything, and nothing is returned. Our own, after Petrov et al., arXiv 2405.15586.

    Args:
        span: Of the convolution's gradient.
        cut: How it cuts images.
        gradient_OK: The gradient, (channels out, numbers of a kernel).
        bias_gradient_O: That of its bias; None without one: then nothing tells the size.

    Returns:
        The image in float64, (1, channels, height, width), or none, (0, ...).
    """
    pixels = int(torch.Size(cut.shape).numel())
    none = torch.zeros(0, *cut.shape, dtype=torch.float64)
    if not span.is_telling or bias_gradient_O is None or pixels > _MOST_PIXELS:
        return none
    units_NCHW = torch.eye(pixels, dtype=torch.float64).view(pixels, *cut.shape)
    patches_NPK = cut.patches(units_NCHW)
    outside_NPK = patches_NPK - patches_NPK @ span.basis_RI.T @ span.basis_RI
    away_NN = outside_NPK.flatten(1) @ outside_NPK.flatten(1).T
    values_N, images_NN = torch.linalg.eigh(away_NN)
    least, next_ = values_N[:2].clamp(min=0.0).sqrt().tolist()
    if not least < _ALONE * next_:
        return none
    image_CHW = images_NN[:, 0].view(cut.shape)
    patches_PK = cut.patches(image_CHW[None])[0]
    deltas_PO = torch.linalg.lstsq(patches_PK.T, gradient_OK.double().T, driver="gelsd").solution
    sums_O, bias_O = deltas_PO.sum(dim=0), bias_gradient_O.double()
    size = (sums_O @ sums_O) / (sums_O @ bias_O)
    error = (patches_PK.T @ deltas_PO - gradient_OK.double().T).norm() / gradient_OK.norm()
    away = (sums_O / size - bias_O).norm() / bias_O.norm()
    return size * image_CHW[None] if max(float(error), float(away)) <= _AGREEING else none
