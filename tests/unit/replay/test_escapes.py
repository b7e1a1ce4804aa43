"""Tensors that leave a block by another way than what it returns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from ranks import run_on_lasting_groups
from replaying import check, loss, rows


class Leaky(nn.Module):
    """A block that leaves something besides its output where the model may find it."""

    def __init__(self, leave):
        super().__init__()
        self.inner, self.leave = nn.Linear(8, 8), leave
        self.aside, self.parts, self.named = None, [], {}

    def forward(self, x):
        y = self.inner(x)
        self.leave(self, y.square().mean())
        return torch.tanh(y)


class Model(nn.Module):
    """Adds what the block has left to its output, or not."""

    def __init__(self, leave, find):
        super().__init__()
        self.stem, self.block, self.find = nn.Linear(6, 8), Leaky(leave), find

    def forward(self, x):
        y = self.block(self.stem(x))
        return y + self.find(self.block)


WAYS = {
    "attribute": (lambda b, t: setattr(b, "aside", t), lambda b: b.aside),
    "list": (lambda b, t: b.parts.append(t), lambda b: b.parts[-1]),
    "dict": (lambda b, t: b.named.update(aux=t), lambda b: b.named["aux"]),
}
METHOD = og.EDAD(blocks=["block"], always=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_it_is_refused_by_name(way):
    model, x = Model(*WAYS[way]), torch.randn(4, 6)

    def run(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, METHOD, group=group)
        with pytest.raises(RuntimeError, match=r"block 'block': a tensor that left .* attribute"):
            loss(replica(x)).backward()
        session.detach()

    run_on_lasting_groups(2, run)


@pytest.mark.parametrize("way", WAYS)
def test_looking_at_it_is_not(way):
    torch.manual_seed(1)
    leave, find = WAYS[way]
    check(Model(leave, lambda b: 0 * find(b).detach()), METHOD, rows(2, 6), ["block.inner.weight"])


class Hooked(nn.Module):
    """A hook within the block, which may keep what it sees."""

    def __init__(self, hook, find):
        super().__init__()
        self.stem, self.block = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.seen, self.find = [], find
        self.block[0].register_forward_hook(lambda module, args, y: hook(self.seen, y))

    def forward(self, x):
        y = self.block(self.stem(x))
        return y + self.find(self.seen)


def look(seen, y):
    seen.append(y)


def double(seen, y):
    return 2 * y


def hooked(hook, find):
    """Gradients of each site, or the error; and of both batches on one."""
    plain, batches = Hooked(hook, find), rows(2, 6)
    for (x,) in batches:
        (loss(plain(x)) / 2).backward()

    def body(rank, group):
        model = Hooked(hook, find)
        model.load_state_dict(plain.state_dict())
        session = og.distribute(model, METHOD, group=group)
        try:
            loss(model(*batches[rank])).backward()
        except RuntimeError as error:
            return str(error)
        finally:
            session.detach()
        return {name: p.grad for name, p in model.named_parameters()}

    return run_on_lasting_groups(2, body), {n: p.grad for n, p in plain.named_parameters()}


def test_what_a_hook_has_seen_is_refused_if_it_has_a_gradient():
    found, _ = hooked(look, lambda seen: seen[-1].mean())
    for error in found:
        assert "block 'block': a tensor that left its forward through a hook on '0'" in error


@pytest.mark.parametrize("hook", [look, double])
def test_a_hook_may_look_or_put_something_in_its_place(hook):
    found, expected = hooked(hook, lambda seen: 0.0)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[0][name], gradient)
        assert found[0][name].equal(found[1][name])
