"""What else exchanges, takes or rewrites the gradients of a distributed model in its backward."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

import outergrad as og
from loops import METHODS, SOME, assert_close, batch, loss_of, net, pooled
from ranks import run_on_lasting_groups, try_ranks
from spawned import run_two

pytestmark = pytest.mark.usefixtures("large_matrices")

SITES = 2
Made = tuple[nn.Module, Callable[[Tensor], Tensor]]
"""The distributed model, and what the loop calls."""


@pytest.fixture(params=SOME)
def method(request):
    return METHODS[request.param]


class Larger(nn.Module):
    """A model that has the distributed one inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.model(x)


class InHiding:
    """Calls the parts of a model, one of them through a wrapper that no module knows."""

    def __init__(self, model: Any, group: Any) -> None:
        self._model, self._block = model, DistributedDataParallel(model.block, process_group=group)

    def __call__(self, x: Tensor) -> Tensor:
        h = self._model.first(x).relu()
        return self._model.last(self._model.norm(h + self._block(h)))


def behind(method: Any, group: Any) -> Made:
    model = net()
    og.distribute(model, method, group=group)
    return model, DistributedDataParallel(model, process_group=group)


def before(method: Any, group: Any) -> Made:
    model = net()
    wrapped = DistributedDataParallel(model, process_group=group)
    og.distribute(model, method, group=group)
    return model, wrapped


def around_more(method: Any, group: Any) -> Made:
    model = net()
    og.distribute(model, method, group=group)
    return model, DistributedDataParallel(Larger(model), process_group=group)


def around_a_part(method: Any, group: Any) -> Made:
    model = net()
    og.distribute(model, method, group=group)
    model.block = DistributedDataParallel(model.block, process_group=group)  # type: ignore[assignment]
    return model, model


def hidden(method: Any, group: Any) -> Made:
    model = net()
    og.distribute(model, method, group=group)
    return model, InHiding(model, group)


def mean_gradients() -> list[Tensor]:
    """Of the first batches of all sites together, in float64."""
    found = []

    def keep(model: nn.Module, optimizer: Any) -> None:
        found.extend(p.grad for p in model.parameters())

    batches = [[(1 / SITES, batch(site, 0)) for site in range(SITES)]]
    pooled(keep, batches, lambda params: torch.optim.SGD(params, lr=0.1))
    return found


@pytest.mark.parametrize("make", [behind, before, around_more, around_a_part])
def test_a_model_in_ddp_is_refused_when_it_is_called(method, make):
    def body(rank, group):
        model, call = make(method, group)
        with pytest.raises(RuntimeError, match="leave out DistributedDataParallel") as refused:
            call(batch(rank, 0))
        assert all(p.grad is None for p in model.parameters())
        return str(refused.value)

    told = run_on_lasting_groups(SITES, body)
    for rank, text in enumerate(told):
        assert f"is in a DistributedDataParallel on site {rank}" in text
        assert "docs/integrations.md" in text


def test_a_ddp_that_nobody_can_see_is_refused_in_the_first_backward(method):
    def body(rank, group):
        model, call = hidden(method, group)
        with pytest.raises(RuntimeError, match="another gradient at the end of backward") as told:
            loss_of(call, batch(rank, 0)).backward()
        assert "'block." in str(told.value)
        assert f"on site {rank}" in str(told.value)
        assert all(p.grad is None for p in model.parameters())

    run_on_lasting_groups(SITES, body)


def test_a_ddp_that_comes_later_is_refused_by_its_first_step(method):
    def body(rank, group):
        model = net()
        og.distribute(model, method, group=group)
        for k in range(5):
            model.zero_grad()
            loss_of(model, batch(rank, k)).backward()
        wrapped = DistributedDataParallel(model, process_group=group)
        with pytest.raises(RuntimeError, match="leave out DistributedDataParallel"):
            wrapped(batch(rank, 5))

    run_on_lasting_groups(SITES, body)


def test_local_steps_in_ddp_are_refused():
    def body(rank, group):
        model = net()
        og.distribute(model, og.LocalSteps(2), group=group)
        wrapped = DistributedDataParallel(model, process_group=group)
        with pytest.raises(RuntimeError, match="leave out DistributedDataParallel"):
            wrapped(batch(rank, 0))

    run_on_lasting_groups(SITES, body)


