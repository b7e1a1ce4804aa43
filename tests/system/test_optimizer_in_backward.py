"""Post-accumulate hooks of others, as an optimizer in backward: they see the mean, on all sites."""

from __future__ import annotations

import copy
import gc
import threading
import warnings

import pytest
import torch

import outergrad as og
from loops import METHODS, assert_close, batch, loss_of, net, pooled
from meshes import run_mesh
from ranks import run_on_lasting_groups, run_ranks

SITES, STEPS = 2, 3


def adam(params):
    return torch.optim.Adam(params, lr=1e-2, eps=1e-3)


def step_in_backward(model):
    """As PyTorch's tutorial does it; returns the handles."""
    optimizers = {p: adam([p]) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    return [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]


def applied_in_backward(model):
    """Hooks on nodes of autograd, as torchrec has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, in there
        from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 1e-2, "eps": 1e-3})


def expected(sites, steps):
    batches = [[(1 / sites, batch(s, step)) for s in range(sites)] for step in range(steps)]
    return pooled(lambda model, optimizer: optimizer.step(), batches, adam)


ORDERS = [
    (name, order)
    for name in ("dense", "dad")
    for order in ("before", "on nodes", "on nodes, behind garbage")
]


@pytest.mark.parametrize(("name", "hooked"), [*((name, "after") for name in METHODS), *ORDERS])
def test_training_is_that_of_an_optimizer_behind_backward(name, hooked):
    reference = expected(SITES, STEPS)

    def body(rank, group):
        model = net()
        if hooked == "before":
            step_in_backward(model)
        session = og.distribute(model, METHODS[name], group=group)
        if "garbage" in hooked:
            gc.collect()  # the session lets go of the nodes that it has seen, and they go
        if hooked != "before":
            (step_in_backward if hooked == "after" else applied_in_backward)(model)
        for step in range(STEPS):
            loss_of(model, batch(rank, step)).backward()
            assert all(p.grad is None for p in model.parameters())
        session.detach()
        return [p.detach() for p in model.parameters()]

    first, second = run_on_lasting_groups(SITES, body)
    assert all(map(torch.equal, first, second))
    assert_close(first, reference, 2e-2 if name == "powersgd" else 1e-4)


def test_ranks_of_a_mesh():
    reference = expected(4, STEPS)

    def body(mesh):
        model = net()
        session = og.distribute(model, og.DAD(), mesh=mesh)
        step_in_backward(model)
        for step in range(STEPS):
            loss_of(model, batch(mesh.number, step)).backward()
        session.detach()
        return [p.detach() for p in model.parameters()]

    for found in run_mesh(2, 2, body):
        assert_close(found, reference, 1e-4)


def test_parameters_that_one_site_alone_used_are_stepped_on_all():
    def body(rank, group):
        model = net()
        og.distribute(model, og.DAD(), group=group)
        step_in_backward(model)
        (loss_of(model, batch(0, 0)) if rank == 0 else model.first(batch(1, 0)).sum()).backward()
        return [p.detach() for p in model.parameters()]

    first, second = run_on_lasting_groups(SITES, body)
    assert all(map(torch.equal, first, second))
    changed = [not torch.equal(p, q) for p, q in zip(first, net().parameters(), strict=True)]
    assert all(changed)


def counted(model):
    """Counts what hooks saw, by parameter."""
    seen = {name: [] for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.clone()))
    return seen


def test_a_step_that_does_not_count_calls_none():
    def body(rank, group):
        model = net()
        og.distribute(model, og.DAD(), group=group, max_bad_steps=3)
        seen = counted(model)
        loss = loss_of(model, batch(rank, 0))
        (loss * float("nan") if rank == 0 else loss).backward()
        assert not any(seen.values())
        if rank == 0:
            x = batch(rank, 0).requires_grad_()
            x.register_hook(fail)
            with pytest.raises(ArithmeticError):
                loss_of(model, x).backward()
        else:
            with pytest.raises(og.StepDiscardedError):
                loss_of(model, batch(rank, 0)).backward()
        assert not any(seen.values())
        model.zero_grad()
        loss_of(model, batch(rank, 0)).backward()
        assert all(len(gradients) == 1 for gradients in seen.values())

    run_on_lasting_groups(SITES, body)


def fail(_):
    raise ArithmeticError


def test_with_every_k_they_are_called_when_the_parameter_is_shared():
    def body(rank, group):
        model = net()
        method = og.PerLayer({"first.*": og.DAD(every=2), "*": og.Dense()})
        og.distribute(model, method, group=group)
        seen = counted(model)
        for step in range(4):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
        assert {name: len(found) for name, found in seen.items()} == {
            name: 2 if name.startswith("first.") else 4 for name in seen
        }
        assert torch.equal(seen["first.weight"][-1], model.first.weight.grad)
        return seen["first.weight"]

    first, second = run_on_lasting_groups(SITES, body)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("method", [og.Dense(), og.DAD(always=True)], ids=["dense", "dad"])
def test_inside_no_sync_gradients_may_be_changed_and_not_be_used_up(method):
    def body(rank, group):
        model = net()
        session = og.distribute(model, method, group=group)
        weight = model.first.weight
        handle = weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
        with session.no_sync():
            loss_of(model, batch(rank, 0)).backward()
        alone = net()
        loss_of(alone, batch(rank, 0)).backward()
        torch.testing.assert_close(weight.grad, alone.first.weight.grad / 2)
        handle.remove()
        model.zero_grad()
        step_in_backward(model)
        match = r"'last.bias' or its gradient was used up.*site"
        with session.no_sync(), pytest.raises(RuntimeError, match=match):
            loss_of(model, batch(rank, 0)).backward()
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_loops_of_unequal_length():
    """A site that has no batch left steps its parameters as the others do, and only once."""
    batches = [[(1 / 2, batch(0, 0)), (1 / 2, batch(1, 0))], [(1.0, batch(0, 1))]]
    reference = pooled(lambda model, optimizer: optimizer.step(), batches, adam)

    def body(rank, group):
        model = net()
        session = og.distribute(model, og.DAD(), group=group)
        optimizers = {p: adam([p]) for p in model.parameters()}
        made = []
        for p in model.parameters():
            optimizers[p].register_step_post_hook(lambda *_: made.append(1))
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        with session.join():
            for step in range(2 - rank):
                model.zero_grad()
                loss_of(model, batch(rank, step)).backward()
        assert len(made) == 2 * len(optimizers)
        return [p.detach() for p in model.parameters()]

    for found in run_on_lasting_groups(SITES, body):
        assert_close(found, reference, 1e-4)


def test_local_steps_step_at_once():
    def body(rank, group):
        model, alone = net(), net()
        session = og.distribute(model, og.LocalSteps(4), group=group)
        for each in (model, alone):
            step_in_backward(each)
            for step in range(3):
                loss_of(each, batch(rank, step)).backward()
        assert_close(list(model.parameters()), [p.double() for p in alone.parameters()], 1e-6)
        loss_of(model, batch(rank, 3)).backward()
        session.detach()
        return [p.detach() for p in model.parameters()]

    first, second = run_on_lasting_groups(SITES, body)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("always", [False, True])
def test_a_single_site(always):
    reference = expected(1, STEPS)

    def body(rank, group):
        model = net()
        step_in_backward(model)
        og.distribute(model, og.DAD(always=always), group=group)
        for step in range(STEPS):
            loss_of(model, batch(rank, step)).backward()
        assert_close([p.detach() for p in model.parameters()], reference, 1e-4)

    run_ranks(1, body)


def test_own_parameters_are_stepped_at_once():
    def body(rank, group):
        model = net()
        method = og.PerLayer({"last.*": og.Local(), "*": og.DAD(always=True)})
        og.distribute(model, method, group=group)
        step_in_backward(model)
        alone = copy.deepcopy(model)
        step_in_backward(alone)
        for each in (model, alone):
            loss_of(each, batch(rank, 0)).backward()
        assert torch.equal(model.last.weight, alone.last.weight)

    run_on_lasting_groups(SITES, body)


def test_handles_stay_valid_and_detach_gives_the_hooks_back():
    def body(rank, group):
        model, seen = net(), []
        weight = model.first.weight
        hooks = [lambda p, k=k: seen.append(k) for k in range(3)]
        handles = [weight.register_post_accumulate_grad_hook(hook) for hook in hooks[:2]]
        session = og.distribute(model, og.DAD(always=True), group=group)
        handles.append(weight.register_post_accumulate_grad_hook(hooks[2]))
        loss_of(model, batch(rank, 0)).backward()
        assert seen == [0, 1, 2]
        handles[1].remove()
        loss_of(model, batch(rank, 0)).backward()
        assert seen == [0, 1, 2, 0, 2]
        session.detach()
        assert list(weight._post_accumulate_grad_hooks.values()) == [hooks[0], hooks[2]]
        loss_of(model, batch(rank, 0)).backward()
        assert seen == [0, 1, 2, 0, 2, 0, 2]

    run_on_lasting_groups(SITES, body)


def test_hooks_run_without_gradients_being_recorded_in_the_thread_of_the_loop():
    def body(rank, group):
        model, seen = net(), []
        og.distribute(model, og.Dense(), group=group)
        model.last.bias.register_post_accumulate_grad_hook(
            lambda p: seen.append((torch.is_grad_enabled(), threading.get_ident()))
        )
        loss_of(model, batch(rank, 0)).backward()
        assert seen == [(False, threading.get_ident())]

    run_on_lasting_groups(SITES, body)
