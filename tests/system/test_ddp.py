"""`og.DistributedDataParallel`: a script of PyTorch's class with one changed import."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD

import outergrad as og
from cases import relative_error
from loops import OUTPUTS, batch, net
from outergrad.session.ddp import DistributedDataParallel
from ranks import run_on_lasting_groups, run_ranks
from spawned import run_two

SITES = 2
CLASSES = {"torch": TorchDDP, "outergrad": DistributedDataParallel}
METHODS = {
    "default": {},
    "dense": {"method": og.Dense()},
    "dad": {"method": og.DAD(always=True)},
    "rank-dad": {"method": og.RankDAD(rank=64)},
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def of_both(body: Any, **settings: Any) -> tuple[Any, Any]:
    """What each rank has found with PyTorch's class, and with ours."""

    def site(rank: int, group: Any) -> tuple[Any, Any]:
        about = {"find_unused_parameters": True, "process_group": group}
        torchs = body(TorchDDP(net(), **about), rank)
        ours = DistributedDataParallel(net(), **about, **settings)
        found = body(ours, rank)
        ours.session.detach()
        return torchs, found

    pairs = run_on_lasting_groups(SITES, site)
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def assert_close(found: Any, expected: Any) -> None:
    for own, theirs in zip(found, expected, strict=True):
        for mine, other in zip(own, theirs, strict=True):
            assert mine.keys() == other.keys()
            for name in other:
                assert relative_error(mine[name], other[name].double()) < 2e-4, name


