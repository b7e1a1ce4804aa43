"""Four processes, two sites of two, for what needs a default process group."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import outergrad as og
from cases import Boom, Events, mlp, relative_error
from meshes import of_local_steps
from outergrad.launch.traffic import stay_on_loopback

BATCHES = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(1))
METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "rank-dad": og.RankDAD(rank=1000),
    "rank-dad two_way": og.RankDAD(rank=1000, reduce="two_way"),
    "powersgd": og.PowerSGD(rank=1000),
    "sparse": og.Sparse(density=1.0, always=True),
    "sparse random": og.Sparse(density=1.0, select="random", always=True),
    "per layer": og.PerLayer({"body.0.*": og.RankDAD(rank=1000), "*": og.Dense()}),
}


class Net(nn.Module):
    """Widths that two ranks cannot halve, down to one row, of which one rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(12, 9, 7)
        self.last = nn.Linear(7, 1)
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor, armed: bool = False, reentrant: bool | None = None) -> Tensor:
        known = reentrant is not None
        y = checkpoint(self.body, x, use_reentrant=reentrant) if known else self.body(x)
        return self.last(Boom.apply(y, armed))


def loss_of(model: nn.Module, x: Tensor, armed: bool = False) -> Tensor:
    return (model(x, armed) ** 2).mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def pooled(scales: tuple[int, ...] = (1,)) -> dict[str, Tensor | None]:
    """The mean over all ranks, in float64."""
    model = net().double()
    for x in BATCHES.double():
        for k in scales:
            (loss_of(model, k * x) / 4).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def sharded(mesh: DeviceMesh, *, parts: bool) -> nn.Module:
    """By the layer, or as a whole: then FSDP2 reduces at the very end of backward."""
    model = net()
    for part in (model.body, model.last, model.unused) if parts else ():
        fully_shard(part, mesh=mesh["local"])
    fully_shard(model, mesh=mesh["local"])
    return model


def assert_equal(model: nn.Module, expected: dict[str, Tensor | None], limit: float = 5e-6) -> None:
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        assert relative_error(grad, expected[name]) < limit, name


