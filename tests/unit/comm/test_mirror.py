"""What is planned by one process is what real sites send."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import outergrad as og
from covering import covering
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.torch import TorchComm
from outergrad.comm.trace import Awaited, Started, Tracer
from outergrad.core.sites import Site
from outergrad.core.types import Link
from outergrad.messages.header import Header, SlotUse
from outergrad.messages.wire import Preamble, State, as_from
from outergrad.session.attach import attach
from outergrad.tools.plan.measure import is_exact
from planned_cases import METHODS, MODELS, square
from ranks import run_on_lasting_groups

STEPS = 5
LINK = Link(delay_s=1e-3, bytes_per_s=1e9)
by_sites = pytest.mark.parametrize("sites", [2, 3, 4])


def trained(model, session, x):
    """What a session says of each step, and the gradients of the last."""
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        square(model, x).backward()
        stats = session.stats()
        layers = {name: (v.travels, v.sent_bytes) for name, v in stats.layers.items()}
        found.append((stats.sent_bytes, layers))
    return found, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("sites", "method", "make"), covering([2, 3, 4], METHODS, MODELS, quick=12, every=6)
)
def test_mirrors_send_what_real_sites_send(make, method, sites):
    original, x = make()

    def body(rank, group):
        model = copy.deepcopy(original)
        session = og.distribute(model, method, group=group, buffers="local")
        found = trained(model, session, x)
        session.detach()
        return found

    planned_for = copy.deepcopy(original)
    session = attach(planned_for, method, MirrorComm(sites, Tracer()), LINK)
    planned, gradients = trained(planned_for, session, x)
    real, expected = run_on_lasting_groups(sites, body)[0]
    assert planned == real
    for name in expected if is_exact(method) else ():
        assert torch.allclose(gradients[name], expected[name], rtol=1e-4, atol=1e-6), name
    session.detach()
    assert type(planned_for) is type(original)


@pytest.mark.parametrize("buffers", ["broadcast", "mean"])
def test_mirrors_send_what_real_sites_send_of_buffers(buffers):
    original, x = MODELS["convolutions"]()

    def body(rank, group):
        model = copy.deepcopy(original)
        session = og.distribute(model, og.DAD(), group=group, buffers=buffers)
        found, _ = trained(model, session, x)
        session.detach()
        return found

    planned_for = copy.deepcopy(original)
    comm = MirrorComm(3, Tracer())
    session = attach(planned_for, og.DAD(), comm, LINK, buffers=buffers)
    assert trained(planned_for, session, x)[0] == run_on_lasting_groups(3, body)[0]
    session.detach()


EXPECTING = {
    "short sums of two": (2, og.Dense(), True),
    "short sums of three": (3, og.Dense(), False),
    "gathered": (3, og.DAD(always=True), True),
    "both rounds of two ways": (3, og.RankDAD(rank=1, reduce="two_way"), True),
    "sides in turn": (2, og.RankDAD(rank=1, reduce="alternate"), True),
    "sketches": (2, og.RankDAD(rank=1, reduce="all_reduce"), False),
}


@pytest.mark.parametrize(("sites", "method", "ahead"), EXPECTING.values(), ids=EXPECTING)
def test_a_mirror_knows_what_is_received_ahead(sites, method, ahead):
    tracer, model = Tracer(), torch.nn.Linear(30, 30)
    session = attach(model, method, MirrorComm(sites, tracer), LINK)
    for _ in range(STEPS):
        tracer.begin()
        square(model, torch.ones(3, 30)).backward()
        messages = [event for event in tracer.end().messages if event.total.sent > 200]
    assert {message.is_expected for message in messages} == {ahead}
    session.detach()


@by_sites
def test_a_mirror_counts_what_torch_counts(sites):
    def exchanged(comm):
        comm.all_reduce(torch.ones(7)).wait()
        sizes = [5 + k for k in range(sites)]
        comm.all_gather(torch.ones(sizes[comm.rank]), sizes).wait()
        parts = [torch.ones(2 + k) for k in range(sites)]
        comm.all_to_all(parts, [2 + comm.rank] * sites).wait()
        return comm.sent_bytes

    def body(rank, group):
        return exchanged(TorchComm(group, torch.device("cpu")))

    tracer = Tracer()
    real = run_on_lasting_groups(sites, body)
    assert exchanged(MirrorComm(sites, tracer)) == real[0]
    messages = tracer.end().messages
    assert sum(message.total.sent for message in messages) == sum(real)
    assert [type(event) for event in tracer.end().events] == 3 * [Started, Awaited]


def test_all_sites_have_their_own_names():
    header = Header(7, 3, 0, (True, False), (SlotUse(4, True, torch.float32),))
    words = as_from(2, torch.tensor(header.words()), len(header.words()))
    assert Header.parse(words.tolist(), header, Site(2)).rank == 2
    preamble = Preamble(7, 3, 1, 0, State.GOOD, (True,), (4, 5))
    message = torch.ones(200, dtype=torch.uint8)
    preamble.write(message)
    same = as_from(2, message, 200)
    assert Preamble.read(same, preamble, 2).wanted_rows == (4, 5)
    assert same[-100:].equal(message[-100:])
    for size in (104, 408):
        other = as_from(2, message, size)
        assert len(other) == size
        assert Preamble.read(other, preamble, 2).wanted_rows == (0, 0)
        assert not other[48:].any()
    replace(preamble, bucket=-2).write(message)  # of a second round: what a site has merged itself
    assert not as_from(2, message, 200)[48:].any()
    assert message[32] == 0  # the original still has its own


@pytest.mark.parametrize("message", [torch.arange(3), torch.ones(20, dtype=torch.uint8)])
def test_what_names_no_sender_is_copied_as_it_is(message):
    assert as_from(1, message, len(message)).equal(message)
