"""Peers around Muon do what their formulas say, and nothing that a site contributes is lost."""

from __future__ import annotations

from functools import partial

import formulas
import numpy as np
import pytest
import torch
from formulas import network, pull
from peer_sites import HIDDEN, adamw, agree, first_rights, site, trained
from torch import nn
from torch.optim import SGD

from outergrad_lab.peers.bins import binned, nbytes, read, written
from outergrad_lab.peers.decoupled_momentum import DeMo
from outergrad_lab.peers.dion2 import Dion2
from outergrad_lab.peers.ef21_muon import EF21Muon
from outergrad_lab.peers.lordo import LoRDO
from outergrad_lab.peers.muloco import MuLoCo
from outergrad_lab.peers.muon_steps import hidden_weights
from ranks import run_on_lasting_groups


def test_hidden_weights_are_no_embedding_no_head_no_first_kernel_and_no_vector():
    assert hidden_weights(network()) == HIDDEN


def test_stacks_of_matrices_are_no_hidden_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.experts = nn.Parameter(torch.ones(3, 4, 4))
    assert hidden_weights(model) == ["0.weight"]


# -- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_muloco(bits, sites):
    how = {"every": 2, "lr": 0.7, "momentum": 0.6, "beta": 0.9, "bits": bits}
    agree(trained(MuLoCo(**how), adamw, sites, 7), formulas.muloco(sites, 7, **how))


@pytest.mark.parametrize("sites", [2, 3])
def test_muloco_without_rounding_is_diloco(sites):
    found = trained(MuLoCo(every=3, bits=32, lr=0.7, momentum=0.9), adamw, sites, 9)
    agree(found, formulas.diloco(sites, 9, every=3))


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("rows", ["random", "norm"])
def test_dion2(rows, sites):
    how = {"alpha": 0.5, "mu": 0.9, "weight_decay": 0.1}
    settings, drawn = Dion2(rows=rows, **how), None
    if rows == "random":
        drawn = partial(drawn_rows, settings)
    found = trained(settings, adamw, sites, 5)
    agree(found, formulas.dion2(sites, 5, HIDDEN, drawn, **how))


def drawn_rows(settings: Dion2, step: int, name: str) -> np.ndarray:
    """S of a step, as one site draws it."""

    def body(rank, group):
        own = site(settings, adamw, rank, group).steps(step)
        own.peer.detach()
        return own.peer.chosen()[name].numpy()

    return run_on_lasting_groups(1, body)[0]


def test_rows_are_drawn_anew_in_every_step():
    drawn = [drawn_rows(Dion2(alpha=0.25), step, "1.weight").tolist() for step in range(4)]
    assert all(len(set(rows)) == 3 for rows in drawn)
    assert len({tuple(rows) for rows in drawn}) == 4


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("bits", [32, 8])
def test_ef21_muon(bits, sites):
    def compressed(step, name, matrix):
        return formulas.largest(matrix, 4, 5, formulas.CODECS[bits])

    how = {"beta": 0.3, "weight_decay": 0.1}
    found = trained(EF21Muon(side=4, entries=5, bits=bits, **how), adamw, sites, 5)
    agree(found, formulas.ef21_muon(sites, 5, HIDDEN, compressed, **how))


@pytest.mark.parametrize("sites", [2, 3])
def test_ef21_muon_of_low_rank(sites):
    """The vectors that the power iteration begins with are drawn weight by weight."""

    def compressed(step, name, matrix):
        generator = torch.Generator().manual_seed(step)
        for each in HIDDEN:
            columns = dict(network().named_parameters())[each].flatten(1).shape[1]
            right = torch.randn(columns, 3, generator=generator).double().numpy()
            if each == name:
                break
        for _ in range(2):
            left = np.linalg.qr(matrix @ right)[0]
            right = matrix.T @ left
        return left @ right.T

    how = {"beta": 0.3, "weight_decay": 0.1}
    found = trained(EF21Muon(compressor="rank", rank=3, **how), adamw, sites, 5)
    agree(found, formulas.ef21_muon(sites, 5, HIDDEN, compressed, **how))


@pytest.mark.parametrize("sites", [2, 3])
def test_lordo(sites):
    how = {"every": 2, "rank": 3, "omega": 0.8, "scale": 2.0}
    how |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3}
    first = first_rights(LoRDO(**how), HIDDEN, "basis")
    agree(trained(LoRDO(**how), adamw, sites, 7), formulas.lordo(sites, 7, first, **how))


# -- sites ---------------------------------------------------------------------------------------

EQUAL = {
    "muloco": MuLoCo(every=2),
    "lordo": LoRDO(every=2, rank=3),
    "dion2": Dion2(),
    "dion2, norm": Dion2(rows="norm"),
    "ef21-muon": EF21Muon(side=4, entries=5),
    "ef21-muon, rank": EF21Muon(compressor="rank", rank=3),
    "demo, orth": DeMo(side=4, entries=5, bucket=True, bits=8, alpha=0.2, update="orth"),
}


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("settings", EQUAL.values(), ids=EQUAL)
def test_sites_end_with_the_same_weights_to_the_bit(settings, sites):
    first, *others = [own.weights for own in trained(settings, adamw, sites, 5)]
    for own in others:
        assert all(w.equal(first[name]) for name, w in own.items())


