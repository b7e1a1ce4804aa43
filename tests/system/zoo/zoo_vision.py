"""Models of images, of transformers, timm and diffusers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm_alone import timm
from torch import Tensor, nn
from zoo_case import VOCABULARY, Batch, Case, labels, numbers, tokens
from zoo_text import bf16

SIZE, CHANNELS, CLASSES = 16, 3, 5


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 2, "projection_dim": 12}
    text = {
        **size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    image = {**size, "image_size": SIZE, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=12))


def vit_mae() -> nn.Module:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    decoder = {"decoder_hidden_size": 12, "decoder_intermediate_size": 16}
    decoder |= {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    image = {"num_attention_heads": 2, "image_size": SIZE, "patch_size": 4, "mask_ratio": 0.5}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTMAEForPreTraining(ViTMAEConfig(**size, **decoder, **image, **dropout))


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )


class Denoiser(nn.Module):
    """Learns the noise that was added, as `diffusers` is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = unet()

    def forward(self, noisy: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        return F.mse_loss(self.unet(noisy, timestep).sample, noise)


class Classifier(nn.Module):
    """A network of timm and its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), classes)


def classifier(name: str, **settings: Any) -> nn.Module:
    return Classifier(timm().create_model(name, num_classes=CLASSES, **settings))


def vit() -> nn.Module:
    size = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 8, "img_size": SIZE}
    return classifier("vit_tiny_patch16_224", **size)


def swin() -> nn.Module:
    size = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8}
    return classifier(
        "swin_tiny_patch4_window7_224", **size, depths=(2, 2), num_heads=(2, 4), drop_path_rate=0.0
    )


def convnext() -> nn.Module:
    return classifier("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))


def efficientnet() -> nn.Module:
    make = timm().models.efficientnet._gen_efficientnet
    return Classifier(make("efficientnet_b0", 0.2, 0.3, num_classes=CLASSES))


def pictures(source: torch.Generator, site: int, size: int = SIZE) -> Batch:
    count = 3 + site
    images = numbers(source, count, CHANNELS, size, size)
    return {"images": images, "classes": labels(source, count, CLASSES)}


def masked_pictures(source: torch.Generator, site: int) -> Batch:
    """The noise decides which patches are left out."""
    images = numbers(source, 2 + site, CHANNELS, SIZE, SIZE)
    return {"pixel_values": images, "noise": torch.rand(2 + site, 16, generator=source)}


def captioned(source: torch.Generator, site: int) -> Batch:
    images = numbers(source, 2 + site, CHANNELS, SIZE, SIZE)
    return {"pixel_values": images, "input_ids": tokens(source, 2 + site, 5), "return_loss": True}


def noisy(source: torch.Generator, site: int) -> Batch:
    shape = (1 + site, CHANNELS, 8, 8)
    times = torch.randint(0, 1000, shape[:1], generator=source)
    return {"noisy": numbers(source, *shape), "noise": numbers(source, *shape), "timestep": times}


large = partial(pictures, size=32)
largest = partial(pictures, size=64)

CASES = {
    "clip": Case(build=clip, batch=captioned, blocks=("*.encoder.layers.*",)),
    "vit-mae": Case(build=vit_mae, batch=masked_pictures, blocks=("vit.layers.*",)),
    "unet2d": Case(build=Denoiser, batch=noisy, loss=lambda y: y, blocks=("unet.mid_block",)),
    "vit": Case(build=vit, batch=pictures, loss=lambda y: y, blocks=("net.blocks.*",), quick=True),
    "vit, bf16": Case(
        build=vit, batch=pictures, loss=lambda y: y, blocks=("net.blocks.*",), context=bf16
    ),
    "swin": Case(build=swin, batch=large, loss=lambda y: y, blocks=("net.layers.*.blocks.*",)),
    "convnext": Case(build=convnext, batch=large, loss=lambda y: y, blocks=("net.stages.*",)),
    "efficientnet": Case(build=efficientnet, batch=largest, loss=lambda y: y),
}
