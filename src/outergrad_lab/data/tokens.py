"""Conversion of texts to tokens: byte pairs, learnt from the texts themselves."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from outergrad.launch.errors import RecipeError

VOCABULARY = 8000
PADDING = 0
"""Id that fills a row behind its text."""

try:
    import tokenizers
except ImportError:
    tokenizers = None


def tokenizers_version(data: str) -> str:
    """Returns the version of the tokenizers library, on which the tokens depend.

    Raises:
        RecipeError: It is not installed.
    """
    if tokenizers is None:
        raise RecipeError(f"--data {data} needs tokenizers: pip install 'outergrad[text]'")
    return tokenizers.__version__


def learn_tokens(texts: Sequence[str]) -> Any:
    """Learns a tokenizer of at most `VOCABULARY` tokens, lower case, the padding included.

    It starts from bytes, so that it can encode every text; decoding gives lower case.
    Source: Sennrich, Haddow and Birch, 2016; over bytes as in GPT-2.
    """
    assert tokenizers is not None
    learnt = tokenizers.Tokenizer(tokenizers.models.BPE())
    learnt.normalizer = tokenizers.normalizers.Lowercase()
    learnt.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["[PAD]"],  # the first gets id 0
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learnt.train_from_iterator(texts, trainer)
    return learnt


def as_tokens(tokenizer: Any, texts: Sequence[str], length: int) -> np.ndarray:
    """Returns ids of the first tokens of each text, padded behind, uint16, (texts, length)."""
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PADDING, pad_token="[PAD]")
    return np.array([row.ids for row in tokenizer.encode_batch(texts)], np.uint16)