def test_where_one_site_alone_rewrites_gradients_the_others_hear_of_it():
    def body(rank, group):
        model = net()
        og.distribute(model, og.DAD(always=True), group=group)
        if rank == 0:
            rewrite_at_end(model)
        for k in range(2):
            loss_of(model, batch(rank, k)).backward()

    first, second = try_ranks(SITES, body)
    assert "another gradient at the end of backward" in str(first)
    assert isinstance(second, og.StepDiscardedError)
    assert "of the model of site 0 was changed" in str(second)


def rewrite_at_end(model: nn.Module) -> None:
    """As wrappers in Python do: what they have reduced is written when backward ends."""
    p = next(model.parameters())

    def write() -> None:
        p.grad = torch.zeros_like(p)

    def later(_: Any) -> None:
        Variable._execution_engine.queue_callback(write)  # type: ignore[attr-defined]

    p.register_hook(later)


# -- what is no second exchange -------------------------------------------------------------------


def test_a_ddp_that_shares_other_parameters_stays(method):
    """Those of a part that is each site's own, or those that it is not told to ignore."""
    if isinstance(method, og.PerLayer | og.EDAD):
        pytest.skip("a mixture or a block of its own")
    local = og.PerLayer({"block.*": og.Local(), "*": method})
    expected = mean_gradients()

    def body(rank, group):
        model = net()
        session = og.distribute(model, local, group=group)
        model.block = DistributedDataParallel(model.block, process_group=group)
        loss_of(model, batch(rank, 0)).backward()
        found = [p.grad for p in model.parameters()]
        session.detach()
        return found

    for found in run_on_lasting_groups(SITES, body):
        assert_close(found, expected, 1e-4)


def test_a_ddp_that_ignores_what_is_shared_stays(method):
    pooled_model = net().double()
    for site in range(SITES):
        (pooled_model(batch(site, 0).double()).square().mean() / SITES).backward()

    def body(rank, group):
        model = net()
        og.distribute(model, method, group=group)
        larger = Larger(model)
        shared = {name for name, _ in larger.named_parameters() if name.startswith("model.")}
        larger._ddp_params_and_buffers_to_ignore = shared
        wrapped = DistributedDataParallel(larger, process_group=group)
        wrapped(batch(rank, 0)).square().mean().backward()
        return [p.grad for p in model.parameters()]

    for found in run_on_lasting_groups(SITES, body):
        assert_close(found, [p.grad for p in pooled_model.parameters()], 1e-4)


def test_a_ddp_that_is_not_used_does_no_harm(method):
    expected = mean_gradients()

    def body(rank, group):
        model = net()
        og.distribute(model, method, group=group)
        DistributedDataParallel(model, process_group=group)
        loss_of(model, batch(rank, 0)).backward()
        return [p.grad for p in model.parameters()]

    for found in run_on_lasting_groups(SITES, body):
        assert_close(found, expected, 1e-4)


@pytest.mark.parametrize(
    ("by", "times"), [(og.Dense(), 0.5), (og.DAD(always=True), 1.0)], ids=["dense", "dad"]
)
def test_a_callback_that_the_output_queues_comes_before_the_exchange(by, times):
    """Not noticed: dense gradients are shared as it leaves them, factors as the layers had them."""

    def body(rank, group):
        model = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.eye(8))
        session = og.distribute(model, by, group=group)

        def halve() -> None:
            if model.weight.grad is not None:
                model.weight.grad.mul_(0.5)

        def queue(_: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(halve)

        y = model(torch.full((2, 8), rank + 1.0))
        y.register_hook(queue)
        y.sum().backward()
        session.detach()
        return model.weight.grad

    for found in run_on_lasting_groups(SITES, body):
        assert_close([found], [torch.full((8, 8), times * 3.0).double()], 1e-6)


# -- hooks of the nodes that accumulate gradients -------------------------------------------------


def take_to_main_grad(p: nn.Parameter) -> Callable[..., None]:
    """As Megatron's DDP does: each gradient is added to a buffer, and is gone."""
    p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]

    def hook(*_: Any) -> None:
        if p.grad is not None:
            p.main_grad.add_(p.grad)  # type: ignore[attr-defined]
            p.grad = None

    return hook