def assert_same_on(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Gradients, to the bit."""
    for name, p in model.named_parameters():
        if p.grad is not None:
            own = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            first = own.clone()
            dist.broadcast(first, group=group, group_src=0)
            assert torch.equal(own, first), name


@contextmanager
def raises(kind: type[Exception], words: str) -> Iterator[None]:
    with pytest.raises(kind) as raised:
        yield
    assert words in str(raised.value), raised.value


# -- whole models -------------------------------------------------------------------------------


def mesh_in_either_order(mesh: DeviceMesh) -> None:
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("local", "site"))
    for one in (mesh, turned):
        model = net()
        session = og.distribute(model, og.DAD(always=True), mesh=one)
        for _ in range(3):
            model.zero_grad()
            loss_of(model, BATCHES[dist.get_rank()]).backward()
        assert_equal(model, pooled())
        assert_same_on(model, dist.group.WORLD)
        session.detach()


def as_ddp_leaves_it(mesh: DeviceMesh) -> None:
    wrapped = nn.parallel.DistributedDataParallel(net(), find_unused_parameters=True)
    model = net()
    session = og.distribute(model, og.Dense(), mesh=mesh)
    for one in (wrapped, model):
        loss_of(one, BATCHES[dist.get_rank()]).backward()
    expected = {name: p.grad for name, p in wrapped.module.named_parameters()}
    assert_equal(model, expected, limit=1e-6)
    session.detach()


# -- shards -------------------------------------------------------------------------------------


def shards_by_every_method(mesh: DeviceMesh) -> None:
    for label, method in METHODS.items():
        for parts in (True, False):
            model = sharded(mesh, parts=parts)
            session = og.distribute(model, method, mesh=mesh)
            for _ in range(3):
                model.zero_grad()
                loss_of(model, BATCHES[dist.get_rank()]).backward()
                assert_equal(model, pooled())
                assert_same_on(model, mesh.get_group("site"))
            assert session.stats().step == 3, label
            assert session.stats().sent_bytes > 0, label
            session.detach()
            model.zero_grad()
            loss_of(model, BATCHES[dist.get_rank()]).backward()
            assert session.stats().step == 3, label


def training_of_shards(mesh: DeviceMesh) -> None:
    model, whole = sharded(mesh, parts=True), net().double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(mesh.get_group("site").rank())  # made equal by distribute()
    events = Events()
    og.distribute(model, og.Dense(), mesh=mesh, recorder=events)
    mine = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    for k in range(5):
        mine.zero_grad()
        theirs.zero_grad()
        loss_of(model, BATCHES[dist.get_rank()][: 2 + k]).backward()
        for x in BATCHES.double():
            (loss_of(whole, x[: 2 + k]) / 4).backward()
        mine.step()
        theirs.step()
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert relative_error(p.detach().full_tensor(), q.detach()) < 1e-5, name
    assert {event.rank for event in events} == {dist.get_rank()}
    assert {"body.0.weight", "last.weight"} <= {event.layer for event in events.layers}


def shards_stepped_in_backward(mesh: DeviceMesh) -> None:
    whole, models = net().double(), [sharded(mesh, parts=True) for _ in range(2)]
    step_in_backward(models[0])
    for model in models:
        og.distribute(model, og.Dense(), mesh=mesh)
    step_in_backward(models[1])
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for x in BATCHES.double():
            (loss_of(whole, x) / 4).backward()
        optimizer.step()
        for model in models:
            loss_of(model, BATCHES[dist.get_rank()]).backward()
    for model in models:
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert relative_error(p.detach().full_tensor(), q.detach()) < 1e-5, name


def step_in_backward(model: nn.Module) -> None:
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.05, momentum=0.9)
        p.register_post_accumulate_grad_hook(lambda _, o=optimizer: (o.step(), o.zero_grad()))


def changed_shards(mesh: DeviceMesh) -> None:
    model = sharded(mesh, parts=True)
    session = og.distribute(model, og.Dense(), mesh=mesh)
    with torch.no_grad():
        model(BATCHES[dist.get_rank()])  # leaves the whole parameters in the model
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with raises(RuntimeError, "'scale' was added after og.distribute()"):
        optimizer.step()
    session.detach()
    optimizer.step()


def accumulated_shards(mesh: DeviceMesh) -> None:
    model = sharded(mesh, parts=True)
    session = og.distribute(model, og.RankDAD(rank=1000), mesh=mesh)
    x = BATCHES[dist.get_rank()]
    for _ in range(2):
        model.zero_grad()
        sent = session.stats().total_sent_bytes
        with session.no_sync():
            loss_of(model, x).backward()
        assert session.stats().total_sent_bytes == sent
        loss_of(model, 2 * x).backward()
        assert_equal(model, pooled((1, 2)))
    model.zero_grad()
    model.set_requires_gradient_sync(False)  # FSDP2's own: nothing is reduced at all
    loss_of(model, x).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, 2 * x).backward()
    assert_equal(model, pooled((1, 2)))


def discarded_shards(mesh: DeviceMesh) -> None:
    """A site whose ranks all raise: FSDP2 lets none of them raise alone."""
    model = sharded(mesh, parts=True)
    session = og.distribute(model, og.RankDAD(rank=1000), mesh=mesh)
    x, fails = BATCHES[dist.get_rank()], mesh.get_group("site").rank() == 1
    loss_of(model, x).backward()
    expected = (ArithmeticError, "boom") if fails else (og.StepDiscardedError, "must not be")
    with raises(*expected):
        loss_of(model, x, fails).backward()
    if fails:
        model.reset_iter_state()
    else:
        assert all(p.grad is None for p in model.parameters())
    for _ in range(2):
        model.zero_grad()
        loss_of(model, x).backward()
        assert_equal(model, pooled())
    assert session.stats().step == 4


def bad_shards(mesh: DeviceMesh) -> None:
    """A gradient that is not finite on one rank is so on its whole site."""
    model = sharded(mesh, parts=True)
    session = og.distribute(model, og.Dense(), mesh=mesh, max_bad_steps=1)
    x = BATCHES[dist.get_rank()]
    for scale in (1.0, float("inf"), 1.0):
        model.zero_grad()
        (loss_of(model, x) * (scale if dist.get_rank() == 3 else 1.0)).backward()
        if scale == 1.0:
            assert_equal(model, pooled())
        else:
            assert all(p.grad is None for p in model.parameters())
    session.detach()


def saved_shards(mesh: DeviceMesh) -> None:
    x = BATCHES[dist.get_rank()]

    def steps(model: nn.Module, start: int, stop: int) -> None:
        for k in range(start, stop):
            model.zero_grad()
            loss_of(model, (k + 1) * x).backward()

    model = sharded(mesh, parts=True)
    session = og.distribute(model, og.RankDAD(rank=1), mesh=mesh)
    steps(model, 0, 3)
    state = copy.deepcopy(session.state_dict())
    steps(model, 3, 5)
    session.detach()
    again = sharded(mesh, parts=True)
    resumed = og.distribute(again, og.RankDAD(rank=1), mesh=mesh)
    resumed.load_state_dict(state)
    steps(again, 3, 5)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        if p.grad is not None:
            assert torch.equal(p.grad.to_local(), q.grad.to_local())
    assert resumed.stats().step == 5


def bytes_of_shards(mesh: DeviceMesh) -> None:
    """Between the sites the shards of all ranks are as much as one model."""
    model = sharded(mesh, parts=True)
    session = og.distribute(model, og.Dense(), mesh=mesh)
    loss_of(model, BATCHES[dist.get_rank()]).backward()
    sent = torch.tensor(sum(layer.sent_bytes for layer in session.stats().layers.values()))
    dist.all_reduce(sent, group=mesh.get_group("local"))
    whole = sum(4 * p.numel() for p in net().parameters())
    assert sent == whole, (sent, whole)


def checkpointed_shards(mesh: DeviceMesh) -> None:
    model = sharded(mesh, parts=True)
    session = og.distribute(model, og.Dense(), mesh=mesh)
    x = BATCHES[dist.get_rank()].clone().requires_grad_()
    model(x, reentrant=False).square().mean().backward()
    assert_equal(model, pooled())
    with raises(RuntimeError, "use_reentrant=False"):
        model(x, reentrant=True).square().mean().backward()
    model.reset_iter_state()
    model.zero_grad()
    loss_of(model, x).backward()
    assert_equal(model, pooled())
    assert session.stats().step == 3  # the one that raised is void


def compared_shards(mesh: DeviceMesh) -> None:
    model = sharded(mesh, parts=True)
    session = og.distribute(model, og.Dense(), mesh=mesh, verify_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for k in range(2):
        optimizer.zero_grad()
        loss_of(model, BATCHES[dist.get_rank()]).backward()
        optimizer.step()
        if k == 1 and dist.get_rank() == 3:
            with torch.no_grad():
                dict(model.named_parameters())["body.0.weight"].to_local()[0, 0] += 1e-6
    with pytest.raises(og.DriftError, match=r"og\.distribute again") as raised:
        loss_of(model, BATCHES[dist.get_rank()]).backward()
    assert "rank 3 has another 'body.0.weight' than rank 1" in str(raised.value)
    session.detach()


def local_steps_of_shards(mesh: DeviceMesh) -> None:
    site = mesh.get_group("site").rank()
    for method in (og.Dense(), og.RankDAD(rank=1000), og.PowerSGD(rank=1000)):
        model, steps = sharded(mesh, parts=True), og.LocalSteps(2, method=method)
        session = og.distribute(model, steps, mesh=mesh)
        optimizer, sent = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, (step + 1) * BATCHES[dist.get_rank()]).backward()
            optimizer.step()
            sent.append(session.stats().total_sent_bytes)
        assert sent[0] < sent[1] == sent[2] < sent[3] == sent[4], sent
        expected = of_local_steps(net(), steps, BATCHES, loss_of, 5)[-1][site]
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert relative_error(p.detach().full_tensor(), q.detach()) < 1e-4, name
        state = copy.deepcopy(session.state_dict())
        session.flush()
        for name, p in model.named_parameters():
            own = p.detach().to_local()
            first = own.clone()
            dist.broadcast(first, group=mesh.get_group("site"), group_src=0)
            assert torch.equal(own, first), name
        session.load_state_dict(state)
        session.detach()


def uncounted_steps_of_shards(mesh: DeviceMesh) -> None:
    model = sharded(mesh, parts=True)
    session = og.distribute(model, og.LocalSteps(2), mesh=mesh)
    with raises(RuntimeError, "session.stepped()"):
        for _ in range(20):
            loss_of(model, BATCHES[dist.get_rank()]).backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(0.01 * p.grad)
    session.detach()


def refused(mesh: DeviceMesh) -> None:
    model = sharded(mesh, parts=True)
    for method in (og.DAD(), og.PerLayer({"last.*": og.DAD(), "*": og.Dense()})):
        with raises(ValueError, "the factors of a layer make up the gradient"):
            og.distribute(model, method, mesh=mesh)
    with raises(ValueError, "on_drift='raise'"):
        og.distribute(model, og.Dense(), mesh=mesh, verify_every=1, on_drift="mend")
    with raises(ValueError, "og.Local()"):
        og.distribute(model, og.PerLayer({"last.*": og.Local(), "*": og.Dense()}), mesh=mesh)
    with raises(ValueError, "every=2 for 'body.0.weight'"):
        og.distribute(model, og.Dense(every=2), mesh=mesh)
    with raises(ValueError, "FSDP2 averages the ranks of a site alike"):
        og.distribute(model, og.Dense(), mesh=mesh, weighting="samples")
    for kind in ("mean", "broadcast"):
        with raises(ValueError, "each rank keeps its own"):
            og.distribute(model, og.Dense(), mesh=mesh, buffers=kind)
    with raises(ValueError, "outer=OuterMuon of a model of fully_shard()"):
        og.distribute(model, og.LocalSteps(2, outer=og.optim.OuterMuon), mesh=mesh)
    with raises(ValueError, "pass mesh="):
        og.distribute(model, og.Dense())
    both = net()
    fully_shard(both, mesh=mesh)  # HSDP
    with raises(ValueError, "FSDP2 itself would reduce"):
        og.distribute(both, og.Dense(), mesh=mesh)
    some = net()
    fully_shard(some.body, mesh=mesh["local"])
    with raises(ValueError, "is not sharded"):
        og.distribute(some, og.Dense(), mesh=mesh)
    session = og.distribute(model, og.Dense(), mesh=mesh)
    with raises(RuntimeError, "use loops of equal length"), session.join():
        pass
    with raises(RuntimeError, "distribute again"):
        session.make_equal()
    with raises(ValueError, "distributed already"):
        og.distribute(model, og.Dense(), mesh=mesh)


CHECKS: list[Callable[[DeviceMesh], None]] = [
    *(mesh_in_either_order, as_ddp_leaves_it, shards_by_every_method, training_of_shards),
    *(accumulated_shards, discarded_shards, bad_shards, saved_shards, bytes_of_shards),
    *(checkpointed_shards, shards_stepped_in_backward, changed_shards, compared_shards),
    *(local_steps_of_shards, uncounted_steps_of_shards, refused),
]


def check_all(rank: int, file: str, said: str) -> None:
    """What each process does: the checks; then rank 0 dies, and the others say what they hear."""
    torch.set_num_threads(1)
    stay_on_loopback()
    where = {"init_method": f"file://{file}", "rank": rank, "world_size": 4}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **where)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "local"))
    for check in CHECKS:
        check(mesh)
    model = net()
    og.distribute(model, og.DAD(), mesh=mesh)
    loss_of(model, BATCHES[rank]).backward()
    if rank == 0:
        os._exit(0)
    began = time.monotonic()
    try:
        loss_of(model, BATCHES[rank]).backward()
    except RuntimeError as error:
        Path(f"{said}{rank}").write_text(f"{time.monotonic() - began:.1f} s: {error}")
    os._exit(0)