def by_wrapper(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a plain model by the names that a wrapper gives them."""
    return {f"module.{name}": g for name, g in gradients(model).items()}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_gradients_are_those_of_pytorchs_class(settings):
    def body(model: Any, rank: int) -> list[dict[str, Tensor]]:
        found = []
        for step in range(3):
            model.zero_grad()
            loss(model, batch(rank, step)).backward()
            found.append(gradients(model))
        return found

    torchs, ours = of_both(body, **settings)
    assert_close(ours, torchs)
    assert all(name.startswith("module.") for name in ours[0][0])


def by_flag(model: Any, rank: int, step: int, shared: bool) -> None:
    """As nanoGPT's loop does."""
    model.require_backward_grad_sync = shared
    loss(model, batch(rank, step)).backward()


def by_context(model: Any, rank: int, step: int, shared: bool) -> None:
    """As PyTorch's documentation has it."""
    if shared:
        loss(model, batch(rank, step)).backward()
    else:
        with model.no_sync():
            loss(model, batch(rank, step)).backward()


def forward_alone(model: Any, rank: int, step: int, shared: bool) -> None:
    """The forward decides, wherever its backward is."""
    if shared:
        out = loss(model, batch(rank, step))
    else:
        with model.no_sync():
            out = loss(model, batch(rank, step))
    out.backward()


@pytest.mark.parametrize("once", [by_flag, by_context, forward_alone])
@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_what_is_not_shared_travels_with_the_next_that_is(settings, once):
    def body(model: Any, rank: int) -> list[dict[str, Tensor]]:
        found = []
        for step in range(6):
            if step % 3 == 0:
                model.zero_grad()
            once(model, rank, step, shared=step % 3 == 2)
            found.append(gradients(model))
        return found

    torchs, ours = of_both(body, **settings)
    assert_close(ours, torchs)
    assert any((ours[0][0][name] != ours[1][0][name]).any() for name in ours[0][0])


def test_a_backward_outside_of_a_context_is_shared_where_its_forward_was():
    def body(model: Any, rank: int) -> list[dict[str, Tensor]]:
        out = loss(model, batch(rank, 0))
        with model.no_sync():
            out.backward()
        return [gradients(model)]

    torchs, ours = of_both(body)
    assert_close(ours, torchs)
    assert_close([ours[0]], [ours[1]])


@pytest.mark.parametrize("divides", [True, False])
def test_join_with_fewer_batches(divides):
    """PyTorch's own join needs a default group, which ranks in threads do not have."""
    counts = [2 + 2 * rank for rank in range(SITES)]

    def site(rank: int, group: Any) -> dict[str, Tensor]:
        model = DistributedDataParallel(net(), process_group=group)
        optimizer = SGD(model.parameters(), 0.1)
        with model.join(divide_by_initial_world_size=divides):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                loss(model, batch(rank, step)).backward()
                optimizer.step()
        found = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        model.session.detach()
        return found

    expected = net().double()
    optimizer = SGD(expected.parameters(), 0.1)
    for step in range(max(counts)):
        active = [rank for rank in range(SITES) if step < counts[rank]]
        optimizer.zero_grad()
        for rank in active:
            shared = loss(expected, batch(rank, step).double())
            (shared / (SITES if divides else len(active))).backward()
        optimizer.step()
    for found in run_on_lasting_groups(SITES, site):
        for name, p in expected.named_parameters():
            assert relative_error(found[name], p.detach()) < 1e-5, name


def test_states_fit_both_ways():
    def site(rank: int, group: Any) -> None:
        theirs = TorchDDP(net(), process_group=group)
        ours = DistributedDataParallel(net(), process_group=group)
        assert theirs.state_dict().keys() == ours.state_dict().keys()
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        ours.session.detach()

    run_on_lasting_groups(SITES, site)


@pytest.mark.parametrize("share", [True, False])
def test_buffers_are_rank_0s_or_each_sites_own(share):
    def site(rank: int, group: Any) -> list[dict[str, Tensor]]:
        found = []
        for kind in CLASSES.values():
            torch.manual_seed(0)
            module = nn.Sequential(net(), nn.BatchNorm1d(OUTPUTS))
            model = kind(module, process_group=group, forward_sync_buffers=share)
            for step in range(3):
                loss(model, batch(rank, step)).backward()
            model.eval()
            loss(model, batch(rank, 3))
            found.append({n: b.double().clone() for n, b in model.named_buffers()})
        model.session.detach()
        return found

    first, second = run_on_lasting_groups(SITES, site)
    for torchs, ours in (first, second):
        assert torchs.keys() == ours.keys()
        assert all(relative_error(ours[name], t) < 1e-5 for name, t in torchs.items())
    same = all((first[1][name] == second[1][name]).all() for name in first[1])
    assert same == share


def test_what_a_module_says_is_ignored_is_each_sites_own():
    def site(rank: int, group: Any) -> list[dict[str, Tensor]]:
        found = []
        for kind in CLASSES.values():
            model = net()
            kind._set_params_and_buffers_to_ignore_for_model(model, ["first.weight"])
            wrapped = kind(model, process_group=group, find_unused_parameters=True)
            loss(wrapped, batch(rank, 0)).backward()
            found.append(gradients(wrapped))
        wrapped.session.detach()
        return found

    found = run_on_lasting_groups(SITES, site)
    assert_close([own for _, *own in found], [[torchs] for torchs, _ in found])
    assert (found[0][1]["module.first.weight"] != found[1][1]["module.first.weight"]).any()


def test_a_module_outlives_its_wrapper_and_is_plain_again():
    def site(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        model = net()
        wrapped = DistributedDataParallel(model, process_group=group)
        loss(wrapped, batch(rank, 0)).backward()
        del wrapped
        model.zero_grad()
        loss(model, batch(rank, 1)).backward()
        plain = net()
        plain.load_state_dict(model.state_dict())
        loss(plain, batch(rank, 1)).backward()
        return model.first.weight.grad, plain.first.weight.grad

    for found, alone in run_ranks(SITES, site):
        assert relative_error(found, alone.double()) < 1e-5


def test_a_module_that_is_wrapped_again_is_shared_once():
    def site(rank: int, group: Any) -> list[dict[str, Tensor]]:
        model = net()
        first = DistributedDataParallel(model, process_group=group)
        again = DistributedDataParallel(model, process_group=group, method=og.Dense())
        twice = DistributedDataParallel(again)
        assert twice.session is again.session
        assert first.session is not again.session
        loss(twice, batch(rank, 0)).backward()
        found = gradients(model)
        again.session.detach()
        return [found]

    both = run_on_lasting_groups(SITES, site)
    expected = net().double()
    for rank in range(SITES):
        (loss(expected, batch(rank, 0).double()) / SITES).backward()
    assert_close(both, [[gradients(expected)]] * SITES)


def _pickled(folder: Path) -> list[dict[str, Tensor]]:
    """The gradients of a wrapper, and of what `torch.load` makes of it, with a default group."""
    rank, found = dist.get_rank(), []
    model = DistributedDataParallel(net(), method=og.Dense())
    for step in range(2):
        model.zero_grad()
        loss(model, batch(rank, step)).backward()
        found.append(gradients(model))
        file = folder / f"model-{rank}.pt"
        torch.save(model, file)
        model = torch.load(file, weights_only=False)
    model.session.detach()
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wrapper_that_was_pickled_is_distributed_again(tmp_path):
    for found in run_two(_pickled, tmp_path):
        for step, own in enumerate(found):
            expected = net().double()
            for rank in range(SITES):
                (loss(expected, batch(rank, step).double()) / SITES).backward()
            assert_close([[own]], [[by_wrapper(expected)]])


def test_arguments_stand_in_the_order_of_pytorchs_class():
    theirs = list(signature(TorchDDP).parameters)
    assert list(signature(DistributedDataParallel).parameters)[: len(theirs)] == theirs


def test_inputs_are_moved_to_the_device():
    def site(rank: int, group: Any) -> None:
        class Nested(nn.Linear):
            def forward(self, rows: dict[str, list[Tensor]], *, more: Tensor) -> Tensor:
                moved = [*rows["x"], more]
                assert all(t.device == torch.device("meta") for t in moved)
                return super().forward(sum(moved, torch.zeros((), device="meta")))

        model = DistributedDataParallel(Nested(3, 2), process_group=group)
        model.device_ids = [torch.device("meta")]
        with torch.no_grad():
            model.session.detach()
            model.module.to("meta")
            model({"x": [torch.ones(4, 3)]}, more=torch.ones(4, 3))

    run_on_lasting_groups(1, site)


REFUSED = {
    "mixed precision": ({"mixed_precision": object()}, "torch.autocast"),
    "order": ({"delay_all_reduce_named_params": []}, "orders its messages"),
    "devices": ({"device_ids": [0, 1]}, "one process per device"),
}


@pytest.mark.parametrize(("settings", "told"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_mean_nothing_say_so(settings, told):
    with pytest.raises(ValueError, match=told):
        DistributedDataParallel(net(), **settings)


def test_a_module_without_trained_parameters_is_refused():
    with pytest.raises(RuntimeError, match="is not needed"):
        DistributedDataParallel(nn.ReLU())


def test_methods_that_mean_nothing_say_so():
    def site(rank: int, group: Any) -> None:
        model = DistributedDataParallel(net(), process_group=group)
        with pytest.raises(RuntimeError, match="method="):
            model.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(RuntimeError, match=r"session\.stats"):
            model._get_ddp_logging_data()
        with pytest.raises(ValueError, match="throw_on_early_termination"):
            model.join(throw_on_early_termination=True)
        model.session.detach()

    run_on_lasting_groups(1, site)
