"""Peers do what their formulas say, send the bytes that they count, and go on where they were."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import formulas
import pytest
import torch
from formulas import network
from peer_sites import (
    HIDDEN,
    MATRICES,
    NUMEL,
    Site,
    adamw,
    agree,
    binned_bytes,
    first_rights,
    kept,
    low_rank,
    packed,
    sgd,
    site,
    summed,
    trained,
)
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import outergrad as og
from outergrad_lab.peers.acp_sgd import ACPSGD
from outergrad_lab.peers.decoupled_momentum import DeMo
from outergrad_lab.peers.dion2 import Dion2
from outergrad_lab.peers.ef21_muon import EF21Muon
from outergrad_lab.peers.lordo import LoRDO
from outergrad_lab.peers.muloco import MuLoCo
from outergrad_lab.peers.orthonormal_updates import Dion
from outergrad_lab.peers.sparse_loco import SparseLoCo
from outergrad_lab.peers.sparta import SPARTA
from outergrad_lab.training.job import Sign
from ranks import run_on_lasting_groups


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        DeMo(beta=0.9, side=4, entries=5),
        DeMo(beta=0.9, side=4, entries=5, bucket=True),
        DeMo(beta=0.9, side=4, entries=5, bucket=True, bits=8),
    ],
    ids=["published", "bucket", "8 bits"],
)
def test_demo(settings, sites):
    found = trained(settings, partial(SGD, lr=0.01), sites, 5)
    agree(found, formulas.demo(sites, 5, beta=0.9, lr=0.01, side=4, entries=5, bits=settings.bits))


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("update", ["sign", "identity", "orth"])
def test_demo_as_revised(update, sites):
    how = {"beta": 0.9, "alpha": 0.2, "side": 4, "entries": 5, "update": update}
    found = trained(DeMo(**how, bucket=True), partial(SGD, lr=0.01), sites, 5)
    agree(found, formulas.demo(sites, 5, lr=0.01, hidden=HIDDEN, **how))


@pytest.mark.parametrize("sites", [2, 3])
def test_demo_under_another_optimizer(sites):
    """Under the sign it is DeMo; under plain SGD it is not."""
    settings = DeMo(beta=0.9, side=4, entries=5, bucket=True, bits=8, sign=False)
    expected = formulas.demo(sites, 5, beta=0.9, lr=0.01, side=4, entries=5, bits=8)
    agree(trained(settings, partial(Sign, lr=0.01), sites, 5), expected)
    for own, wanted in zip(
        trained(settings, partial(SGD, lr=0.01), sites, 5), expected, strict=True
    ):
        assert any((w - wanted[name]).abs().max() > 1e-3 for name, w in own.weights.items())


def test_demo_under_another_optimizer_that_stands_still():
    """As in the first step of a warm-up, at a learning rate of zero."""
    settings = DeMo(side=4, entries=5, bucket=True, sign=False)
    start = network().state_dict()
    for own in trained(settings, partial(SGD, lr=0.0), 2, 2):
        assert all(w.equal(start[name]) for name, w in own.weights.items())


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("bits", [2, 8, 32])
def test_sparse_loco(bits, sites):
    how = {"every": 2, "lr": 0.8, "beta": 0.9, "side": 4, "entries": 3, "bits": bits}
    agree(trained(SparseLoCo(**how), adamw, sites, 7), formulas.sparse_loco(sites, 7, **how))


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("columns", ["length", "qr"])
def test_dion(columns, sites):
    how = {"rank": 3, "mu": 0.9, "lr": 0.02, "weight_decay": 0.1, "columns": columns}
    first = first_rights(Dion(**how), MATRICES)
    found = trained(Dion(**how), adamw, sites, 5)
    agree(found, formulas.dion(sites, 5, first, adam_lr=0.05, **how))


def test_the_rate_of_dion_falls_as_that_of_the_loop():
    def halved(params):
        optimizer = AdamW(params, lr=0.1)
        LambdaLR(optimizer, lambda step: 0.5)
        return optimizer

    how = {"rank": 3, "mu": 0.9, "weight_decay": 0.1}
    first = first_rights(Dion(lr=0.02, **how), MATRICES)
    found = trained(Dion(lr=0.02, **how), halved, 2, 5)
    agree(found, formulas.dion(2, 5, first, adam_lr=0.05, lr=0.01, **how))


@pytest.mark.parametrize("sites", [2, 3])
def test_acp_sgd(sites):
    first = first_rights(ACPSGD(rank=2), [name for name in NUMEL if name.endswith("weight")])
    agree(trained(ACPSGD(rank=2), sgd, sites, 5), formulas.acp_sgd(sites, 5, first, rank=2))


@pytest.mark.parametrize("sites", [2, 3])
def test_sparta(sites):
    found = trained(SPARTA(share=0.2), adamw, sites, 5)
    drawn = found[0].peer.drawn
    agree(found, formulas.sparta(sites, 5, drawn))
    shares = [torch.cat([m.flatten() for m in drawn(step)]).double().mean() for step in (1, 2)]
    assert all(0.15 < share < 0.25 for share in shares)
    assert not drawn(1)[1].equal(drawn(2)[1])


@pytest.mark.parametrize("sites", [2, 3])
def test_local_steps_are_diloco(sites):
    def body(rank, group):
        model = network()
        session = og.distribute(model, og.LocalSteps(3, outer=og.nesterov), group=group)
        own = Site(rank, model, session, adamw(list(model.parameters()))).steps(9)
        session.detach()
        return own

    agree(run_on_lasting_groups(sites, body), formulas.diloco(sites, 9, every=3))


# -- bytes ---------------------------------------------------------------------------------------


def dion_bytes(sites: int) -> int:
    p, q, rest = low_rank(MATRICES, 3)
    return 4 * (summed(p + rest, sites) + summed(q, sites))


def muloco_bytes(sites: int) -> int:
    rounded = [name for name in NUMEL if name.endswith("weight")]
    whole = sum(count for name, count in NUMEL.items() if name not in rounded)
    return 2 * (summed(whole, sites) + sum(binned_bytes(NUMEL[n], 2, sites) for n in rounded))


def lordo_bytes(sites: int) -> int:
    shapes = [sorted(p.flatten(1).shape) for n, p in network().named_parameters() if n in HIDDEN]
    return 2 * summed(sum(NUMEL.values()) + 2 * 3 * sum(longer for _, longer in shapes), sites)


def dion2_bytes(sites: int, norms: bool = False) -> int:
    shapes = [sorted(p.flatten(1).shape) for n, p in network().named_parameters() if n in HIDDEN]
    _, _, rest = low_rank(HIDDEN, 0)
    drawn = sum(round(shorter / 4) * longer for shorter, longer in shapes)
    return 4 * (summed(drawn + rest, sites) + norms * summed(sum(row for row, _ in shapes), sites))


def ef21_bytes(sites: int) -> int:
    _, _, rest = low_rank(HIDDEN, 0)
    return 4 * (summed(rest, sites) + (sites - 1) * packed(4, 5, 8, HIDDEN))


def ef21_rank_bytes(sites: int) -> int:
    p, q, rest = low_rank(HIDDEN, 3)
    return 4 * (summed(rest, sites) + (sites - 1) * 8 * (p + q))


def acp_bytes(sites: int) -> int:
    p, q, rest = low_rank([name for name in NUMEL if name.endswith("weight")], 2)
    return 2 * (summed(p + rest, sites) + summed(q + rest, sites))


MESSAGES = {
    "demo": (
        DeMo(side=4, entries=5),
        lambda s: 4 * (s - 1) * 16 * sum(count for count, _ in kept(4, 5).values()),
    ),
    "bucket": (
        DeMo(side=4, entries=5, bucket=True),
        lambda s: 4 * (s - 1) * packed(4, 5, 32),
    ),
    "8 bits": (
        DeMo(side=4, entries=5, bucket=True, bits=8),
        lambda s: 4 * (s - 1) * packed(4, 5, 8),
    ),
    "sparseloco": (
        SparseLoCo(every=3, side=4, entries=3),
        lambda s: 2 * (s - 1) * packed(4, 3, 2),
    ),
    "muloco": (MuLoCo(every=3), muloco_bytes),
    "muloco, 32 bits": (MuLoCo(every=3, bits=32), lambda s: 2 * summed(sum(NUMEL.values()), s)),
    "lordo": (LoRDO(every=3, rank=3), lordo_bytes),
    "dion": (Dion(rank=3), dion_bytes),
    "dion2": (Dion2(), dion2_bytes),
    "dion2, norm": (Dion2(rows="norm"), partial(dion2_bytes, norms=True)),
    "ef21-muon": (EF21Muon(side=4, entries=5), ef21_bytes),
    "ef21-muon, rank": (EF21Muon(compressor="rank", rank=3), ef21_rank_bytes),
    "acp-sgd": (ACPSGD(rank=2), acp_bytes),
}


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize(("settings", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_bytes_are_those_of_the_messages(settings, expected, sites):
    assert {own.peer.sent_bytes for own in trained(settings, adamw, sites, 4)} == {expected(sites)}


@pytest.mark.parametrize("sites", [2, 3])
def test_bytes_of_sparta_are_those_of_what_is_drawn(sites):
    (own, *_) = trained(SPARTA(share=0.2), adamw, sites, 3)
    drawn = [sum(int(mask.sum()) for mask in own.peer.drawn(step)) for step in (1, 2, 3)]
    assert own.peer.sent_bytes == sum(summed(count, sites) for count in drawn)


# -- going on ------------------------------------------------------------------------------------

ALL = {
    "demo": DeMo(side=4, entries=5),
    "sparseloco": SparseLoCo(every=4, side=4, entries=3),
    "demo, orth": DeMo(side=4, entries=5, alpha=0.2, update="orth"),
    "muloco": MuLoCo(every=2),
    "lordo": LoRDO(every=2, rank=3),
    "dion": Dion(rank=3),
    "dion2": Dion2(),
    "dion2, norm": Dion2(rows="norm"),
    "ef21-muon": EF21Muon(side=4, entries=5),
    "ef21-muon, rank": EF21Muon(compressor="rank", rank=3),
    "acp-sgd": ACPSGD(rank=2),
    "sparta": SPARTA(share=0.2),
}


@pytest.mark.parametrize("settings", ALL.values(), ids=ALL)
def test_it_goes_on_to_the_bit(settings):
    def body(rank, group):
        whole = site(settings, adamw, rank, group).steps(3)
        state, weights = whole.peer.state_dict(), whole.weights
        optimizer = copy.deepcopy(whole.optimizer.state_dict())
        again = site(settings, adamw, rank, group).steps(1)
        again.model.load_state_dict(weights)
        again.optimizer.load_state_dict(optimizer)
        again.peer.load_state_dict(state)
        assert again.peer.sent_bytes == whole.peer.sent_bytes
        whole.steps(3)
        again.steps(3)
        for own in (whole, again):
            own.peer.detach()
        assert whole.peer.sent_bytes == again.peer.sent_bytes
        return all(again.weights[name].equal(w) for name, w in whole.weights.items())

    assert all(run_on_lasting_groups(2, body))


def test_what_two_sites_remember_does_not_fit_three():
    (state, _) = [own.peer.state_dict() for own in trained(ALL["demo"], sgd, 2, 1)]

    def body(rank, group):
        peer = ALL["demo"].peer(network(), group)
        peer.detach()
        with pytest.raises(ValueError, match="each of 2 sites remembers does not fit 3"):
            peer.load_state_dict(state)

    run_on_lasting_groups(3, body)


# -- the loop ------------------------------------------------------------------------------------


def test_every_site_begins_with_the_weights_of_site_0():
    def body(rank, group):
        model = network()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
        ALL["demo"].peer(model, group).detach()
        return model.state_dict()

    for own in run_on_lasting_groups(3, body):
        assert all(own[name].equal(w) for name, w in network().state_dict().items())


def test_an_optimizer_of_a_part_is_refused_and_one_of_another_model_passed_by():
    def body(rank, group):
        model = network()
        peer = ALL["sparta"].peer(model, group)
        SGD(network().parameters(), lr=1.0).step()
        assert peer.steps == 0
        with pytest.raises(RuntimeError, match=r"lacks '5\.bias': give it all"):
            SGD(list(model.parameters())[:-1], lr=1.0).step()
        peer.detach()
        SGD(list(model.parameters())[:-1], lr=1.0).step()

    run_on_lasting_groups(1, body)


def test_what_had_no_gradient_at_a_site_counts_as_zero():
    def body(rank, group):
        own = site(ACPSGD(rank=2), sgd, rank, group)
        before = own.weights
        for p in own.model.parameters():
            p.grad = None if rank else torch.ones_like(p)
        own.optimizer.step()
        own.peer.detach()
        return before["1.bias"] - own.weights["1.bias"]

    for moved in run_on_lasting_groups(2, body):
        torch.testing.assert_close(moved, torch.full_like(moved, 0.1 / 2))


REFUSED: dict[str, tuple[type, dict[str, Any], str]] = {
    "beta": (DeMo, {"beta": 1.0}, "beta=1.0; use 0 or more and below 1"),
    "no bucket": (DeMo, {"bits": 8}, "bits=8; use 32, or bucket=True"),
    "bits": (SparseLoCo, {"bits": 3}, "bits=3; use 2, 8 or 32"),
    "every": (SparseLoCo, {"every": 0}, "every=0; use 1 or more"),
    "text": (SparseLoCo, {"entries": "all"}, "entries='all'; use a whole number"),
    "rank": (Dion, {"rank": 0}, "rank=0; use 1 or more"),
    "mu": (Dion, {"mu": 1.5}, "mu=1.5; use 0 or more"),
    "columns": (Dion, {"columns": "svd"}, "columns='svd'; use length or qr"),
    "alpha": (DeMo, {"alpha": 2}, "alpha=2; use a number from 0 to 1"),
    "update": (DeMo, {"update": "adam"}, "update='adam'; use sign, identity or orth"),
    "no update": (DeMo, {"update": "orth", "sign": False}, "update='orth'; use sign, or leave out"),
    "muloco's bits": (MuLoCo, {"bits": 3}, "bits=3; use 2, 4, 8 or 32"),
    "no rows": (Dion2, {"alpha": 0.0}, "alpha=0.0; use above 0"),
    "rows": (Dion2, {"rows": "all"}, "rows='all'; use random or norm"),
    "compressor": (EF21Muon, {"compressor": "sign"}, "compressor='sign'; use top-k or rank"),
    "omega": (LoRDO, {"omega": 2.0}, "omega=2.0; use a number from 0 to 1"),
    "share": (SPARTA, {"share": 0.0}, "share=0.0; use above 0"),
    "fraction": (ACPSGD, {"rank": 2.5}, "rank=2.5; use a whole number"),
}


@pytest.mark.parametrize(("kind", "settings", "said"), REFUSED.values(), ids=REFUSED)
def test_settings_that_cannot_be(kind, settings, said):
    with pytest.raises(ValueError, match=said):
        kind(**settings)
