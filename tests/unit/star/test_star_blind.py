"""blind=True: the hub relays and adds up what it cannot read."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_own_transport import METHODS, build, train
from torch import nn

import outergrad as og
from cases import relative_error
from masked import assert_never_twice, masks_used
from outergrad.core.errors import ExchangeError
from outergrad.star.authority import new_authority, new_site, read_kit
from outergrad.star.frames import Kind, Place, Stream, Welcome, unpacked
from outergrad.star.line import Line
from outergrad.star.masked_sums import FIRST, MaskedSums
from outergrad.star.masks import NONCE_BYTES
from outergrad.star.run import Run
from outergrad.star.sealing import Seal
from seeding import seed
from stars import NAMES, folder, kit_of, on_star

BLIND = {"blind": True}
SUMMED = {"dense", "rank-dad sums"}
"""What the hub adds up: rounded to 56 binary digits and more below the largest number."""


@pytest.mark.parametrize("name", ["dense", "dad forced", "rank-dad two ways", "rank-dad sums"])
def test_gradients_are_those_of_a_hub_that_reads(name):
    def body(rank, one):
        model = build()
        session = og.distribute(model, METHODS[name], transport=one)
        found = list(train(model, rank))
        session.detach()
        return found

    around = on_star(3, body, BLIND)
    for mine, theirs in zip(around, on_star(3, body), strict=True):
        for step, gradients in enumerate(mine):
            assert all(map(torch.equal, gradients, around[0][step]))
            for pair in zip(gradients, theirs[step], strict=True):
                assert torch.equal(*pair) or (name in SUMMED and relative_error(*pair) < 1e-12)


def seen_by_the_hub(monkeypatch, settings):
    """All bytes of a gather, a sum, an exchange and a broadcast that pass through it."""
    seen = []
    take = Run.take
    monkeypatch.setattr(
        Run, "take", lambda run, member, f: seen.append(bytes(f.payload)) or take(run, member, f)
    )

    def body(rank, one):
        comm = one.open(torch.device("cpu"))
        own = torch.frombuffer(bytearray(b"a secret"), dtype=torch.uint8)
        parts = comm.all_gather(own, [8, 8]).wait() + comm.all_to_all([own, own], [8, 8]).wait()
        assert all(torch.equal(part, own) for part in parts)
        total = own.to(torch.int64)
        assert torch.equal(comm.all_reduce(total).wait(), 2 * own.to(torch.int64))
        comm.broadcast(own)
        assert bytes(own.numpy()) == b"a secret"

    on_star(2, body, settings)
    assert len(seen) > 8
    numbers = torch.frombuffer(bytearray(b"a secret"), dtype=torch.uint8).to(torch.int64)
    return any(b"secret" in one or numbers.numpy().tobytes() in one for one in seen)


def test_the_hub_reads_nothing(monkeypatch):
    assert not seen_by_the_hub(monkeypatch, BLIND)


def test_otherwise_it_could(monkeypatch):
    assert seen_by_the_hub(monkeypatch, {})


def test_sites_that_differ_in_it_all_say_so():
    def body(rank, one):
        one.blind = rank == 1
        with pytest.raises(ValueError, match="blind=True on site-b alone") as caught:
            one.open(torch.device("cpu"))
        return str(caught.value)

    first, second = on_star(2, body)
    assert first == second


def seals(run=1, names=NAMES[:2]):
    return [Seal(read_kit(kit_of(name, folder())), names, k, run) for k, name in enumerate(names)]


def met(one, other):
    told = [one.announcement(), other.announcement()]
    keys = one.meet({1: told[1]}), other.meet({0: told[0]})
    one.learn({1: keys[1]})
    other.learn({0: keys[0]})
    return one, other


PLACE = Place(Kind.GATHER, 0, 5)


def test_a_message_of_another_place_or_changed_is_refused_by_name():
    one, other = met(*seals())
    sealed = one.sealed(PLACE, b"rows")
    assert other.opened(PLACE, 0, memoryview(sealed), of_all=True) == b"rows"
    changed = memoryview(bytes([sealed[0] ^ 1]) + sealed[1:])
    for place, payload in ((replace(PLACE, number=6), memoryview(sealed)), (PLACE, changed)):
        with pytest.raises(ExchangeError, match="not encrypted by it") as caught:
            other.opened(place, 0, payload, of_all=True)
        assert caught.value.sites == (0,)


def test_a_key_of_another_run_site_or_authority_is_refused():
    one, other = seals()
    with pytest.raises(ValueError, match="the key of 'site-b' is not its own"):
        one.meet({1: seals(run=2)[1].announcement()})
    with pytest.raises(ValueError, match="the key of 'site-b' is not its own"):
        one.meet({1: one.announcement()})
    foreign = new_site(new_authority(), NAMES[1])
    forged = replace(read_kit(kit_of(NAMES[1])), key=foreign.key, certificate=foreign.certificate)
    with pytest.raises(ValueError, match="the key of 'site-b' is not its own"):
        one.meet({1: Seal(forged, NAMES[:2], 1, 1).announcement()})
    one.meet({1: other.announcement()})


def test_sums_are_hidden_by_keys_of_all_sites_or_not_at_all():
    one, other = met(*seals())
    numbers = [np.arange(1000, dtype=np.int32) for _ in range(2)]
    for seal, own in zip((one, other), numbers, strict=True):
        seal.masks().hide(own, bytes(NONCE_BYTES))
    for seal in (one, other):
        total = seal.masks().shown(sum(numbers), bytes(NONCE_BYTES))
        assert np.array_equal(total, 2 * np.arange(1000))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_site_that_met_nobody_hides_what_it_sends_all_the_same(rank):
    own = np.zeros(1000, np.int32)
    seals()[rank].masks().hide(own, bytes(NONCE_BYTES))
    assert np.count_nonzero(own) > 990


class Branches(nn.Module):
    """One that can leave out a layer, whose gradient is then undefined or zero."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, scale, way):
        first = self.first(x).square().mean() * scale
        return first if way == "first" else first + self.second(x).square().mean() * scale


