"""Models of text, of transformers: all of them with two layers of width 16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from zoo_case import VOCABULARY, Batch, Case, tokens

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**size, **dropout, **SPECIAL, use_cache=False))


LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    **SPECIAL,
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def mixtral(*, balanced: bool = True) -> nn.Module:
    """With the loss that spreads the tokens over the experts, or without."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": balanced}
    return MixtralForCausalLM(MixtralConfig(**LLAMA, **experts))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    size = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**size, **layers, **dropout, pad_token_id=0))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    special = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    config = T5Config(**size, **special, vocab_size=VOCABULARY, dropout_rate=0.0, use_cache=False)
    return T5ForConditionalGeneration(config)


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    size = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 3}
    config = MambaConfig(**size, **SPECIAL, vocab_size=VOCABULARY, use_cache=False)
    return MambaForCausalLM(config)


def text(source: torch.Generator, site: int) -> Batch:
    """Of which the model is to learn the next token; longer, and more of it, on site 1."""
    ids = tokens(source, 2 + site, 6 + site)
    return {"input_ids": ids, "labels": ids}


def padded(source: torch.Generator, site: int) -> Batch:
    """Some positions count for nothing."""
    batch = text(source, site)
    used = torch.arange(6 + site).expand_as(batch["labels"]) < 4 + torch.arange(2 + site)[:, None]
    mask = used.long()
    return {
        "input_ids": batch["input_ids"] * mask,
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(~used, -100),
    }


def translated(source: torch.Generator, site: int) -> Batch:
    batch = padded(source, site)
    return {**batch, "labels": tokens(source, 2 + site, 4)}


def checkpointed(build: Callable[[], Any]) -> nn.Module:
    """Computes activations again in backward, as long trainings do."""
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


bf16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)

PLAIN = {
    "gpt2": Case(build=gpt2, batch=text, blocks=("transformer.h.*",), part="*.h.0.*", quick=True),
    "llama": Case(build=llama, batch=padded, blocks=("model.layers.*",), quick=True),
    "mixtral": Case(
        build=mixtral,
        batch=text,
        blocks=("model.layers.*.self_attn",),
        plain=lambda model: model.set_experts_implementation("eager"),
    ),
    "mixtral, unbalanced": Case(
        build=partial(mixtral, balanced=False),
        batch=text,
        blocks=("model.layers.*",),
        plain=lambda model: model.set_experts_implementation("eager"),
    ),
    "bert": Case(build=bert, batch=padded, blocks=("bert.encoder.layer.*",)),
    "t5": Case(build=t5, batch=translated, blocks=("encoder.block.*",)),
    "mamba": Case(build=mamba, batch=text, blocks=("backbone.layers.*",)),
}


def other_ways() -> dict[str, Case]:
    """Of training some of them."""
    recomputed = {
        f"{name}, checkpointed": replace(
            PLAIN[name],
            build=partial(checkpointed, PLAIN[name].build),
            plain=lambda model: model.gradient_checkpointing_disable(),
            quick=False,
        )
        for name in ("gpt2", "t5")
    }
    halved = {
        f"{name}, bf16": replace(PLAIN[name], context=bf16, quick=False) for name in ("gpt2",)
    }
    return recomputed | halved


CASES = PLAIN | other_ways()
