"""`og.LocalSteps` where no `torch.optim` optimizer of the model steps: told, counted or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from torch.optim.sgd import sgd

import outergrad as og
from covering import covering
from ranks import run_on_lasting_groups, try_ranks
from sites_apart import FULL_RANK, batch, loss, model, plain

RATE = 0.1


class Own:
    """An optimizer that is no `torch.optim.Optimizer`."""

    def __init__(self, params):
        self.params = list(params)

    @torch.no_grad()
    def step(self):
        for p in self.params:
            p -= RATE * p.grad


class Masters:
    """float32 copies of the weights, which an optimizer of PyTorch's holds."""

    def __init__(self, params):
        self.params = list(params)
        self.read()

    def read(self):
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.optimizer = SGD(self.masters, lr=RATE)

    @torch.no_grad()
    def step(self):
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = p.grad.float()
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)


class FlatCopy(Masters):
    """As `Masters`, of one flat tensor."""

    def read(self):
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in self.params]))
        self.optimizer = SGD([self.flat], lr=RATE)

    @torch.no_grad()
    def step(self):
        self.flat.grad = torch.cat([p.grad.flatten() for p in self.params])
        self.optimizer.step()
        for p, part in zip(self.params, self.parts(), strict=True):
            p.copy_(part)

    def parts(self):
        sizes = [p.numel() for p in self.params]
        parts = self.flat.detach().split(sizes)
        return [part.view_as(p) for p, part in zip(self.params, parts, strict=True)]


class FlatViews(FlatCopy):
    """The weights are parts of the flat tensor, which their version counters do not know."""

    def read(self):
        super().read()
        for p, part in zip(self.params, self.parts(), strict=True):
            p.data = part

    @torch.no_grad()
    def step(self):
        self.flat.grad = torch.cat([p.grad.flatten() for p in self.params])
        self.optimizer.step()


class OldHand(Own):
    """Past the version counters."""

    def step(self):
        for p in self.params:
            p.data.sub_(RATE * p.grad.data)


class Functional(Own):
    """PyTorch's functional optimizers, which are no optimizers."""

    def step(self):
        grads = [p.grad for p in self.params]
        numbers = {"weight_decay": 0.0, "momentum": 0.0, "lr": RATE, "dampening": 0.0}
        switches = {"nesterov": False, "maximize": False}
        with torch.no_grad():
            sgd(self.params, grads, [None] * len(grads), **numbers, **switches)


class Partly(Masters):
    """One optimizer of PyTorch's: biases are the model's own, matrices are masters."""

    def read(self):
        self.masters = [nn.Parameter(p.detach().clone()) if p.dim() > 1 else p for p in self.params]
        self.optimizer = SGD(self.masters, lr=RATE)


UNSEEN = {
    "own class": Own,
    "through .data": OldHand,
    "functional": Functional,
    "masters": Masters,
    "copies of a flat tensor": FlatCopy,
}


def loop(net, update, rank, numbers, after=lambda: None, passes=1):
    for number in numbers:
        for p in net.parameters():
            p.grad = None
        for _ in range(passes):
            (loss(net(batch(rank, number))) / passes).backward()
        update.step()
        after()


def start(rank, group, make, method):
    net = model()
    session = og.distribute(net, method, group=group)
    return net, session, make(net.parameters())


def detached(net, session):
    session.detach()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("k", [1, 4, 12])
@pytest.mark.parametrize("name", UNSEEN)
def test_updates_that_nobody_counts_are_refused(name, k):
    def body(rank, group):
        net, session, update = start(rank, group, UNSEEN[name], og.LocalSteps(k))
        made = []
        try:
            with pytest.raises(RuntimeError) as told:
                loop(net, update, rank, range(40), lambda: made.append(0))
        finally:
            session.detach()
        return len(made), str(told.value)

    results = run_on_lasting_groups(2, body)
    for rank, (passes, told) in enumerate(results):
        assert max(k, 8) <= passes + 1 < 2 * max(k, 8)
        assert f"site {rank} has made {passes + 1} backward passes" in told
        assert "'0.weight' has changed" in told
        assert "session.stepped()" in told