seed(0)
BRANCHES = Branches()
SCALES = (1.0, 65536.0, 1e-6, math.inf, 1.0, 1e9)


def steps_of_all_kinds(rank, one):
    """Gradients of scaled losses; one site leaves out a layer, in every other step."""
    model = copy.deepcopy(BRANCHES)
    session = og.distribute(model, og.Dense(), transport=one)
    x, found = torch.arange(12.0).view(2, 6) / 12 + rank, []
    for step, scale in enumerate(SCALES):
        model.zero_grad()
        model(x, scale, "first" if rank == 1 and step % 2 else "both").backward()
        found.append([p.grad.clone() for p in model.parameters()])
    session.detach()
    return found


def test_steps_of_all_kinds_go_as_around_a_hub_that_reads():
    around = on_star(3, steps_of_all_kinds, BLIND)
    for mine, theirs in zip(around, on_star(3, steps_of_all_kinds), strict=True):
        for scale, gradients, others in zip(SCALES, mine, theirs, strict=True):
            for one, other in zip(gradients, others, strict=True):
                assert torch.equal(one.isfinite(), other.isfinite())
                if math.isfinite(scale):
                    assert relative_error(one, other) < 1e-6
    assert all(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        for site in around[1:]
        for step, same in zip(site, around[0], strict=True)
        for one, other in zip(step, same, strict=True)
    )


def test_no_mask_is_used_twice(monkeypatch):
    """Also where steps start again, and sums are made again in another unit."""
    used = masks_used(monkeypatch)
    on_star(3, steps_of_all_kinds, BLIND)
    assert len(used) == 3
    assert_never_twice(used, 2 * len(SCALES))


def test_a_message_that_is_sent_again_has_the_same_bytes():
    """After a stream has ended before the hub had the message."""
    line = Line()

    def sums_on_a_new_stream():
        stream = Stream()
        line.take(stream, Welcome(1, 0, NAMES[:2], heard=0, grace_s=1.0).frame().packed())
        messages = line.messages(stream)
        next(messages)  # its greeting
        return (f for message in messages for f in unpacked(message) if f.kind == Kind.SUM)

    before = sums_on_a_new_stream()
    sums = MaskedSums(line, met(*seals())[0].masks(), 1.0, book=lambda _: None)
    sums.start(FIRST, sums.number(), np.zeros(1000, np.int32))
    assert next(before) == next(sums_on_a_new_stream())