# -- what is owed --------------------------------------------------------------------------------


def test_means_of_bins_keep_the_sum_and_codes_are_read_again():
    values = torch.randn(37, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for bits in (2, 4, 8):
        own = binned(values, bits)
        found = own.values(torch.float64)
        assert len(found.unique()) <= 2**bits
        torch.testing.assert_close(found.sum(), values.sum(), rtol=1e-6, atol=1e-6)
        content = written(own, bits)
        assert len(content) == nbytes(37, bits) == 4 * 2**bits + -(-37 * bits // 8)
        assert read(content, bits, 37).values(torch.float64).equal(found)


@pytest.mark.parametrize("values", [torch.zeros(5), torch.full((5,), 2.0), torch.empty(0)])
def test_numbers_without_deviation_stay_as_they_are(values):
    assert binned(values, 2).values(torch.float32).equal(values)


def test_numbers_that_are_none_do_not_become_some():
    assert binned(torch.tensor([1.0, float("nan"), 2.0]), 2).values(torch.float32).isnan().any()


@pytest.mark.parametrize("sites", [2, 3])
def test_muloco_applies_or_owes_the_sum_of_every_change(sites):
    """Bins are decoded as their means, so both roundings keep the sum of a tensor."""
    found = trained(MuLoCo(every=2, lr=1.0, momentum=0.0, beta=1.0), partial(SGD, lr=0.1), sites, 6)
    everything = contributed(MuLoCo(every=2, lr=1.0, momentum=0.0, beta=1.0), sites, 6)
    for name, start in network().named_parameters():
        applied = (start - found[0].weights[name]).sum()
        owed = [own.peer.memory["error"][name].sum() for own in found if start.dim() > 1]
        total = sum(one[name].sum() for one in everything) / sites
        torch.testing.assert_close(applied + sum(owed) / sites, total, rtol=1e-6, atol=1e-6)


def contributed(settings: MuLoCo, sites: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """By how much each site's own steps of SGD move its weights in all."""

    def body(rank, group):
        own = site(settings, partial(SGD, lr=0.1), rank, group)
        total = {name: torch.zeros_like(w) for name, w in own.weights.items()}
        for _ in range(steps):
            for name, w in own.weights.items():
                total[name] += 0.1 * pull(rank, name, w)
            own.steps(1)
        own.peer.detach()
        return total

    return run_on_lasting_groups(sites, body)


def test_what_sites_know_is_the_mean_of_what_each_has_told():
    found = trained(EF21Muon(side=4, entries=3), adamw, 3, 5)
    for name in HIDDEN:
        mean = sum(own.peer.memory["known"][name] for own in found) / 3
        for own in found:
            torch.testing.assert_close(own.peer.memory["mean"][name], mean, rtol=1e-12, atol=1e-12)


def test_momentum_of_dion2_that_keeps_nothing_has_the_gradients_since_a_row_was_sent():
    def body(rank, group):
        own = site(Dion2(mu=0.0), adamw, rank, group)
        owed = {name: torch.zeros_like(own.weights[name]) for name in HIDDEN}
        for _ in range(5):
            for name, rows in own.peer.chosen().items():
                owed[name] += pull(rank, name, own.weights[name])
                flat = owed[name].view(len(owed[name]), -1)
                (flat if flat.shape[0] <= flat.shape[1] else flat.T)[rows] = 0
            own.steps(1)
        own.peer.detach()
        return all(m.equal(owed[name]) for name, m in own.peer.memory["momentum"].items())

    assert all(run_on_lasting_groups(2, body))


def test_moments_of_lordo_and_what_it_owes_are_all_gradients():
    def body(rank, group):
        own = site(LoRDO(every=9, rank=3, beta1=0.0), adamw, rank, group)
        memory = own.peer.memory
        total, taken = dict.fromkeys(HIDDEN, 0), dict.fromkeys(HIDDEN, 0)
        for _ in range(5):
            before = own.weights
            own.steps(1)
            for name in HIDDEN:
                gradient = pull(rank, name, before[name]).flatten(1)
                wide = gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T
                total[name] = total[name] + wide
                taken[name] = taken[name] + memory["basis"][name] @ memory["first"][name]
        own.peer.detach()
        for name in HIDDEN:
            torch.testing.assert_close(taken[name] + memory["error"][name], total[name])

    run_on_lasting_groups(2, body)


def test_demo_that_takes_nothing_out_has_the_momentum_of_all_gradients():
    def body(rank, group):
        own = site(DeMo(beta=0.5, alpha=0.0, side=4, entries=5), partial(SGD, lr=0.1), rank, group)
        momentum = {name: torch.zeros_like(w) for name, w in own.weights.items()}
        for _ in range(3):
            for name, w in own.weights.items():
                momentum[name] = 0.5 * momentum[name] + 0.1 * pull(rank, name, w)
            own.steps(1)
        own.peer.detach()
        for name, m in own.peer.memory["momentum"].items():
            torch.testing.assert_close(m, momentum[name])

    run_on_lasting_groups(2, body)