@pytest.mark.parametrize("name", UNSEEN)
def test_flush_does_not_return_as_if_all_were_shared(name):
    def body(rank, group):
        net, session, update = start(rank, group, UNSEEN[name], og.LocalSteps(50))
        loop(net, update, rank, range(1))
        try:
            with pytest.raises(RuntimeError, match=r"'0\.weight' has changed.*session\.stepped"):
                session.flush()
        finally:
            session.detach()

    run_on_lasting_groups(2, body)


def test_one_optimizer_of_weights_and_of_masters_is_refused():
    """It is counted; and each copy of a master undoes an exchange."""

    def body(rank, group):
        net, session, update = start(rank, group, Partly, og.LocalSteps(2))
        try:
            with pytest.raises(RuntimeError, match=r"changed '0\.weight' behind two exchanges"):
                loop(net, update, rank, range(12))
        finally:
            session.detach()

    run_on_lasting_groups(2, body)


def trained_by(make, method, rank, group):
    """Eleven updates that are told, and the copies that are made of an exchange."""
    net, session, update = start(rank, group, make, method)

    def after():
        if session.stepped() and hasattr(update, "read"):
            update.read()

    loop(net, update, rank, range(11), after)
    session.flush()
    sent = session.stats().total_sent_bytes
    return detached(net, session), sent


@pytest.mark.parametrize(
    ("name", "method"), covering(list(UNSEEN), list(FULL_RANK), quick=4, every=2)
)
def test_what_is_told_goes_as_with_an_optimizer(name, method):
    """To the bit, where the update is the same arithmetic."""
    settings = {"method": FULL_RANK[method], "outer": plain}

    def torch_own(rank, group):
        net, session, update = start(
            rank, group, lambda p: SGD(p, lr=RATE), og.LocalSteps(3, **settings)
        )
        loop(net, update, rank, range(11))
        session.flush()
        sent = session.stats().total_sent_bytes
        return detached(net, session), sent

    expected = run_on_lasting_groups(2, torch_own)
    found = run_on_lasting_groups(
        2, lambda r, g: trained_by(UNSEEN[name], og.LocalSteps(3, **settings), r, g)
    )
    for (ours, sent), (theirs, others_sent) in zip(found, expected, strict=True):
        assert sent == others_sent > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert all(a.equal(b) for a, b in zip(found[0][0], found[1][0], strict=True))


def test_weights_loaded_after_distribute_are_where_told_steps_start():
    loaded = {name: 2 * x for name, x in model().state_dict().items()}

    def body(rank, group, make):
        net, session, update = start(rank, group, make, og.LocalSteps(2))
        net.load_state_dict(loaded)
        told = session.stepped if make is Own else (lambda: None)
        loop(net, update, rank, range(4), told)
        return detached(net, session)

    ours = run_on_lasting_groups(2, lambda r, g: body(r, g, Own))
    theirs = run_on_lasting_groups(2, lambda r, g: body(r, g, lambda p: SGD(p, lr=RATE)))
    torch.testing.assert_close(ours, theirs)


def test_a_flat_tensor_of_which_weights_are_parts_is_counted():
    """Its memory is the weights': nothing has to be told."""

    def body(rank, group, make):
        net, session, update = start(rank, group, make, og.LocalSteps(3))
        loop(net, update, rank, range(11))
        session.flush()
        return detached(net, session)

    ours = run_on_lasting_groups(2, lambda r, g: body(r, g, FlatViews))
    theirs = run_on_lasting_groups(2, lambda r, g: body(r, g, lambda p: SGD(p, lr=RATE)))
    torch.testing.assert_close(ours, theirs)
    assert all(a.equal(b) for a, b in zip(*ours, strict=True))


def sharpness(net, rank, number, optimizer):
    """Sharpness-aware minimisation, written by hand."""
    optimizer.zero_grad()
    loss(net(batch(rank, number))).backward()
    with torch.no_grad():
        moves = [0.01 * p.grad for p in net.parameters()]
        for p, move in zip(net.parameters(), moves, strict=True):
            p.add_(move)
    optimizer.zero_grad()
    loss(net(batch(rank, number))).backward()
    with torch.no_grad():
        for p, move in zip(net.parameters(), moves, strict=True):
            p.sub_(move)
    optimizer.step()