@pytest.mark.parametrize("first", [True, False], ids=["hooks first", "distributed first"])
def test_hooks_of_accumulating_nodes_see_the_mean(method, first):
    expected = mean_gradients()

    def body(rank, group):
        model, nodes = net(), []

        def hook_all() -> None:
            for p in model.parameters():
                nodes.append(p.view_as(p).grad_fn.next_functions[0][0])
                nodes[-1].register_hook(take_to_main_grad(p))

        if first:
            hook_all()
        session = og.distribute(model, method, group=group)
        if not first:
            hook_all()
        for _ in range(4):
            loss_of(model, batch(rank, 0)).backward()
            assert all(p.grad is None for p in model.parameters())
        found = [p.main_grad / 4 for p in model.parameters()]
        session.detach()
        for p in model.parameters():
            p.main_grad.zero_()
        loss_of(model, batch(rank, 0)).backward()  # of the site alone again, by autograd itself
        return found, [p.main_grad for p in model.parameters()]

    own = [[], []]
    for site in range(SITES):
        plain = net()
        loss_of(plain, batch(site, 0)).backward()
        own[site] = [p.grad for p in plain.parameters()]
    for rank, (found, alone) in enumerate(run_on_lasting_groups(SITES, body)):
        assert_close(found, expected, 1e-3)
        assert_close(alone, [g.double() for g in own[rank]], 1e-6)


def test_wrappers_in_python_reduce_the_mean(method):
    """As apex's: a hook of each node reduces what is in `param.grad`, at once."""
    expected = mean_gradients()

    def body(rank, group):
        model = net()
        og.distribute(model, method, group=group)
        nodes = []
        for p in reversed(list(model.parameters())):

            def reduce(*_: Any, p: nn.Parameter = p) -> None:
                assert p.grad is not None
                dist.all_reduce(p.grad, group=group)
                p.grad.div_(SITES)

            nodes.append(get_gradient_edge(p).node)
            nodes[-1].register_hook(reduce)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, batch(rank, 0)).backward()
        return [p.grad for p in model.parameters()]

    for found in run_on_lasting_groups(SITES, body):
        assert_close(found, expected, 1e-4)


# -- libraries that wrap models, in two processes -------------------------------------------------


def _refused_by_accelerate(folder: Path) -> str:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    og.distribute(model, og.DAD(always=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _ = accelerator.prepare(model, optimizer)
    return _refusal(prepared, accelerator.process_index)


def _refused_by_fabric(folder: Path) -> str:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = net()
    og.distribute(model, og.DAD(always=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _ = fabric.setup(model, optimizer)
    return _refusal(prepared, fabric.global_rank)


def _refused_by_fully_shard(folder: Path) -> str:
    from torch.distributed.fsdp import fully_shard

    model = net()
    og.distribute(model, og.DAD(always=True))
    fully_shard(model)
    return _refusal(model, dist.get_rank())


def _refused_by_replicate(folder: Path) -> str:
    from torch.distributed._composable.replicate import replicate

    model = net()
    og.distribute(model, og.DAD(always=True))
    replicate(model)
    return _refusal(model, dist.get_rank())


def _refusal(call: Callable[[Tensor], Tensor], rank: int) -> str:
    with pytest.raises(RuntimeError) as refused:
        loss_of(call, batch(rank, 0)).backward()
    assert f"site {rank}" in str(refused.value), refused.value
    return str(refused.value)


def _by_fabric(folder: Path) -> list[Tensor]:
    """As docs/integrations.md says: everything but the model is set up."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = net()
    session = og.distribute(model, og.DAD(always=True))
    optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.zero_grad()
    fabric.backward(loss_of(model, batch(fabric.global_rank, 0)))
    found = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    session.detach()
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("work", "word"),
    [
        (_refused_by_accelerate, "is in a DistributedDataParallel"),
        (_refused_by_fabric, "is in a DistributedDataParallel"),
        (_refused_by_fully_shard, "was replaced or converted"),
        (_refused_by_replicate, "another gradient at the end of backward|was replaced"),
    ],
)
def test_wrappers_of_libraries_are_refused(work, word, tmp_path):
    for text in run_two(work, tmp_path):
        assert re.search(word, text), text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fabric_sets_up_all_but_the_model(tmp_path):
    for found in run_two(_by_fabric, tmp_path):
        assert_close(found, mean_gradients(), 1e-5)
