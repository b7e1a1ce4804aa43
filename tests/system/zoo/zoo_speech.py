"""Models of speech, of transformers."""

from __future__ import annotations

import torch
from torch import nn
from zoo_case import VOCABULARY, Batch, Case, numbers, tokens

FRAMES = 16


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    encoder = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
    size = {"d_model": 16, "num_mel_bins": 6, "max_source_positions": FRAMES // 2}
    size |= {"max_target_positions": 8, "vocab_size": VOCABULARY}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(**encoder, **decoder, **size, **special, dropout=0.0, use_cache=False)
    return WhisperForConditionalGeneration(config)


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 2, "vocab_size": VOCABULARY}
    ears = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (6, 3)}
    ears |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    off = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout")
    dropout = dict.fromkeys((*off, "final_dropout", "layerdrop"), 0.0)
    return Wav2Vec2ForCTC(
        Wav2Vec2Config(**size, **ears, **dropout, apply_spec_augment=False, pad_token_id=0)
    )


def recorded(source: torch.Generator, site: int) -> Batch:
    frames = numbers(source, 2 + site, 6, FRAMES)
    return {"input_features": frames, "labels": tokens(source, 2 + site, 4)}


def heard(source: torch.Generator, site: int) -> Batch:
    samples = numbers(source, 2 + site, 120 + 16 * site)
    return {"input_values": samples, "labels": tokens(source, 2 + site, 3)}


CASES = {
    "whisper": Case(build=whisper, batch=recorded, blocks=("model.encoder.layers.*",)),
    "wav2vec2": Case(build=wav2vec2, batch=heard, blocks=("wav2vec2.encoder.layers.*",)),
}
