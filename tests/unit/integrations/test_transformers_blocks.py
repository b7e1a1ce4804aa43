"""Layers of models of transformers as blocks: exact, or refused with a remedy."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import outergrad as og
from ranks import run_on_lasting_groups
from replaying import EPS, whole_error

transformers = pytest.importorskip("transformers")

IDS, SITES = 40, 2
SMALL = {"vocab_size": IDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2}
DECODER = {**SMALL, "num_key_value_heads": 1}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=IDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, **_dropout("pdrop", "resid")
    )
    return transformers.GPT2LMHeadModel(config), ["transformer.h.*"]


def llama():
    config = transformers.LlamaConfig(**DECODER)
    return transformers.LlamaForCausalLM(config), ["model.layers.*"]


def mixtral(**more):
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4, **more)
    return transformers.MixtralForCausalLM(config), ["model.layers.*"]


def bert():
    return _bert(), ["bert.encoder.layer.*"]


def encoder():
    """One block that returns an object of a class of the library."""
    return _bert(), ["bert.encoder"]


def _bert():
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **none))


def t5():
    config = transformers.T5Config(
        vocab_size=IDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config), ["encoder.block.*", "decoder.block.*"]


def whisper():
    sizes = {f"{part}_layers": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    config = transformers.WhisperConfig(
        vocab_size=IDS,
        d_model=16,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=12,
        dropout=0.0,
        decoder_start_token_id=1,
        **{f"{kind}_token_id": 2 for kind in ("pad", "bos", "eos")},
        **{f"{kind}suppress_tokens": None for kind in ("", "begin_")},
        **sizes,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, ["model.encoder.layers.*", "model.decoder.layers.*"]


def _dropout(kind, *places):
    return {f"{place}_{kind}": 0.0 for place in (*places, "attn", "embd")}


MODELS = {m.__name__: m for m in (gpt2, llama, mixtral, bert, encoder, t5, whisper)}


def batch(name, rank):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, IDS, (2 + rank, 6 + rank), generator=generator)
    found = {"labels": ids}
    if name == "whisper":
        found["input_features"] = torch.randn(2 + rank, 8, 20, generator=generator)
    else:
        found["input_ids"], found["attention_mask"] = ids, torch.ones_like(ids)
        found["attention_mask"][0, -2:] = 0
    if name not in ("bert", "encoder"):
        found["use_cache"] = False
    return found


def gradients(model, batches, dtype):
    """Of the mean loss over the sites."""
    whole = copy.deepcopy(model).to(dtype)
    for one in batches:
        floating = {k: v.to(dtype) for k, v in one.items() if k == "input_features"}
        (whole(**{**one, **floating}).loss / len(batches)).backward()
    return {name: p.grad for name, p in whole.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_layers_as_blocks_are_exact(name):
    """Three steps, in which it is learnt which layer reads which: in all the gradient is right."""
    torch.manual_seed(1)
    model, blocks = MODELS[name]()
    model.train()
    batches = [batch(name, rank) for rank in range(SITES)]

    def body(rank, group):
        replica = copy.deepcopy(model)
        method = og.EDAD(blocks=blocks, always=True)
        session = og.distribute(replica, method, group=group)
        for _ in range(3):
            replica.zero_grad()
            replica(**batches[rank]).loss.backward()
        travels = {line.travels for line in session.coverage()}
        session.detach()
        return {n: p.grad for n, p in replica.named_parameters()}, travels

    dtype = torch.float32 if name == "mixtral" else torch.float64  # its experts know no other
    expected = gradients(model, batches, dtype)
    peer = whole_error(gradients(model, batches, torch.float32), expected)
    results = run_on_lasting_groups(SITES, body)
    for found, travels in results:
        assert "replayed" in travels
        assert whole_error(found, expected) <= max(2 * peer, 2 * EPS)
        for n, gradient in found.items():
            assert gradient is None or gradient.equal(results[0][0][n]), n


def refused(name, more, model, blocks):
    def body(rank, group):
        replica = copy.deepcopy(model)
        og.distribute(replica, og.EDAD(blocks=blocks, always=True), group=group)
        with pytest.raises((TypeError, RuntimeError)) as caught:
            replica(**{**batch(name, rank), **more}).loss.backward()
        return str(caught.value)

    return run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_cache_is_refused_with_what_leaves_it_out(name):
    """Which models make in training, too, unless they are told not to."""
    model, blocks = MODELS[name]()
    for said in refused(name, {"use_cache": None}, model, blocks):
        assert re.search("its argument '(past_key_values|cache)' holds an object of type", said)
        assert "call the model with use_cache=False" in said


def test_a_loss_on_router_logits_is_refused():
    """They leave the layers through hooks: without them the router's gradient would be wrong."""
    model, blocks = mixtral(output_router_logits=True, router_aux_loss_coef=1.0)
    for said in refused("mixtral", {}, model, blocks):
        assert "a hook on 'mlp.gate'" in said
        assert "leave the block out of blocks=" in said
