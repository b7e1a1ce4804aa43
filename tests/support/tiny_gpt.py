"""A GPT-2 of transformers that is as small as it can be, and what it learns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH = 50, 8


def gpt(seed: int = 0) -> Any:
    """With dropout, tied embeddings and random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def texts(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random tokens; how many of a text count for the loss differs, so that averages do, too."""
    source = torch.Generator().manual_seed(seed)
    rows = []
    for k in range(count):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=source)
        rows.append(
            {"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) < k % 6, -100)}
        )
    return rows