def averaged(net, rank, number, optimizer):
    """Weights are swapped for others and back between two steps."""
    loop(net, optimizer, rank, [number])
    kept = {name: x.clone() for name, x in net.state_dict().items()}
    net.load_state_dict({name: x / 2 for name, x in kept.items()})
    net.load_state_dict(kept)


def clamped(net, rank, number, optimizer):
    loop(net, optimizer, rank, [number])
    with torch.no_grad():
        for p in net.parameters():
            p.clamp_(-0.3, 0.3)


def accumulated(net, rank, number, optimizer):
    loop(net, optimizer, rank, [number], passes=33)


@pytest.mark.parametrize("one", [sharpness, averaged, clamped, accumulated])
@pytest.mark.parametrize("k", [1, 3])
def test_weights_that_change_between_counted_steps_are_the_user_s(one, k):
    def body(rank, group):
        net = model()
        session = og.distribute(net, og.LocalSteps(k), group=group)
        optimizer: Optimizer = SGD(net.parameters(), lr=RATE)
        for number in range(12):
            one(net, rank, number, optimizer)
        steps = session.stats().step
        session.detach()
        return steps

    assert run_on_lasting_groups(2, body) == [12 // k] * 2


def test_methods_that_share_gradients_have_nothing_to_be_told():
    def body(rank, group):
        session = og.distribute(model(), og.Dense(), group=group)
        assert session.stepped() is False
        session.detach()
        assert session.stepped() is False

    assert try_ranks(2, body) == [None, None]


# -- steps that one site skips -------------------------------------------------------------------


SKIPPED_AT = {"the first": [0], "the third": [2], "the last of k": [3], "the last": [8]}


def overflowing(net, rank, number, at):
    """Site 1 has an infinity in some steps."""
    scale = float("inf") if rank == 1 and number in at else 1.0
    return loss(net(batch(rank, number))) * scale


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("at", SKIPPED_AT)
def test_an_overflow_of_one_site_counts_as_a_step(at, fused):
    """As in the reference, in which the sites exchange after every fourth batch."""
    settings = {"lr": RATE, "fused": fused}

    def body(rank, group):
        net = model()
        session = og.distribute(net, og.LocalSteps(4, outer=plain), group=group)
        optimizer, scaler = SGD(net.parameters(), **settings), GradScaler("cpu", init_scale=4.0)
        for number in range(9):
            optimizer.zero_grad()
            scaler.scale(overflowing(net, rank, number, SKIPPED_AT[at])).backward()
            scaler.step(optimizer)
            scaler.update()
        session.flush()
        steps = session.stats().step
        return steps, detached(net, session)

    replicas = [model() for _ in range(2)]
    for number in range(9):
        for rank, net in enumerate(replicas):
            if rank == 1 and number in SKIPPED_AT[at]:
                continue
            optimizer = SGD(net.parameters(), lr=RATE)
            optimizer.zero_grad()
            loss(net(batch(rank, number))).backward()
            optimizer.step()
        if number in (3, 7, 8):
            means = [
                sum(x) / 2 for x in zip(*(list(r.parameters()) for r in replicas), strict=True)
            ]
            for net in replicas:
                for p, mean in zip(net.parameters(), means, strict=True):
                    p.data.copy_(mean)
    for steps, weights in run_on_lasting_groups(2, body):
        assert steps == 3
        torch.testing.assert_close(weights, [p.detach() for p in replicas[0].parameters()])


def test_a_skip_that_is_told_counts_as_a_step():
    """As by a loop that looks at its own loss."""

    def body(rank, group):
        net = model()
        session = og.distribute(net, og.LocalSteps(4), group=group)
        optimizer = SGD(net.parameters(), lr=RATE)
        for number in range(9):
            optimizer.zero_grad()
            value = overflowing(net, rank, number, [2, 5])
            if value.isfinite():
                value.backward()
                optimizer.step()
            else:
                session.stepped()
        session.flush()
        steps = session.stats().step
        return steps, detached(net, session)

    (steps, ours), (_, theirs) = run_on_lasting_groups(2, body)
    assert steps == 3
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
