"""What the loops of sites of several ranks may do, against one model of float64 with all rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import METHODS, Boom, Events, mlp, relative_error
from meshes import ThreadMesh, of_local_steps, run_mesh, try_mesh

WIDE = mlp(60, 50, 40, 20)
ROWS = torch.randn(4, 12, 60, generator=torch.Generator().manual_seed(5))
LABELS = ("dense", "dad", "dad forced", "powersgd, full rank")


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) ** 2).mean()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_same(by_rank: Sequence[dict[str, Any]]) -> None:
    """To the bit, on all ranks."""
    for found in by_rank[1:]:
        for name, t in found.items():
            first = by_rank[0][name]
            assert t is first or torch.equal(t, first), name


def assert_near(found: dict[str, Tensor | None], double: nn.Module, scale: float = 1.0) -> None:
    for name, p in double.named_parameters():
        expected = None if p.grad is None else p.grad * scale
        assert relative_error(found[name], expected) < 5e-6, name


# -- weighting="samples" ----------------------------------------------------------------------


@pytest.mark.parametrize("label", LABELS)
def test_a_rank_counts_by_its_samples(label):
    """Whatever the ranks' own sizes, the gradient is that of one large batch."""
    counts = [(3, 5, 7, 2), (3, 5, 7, 2), (3, 5, 7, 2), (1, 12, 4, 6), (2, 0, 4, 6), (0, 0, 4, 6)]

    def body(mesh: ThreadMesh) -> list[dict[str, Tensor | None]]:
        model, found = copy.deepcopy(WIDE), []
        og.distribute(model, METHODS[label], mesh=mesh, weighting="samples")
        for count in counts:
            model.zero_grad()
            loss_of(model, ROWS[mesh.number][: count[mesh.number]]).backward()
            found.append(gradients(model))
        return found

    by_rank = run_mesh(2, 2, body)
    for k, count in enumerate(counts):
        assert_same([found[k] for found in by_rank])
        double = copy.deepcopy(WIDE).double()
        loss_of(
            double, torch.cat([x[:n] for x, n in zip(ROWS, count, strict=True)]).double()
        ).backward()
        assert_near(by_rank[0][k], double)


# -- buffers= ---------------------------------------------------------------------------------


class Normed(nn.Module):
    """A norm with running statistics, and a backward that may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(60), nn.Linear(60, 20)

    def forward(self, x: Tensor, armed: bool = False) -> Tensor:
        return self.out(Boom.apply(self.norm(x), armed))


RAISES = 2
"""The step in which the backward of one rank raises."""


@pytest.mark.parametrize("kind", [None, "broadcast", "mean", "local"])
@pytest.mark.parametrize("weighting", ["sites", "samples"])
def test_running_statistics(kind, weighting):
    """Of the first rank's, or the mean of all ranks'; each rank's own of a step that is void."""
    counts = (12, 7, 5, 9)

    def body(mesh: ThreadMesh) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        model, found = Normed(), []
        settings = {"buffers": kind, "weighting": weighting}
        session = og.distribute(model, og.DAD(), mesh=mesh, **settings)
        for k in range(5):
            model.zero_grad()
            armed = k == RAISES and mesh.number == 3
            try:
                x = (k + 1) * ROWS[mesh.number][: counts[mesh.number]]
                model(x, armed).square().mean().backward()
            except (ArithmeticError, og.StepDiscardedError):
                assert k == RAISES
            found.append({name: t.clone() for name, t in model.named_buffers()})
        session.detach()
        return found

    by_rank = run_mesh(2, 2, body)
    doubles = [nn.BatchNorm1d(60).double() for _ in ROWS]
    own = counts if weighting == "samples" else (1,) * len(ROWS)
    for k in range(5):
        for double, x, n in zip(doubles, ROWS, counts, strict=True):
            double((k + 1) * x[:n].double())
        if k != RAISES and kind != "local":
            assert_same([found[k] for found in by_rank])
            for name, _ in doubles[0].named_buffers():
                values = [double.get_buffer(name) for double in doubles]
                mean = sum(n / sum(own) * t for n, t in zip(own, values, strict=True))
                floating = values[0].is_floating_point()
                value = mean if kind == "mean" and floating else values[0].clone()
                for t in values:
                    t.copy_(value)
        for rank, found in enumerate(by_rank):
            for name, t in doubles[rank].named_buffers():
                assert relative_error(found[k][f"norm.{name}"].double(), t.double()) < 1e-6, (
                    k,
                    rank,
                    name,
                )


@pytest.mark.parametrize("kind", ["broadcast", "mean"])
def test_running_statistics_of_unequal_loops(kind):
    """Only ranks that have a batch count; those that have none take what these agree on."""
    batches = (1, 3, 2, 0)

    def body(mesh: ThreadMesh) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Normed()
        session = og.distribute(model, og.DAD(), mesh=mesh, buffers=kind)
        with session.join():
            for k in range(batches[mesh.number]):
                model((k + 1) * ROWS[mesh.number]).square().mean().backward()
        session.detach()
        return dict(model.norm.named_buffers())

    by_rank = run_mesh(2, 2, body)
    assert_same(by_rank)
    agreed = nn.BatchNorm1d(60).double()
    for k in range(max(batches)):
        sites = [
            [x for x, n in zip(ROWS[i : i + 2], batches[i : i + 2], strict=True) if k < n]
            for i in (0, 2)
        ]
        norms = [copy.deepcopy(agreed) for site in sites for _ in site]
        for norm, x in zip(norms, [x for site in sites for x in site], strict=True):
            norm((k + 1) * x.double())
        for name, t in agreed.named_buffers():
            values = [norm.get_buffer(name) for norm in norms]
            mean = kind == "mean" and t.is_floating_point()
            t.copy_(sum(values) / len(values) if mean else values[0])
    for name, t in agreed.named_buffers():
        assert relative_error(by_rank[0][name].double(), t.double()) < 1e-6, name


@pytest.mark.parametrize("kind", ["broadcast", "mean"])
def test_running_statistics_of_a_skipped_step_stay_apart(kind):
    """Each rank keeps its own of a step that is skipped; the next one brings them together."""

    def body(mesh: ThreadMesh) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        model, found = Normed(), []
        session = og.distribute(model, og.DAD(), mesh=mesh, buffers=kind, max_bad_steps=2)
        for k in range(3):
            loss = model((k + 1) * ROWS[mesh.number]).square().mean()
            (loss * (math.inf if k == 1 and mesh.number == 2 else 1.0)).backward()
            found.append({name: t.clone() for name, t in model.norm.named_buffers()})
        session.detach()
        return found

    by_rank = run_mesh(2, 2, body)
    for k in (0, 2):
        assert_same([found[k] for found in by_rank])
    for rank, found in enumerate(by_rank):
        own = nn.BatchNorm1d(60)
        own.load_state_dict(found[0], strict=False)
        own(2 * ROWS[rank])
        for name, t in own.named_buffers():
            assert relative_error(found[1][name].double(), t.double()) < 1e-6, (rank, name)


@pytest.mark.parametrize("kind", ["broadcast", "mean"])
def test_running_statistics_of_a_local_norm_do_not_travel(kind):
    """`og.Local()` is about its buffers, too: each rank goes on with its own."""

    def body(mesh: ThreadMesh) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Normed()
        method = og.PerLayer({"norm.*": og.Local(), "*": og.DAD()})
        session = og.distribute(model, method, mesh=mesh, buffers=kind)
        model(ROWS[mesh.number]).square().mean().backward()
        session.detach()
        return dict(model.norm.named_buffers())

    for rank, found in enumerate(run_mesh(2, 2, body)):
        own = nn.BatchNorm1d(60)
        own(ROWS[rank])
        for name, t in own.named_buffers():
            assert relative_error(found[name].double(), t.double()) < 1e-6, (rank, name)


# -- every=k ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        og.Dense(every=3),
        og.DAD(always=True, every=3),
        og.DAD(every=3),
        og.PerLayer({"0.*": og.RankDAD(rank=1000, every=3), "*": og.DAD()}),
    ],
    ids=["dense", "dad forced", "dad", "per layer"],
)
def test_passes_accumulate_until_they_are_due(method):
    """Of passes of other sizes, and once with a pass under `no_sync()`."""

    def body(mesh: ThreadMesh) -> list[tuple[dict[str, Tensor | None], int]]:
        model, found = copy.deepcopy(WIDE), []
        session = og.distribute(model, method, mesh=mesh)
        for k in range(9):
            model.zero_grad()
            if k == 4:
                with session.no_sync():
                    loss_of(model, ROWS[mesh.number][2:4]).backward()
            loss_of(model, (k + 1) * ROWS[mesh.number][: 2 + k % 2]).backward()
            found.append((gradients(model), session.stats().step))
        session.detach()
        return found

    by_rank = run_mesh(2, 2, body)
    double, late = copy.deepcopy(WIDE).double(), ("0." if isinstance(method, og.PerLayer) else "")
    own = copy.deepcopy(WIDE).double()
    for k in range(9):
        assert_same([found[k][0] for found in by_rank])
        own.zero_grad()
        for model in (double, own):
            for x in ROWS.double():
                if k == 4:
                    (loss_of(model, x[2:4]) / 4).backward()
                (loss_of(model, (k + 1) * x[: 2 + k % 2]) / 4).backward()
        for name, gradient in by_rank[0][k][0].items():
            if not name.startswith(late):
                assert relative_error(gradient, own.get_parameter(name).grad) < 5e-6, (k, name)
            elif k % 3 == 2:
                expected = double.get_parameter(name).grad / 3
                assert relative_error(gradient, expected) < 5e-6, (k, name)
            else:
                assert gradient is None, (k, name)
        if k % 3 == 2:
            double.zero_grad()
    assert {found[-1][1] for found in by_rank} == {9 if late else 3}


# -- max_bad_steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("label", ["dense", "dad forced", "rank-dad, full rank"])
def test_a_bad_step_of_any_rank_is_skipped_on_all(bad, label):
    def body(mesh: ThreadMesh) -> dict[str, Tensor | None]:
        model, events = copy.deepcopy(WIDE), Events()
        own = {"mesh": mesh, "max_bad_steps": 1, "recorder": events}
        og.distribute(model, METHODS[label], **own)
        x = ROWS[mesh.number]
        scales = (1.0, math.inf, 1.0, math.inf, math.inf)
        for k, scale in enumerate(scales):
            model.zero_grad()
            loss = loss_of(model, x) * (scale if mesh.number == bad else 1.0)
            if k == 4:
                with pytest.raises(og.BadStepsError, match="on site"):
                    loss.backward()
            else:
                loss.backward()
            if scale == math.inf:
                assert all(p.grad is None for p in model.parameters()), k
        skipped = [one for one in events if getattr(one, "what", "") == "skipped"]
        assert [one.sites for one in skipped] == [(bad // 2,)] * 3
        assert all(one.layer in dict(model.named_parameters()) for one in skipped)
        model.zero_grad()
        loss_of(model, x).backward()
        return gradients(model)

    by_rank = run_mesh(2, 2, body)
    assert_same(by_rank)
    double = copy.deepcopy(WIDE).double()
    for x in ROWS.double():
        (loss_of(double, x) / 4).backward()
    assert_near(by_rank[0], double)


# -- session.join() ---------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["dense", "dad"])
@pytest.mark.parametrize("batches", [(2, 5, 4, 3), (1, 1, 3, 0)], ids=str)
def test_ranks_may_run_out_one_by_one(label, batches):
    """The mean is over the ranks that have a batch; all end with the same replica."""

    def body(mesh: ThreadMesh) -> dict[str, Tensor]:
        model = copy.deepcopy(WIDE)
        session = og.distribute(model, METHODS[label], mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with session.join(step=optimizer.step):
            for k in range(batches[mesh.number]):
                optimizer.zero_grad()
                loss_of(model, (k + 1) * ROWS[mesh.number]).backward()
                optimizer.step()
        assert session.stats().step == max(batches)
        session.detach()
        return {name: p.detach() for name, p in model.named_parameters()}

    by_rank = run_mesh(2, 2, body)
    assert_same(by_rank)
    double = copy.deepcopy(WIDE).double()
    optimizer = torch.optim.SGD(double.parameters(), lr=0.05, momentum=0.9)
    for k in range(max(batches)):
        optimizer.zero_grad()
        active = [x for x, n in zip(ROWS.double(), batches, strict=True) if k < n]
        for x in active:
            (loss_of(double, (k + 1) * x) / len(active)).backward()
        optimizer.step()
    for name, p in double.named_parameters():
        assert relative_error(by_rank[0][name], p.detach()) < 1e-5, name


def test_a_loop_that_raises_ends_those_of_all_ranks():
    def body(mesh: ThreadMesh) -> None:
        model = copy.deepcopy(WIDE)
        session = og.distribute(model, og.DAD(), mesh=mesh)

        def loop() -> None:
            with session.join():
                for k in range(4):
                    if k == 2 and mesh.number == 1:
                        raise KeyError("gone")
                    model.zero_grad()
                    loss_of(model, ROWS[mesh.number]).backward()

        with pytest.raises(KeyError if mesh.number == 1 else og.StepDiscardedError):
            loop()
        model.zero_grad()
        loss_of(model, ROWS[mesh.number]).backward()  # and on they go
        session.detach()

    run_mesh(2, 2, body)


# -- og.LocalSteps ----------------------------------------------------------------------------


def test_sites_step_by_themselves_and_each_as_one():
    """Inside a site gradients are averaged in every step, between sites weights in every third."""
    steps, k = 7, 3
    expected = of_local_steps(WIDE, og.LocalSteps(k), ROWS, loss_of, steps)

    def body(mesh: ThreadMesh) -> list[dict[str, Tensor]]:
        model, found, sent = copy.deepcopy(WIDE), [], []
        session = og.distribute(model, og.LocalSteps(k), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, (step + 1) * ROWS[mesh.number]).backward()
            optimizer.step()
            found.append({name: p.detach().clone() for name, p in model.named_parameters()})
            sent.append(session.stats().total_sent_bytes)
            for name, p in expected[step][mesh.site].named_parameters():
                assert relative_error(found[-1][name], p.detach()) < 1e-5, (step, name)
        assert sent[0] == sent[1] < sent[2] == sent[4] < sent[5] == sent[6]
        session.flush()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        session.detach()
        return found

    by_rank = run_mesh(2, 2, body)
    for step in range(steps + 1):
        for site in range(2):
            assert_same([by_rank[2 * site][step], by_rank[2 * site + 1][step]])
    for step in (2, 5, 7):
        assert_same([found[step] for found in by_rank])


class Fragile(nn.Module):
    """Whose backward raises when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = copy.deepcopy(WIDE)

    def forward(self, x: Tensor, armed: bool = False) -> Tensor:
        return self.body[4](Boom.apply(self.body[:4](x), armed))


def test_a_rank_that_raises_between_two_exchanges_is_its_sites_own_affair():
    def body(mesh: ThreadMesh) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Fragile()
        session = og.distribute(model, og.LocalSteps(2), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = ROWS[mesh.number]
        for k in range(4):
            if k == 1 and mesh.site == 0:
                expected = ArithmeticError if mesh.number == 1 else og.StepDiscardedError
                with pytest.raises(expected):
                    model(x, mesh.number == 1).square().mean().backward()
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        assert session.stats().step == 2
        session.detach()
        return {name: p.detach() for name, p in model.named_parameters()}

    assert_same(run_mesh(2, 2, body))


def test_a_rank_that_leaves_between_two_exchanges_is_an_error_on_all_others():
    def body(mesh: ThreadMesh) -> None:
        model = copy.deepcopy(WIDE)
        og.distribute(model, og.LocalSteps(2), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for k in range(4):
            if k == 1 and mesh.number == 1:
                return
            optimizer.zero_grad()
            loss_of(model, ROWS[mesh.number]).backward()
            optimizer.step()

    results = try_mesh(2, 2, body, timeout=timedelta(seconds=4))
    assert results[1] is None
    for rank in (0, 2, 3):
        assert isinstance(results[rank], og.SiteLostError), results[rank]


# -- og.Local() -------------------------------------------------------------------------------


def test_the_ranks_of_a_site_share_what_is_its_own():
    """Its gradient is the mean over the ranks of the site; nothing of it goes to the others."""

    def body(mesh: ThreadMesh) -> dict[str, Tensor | None]:
        model = copy.deepcopy(WIDE)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * mesh.number)
        method = og.PerLayer({"0.*": og.Local(), "*": og.DAD()})
        session = og.distribute(model, method, mesh=mesh)
        double = own_start(mesh.site)
        for p, q in zip(model.parameters(), double.parameters(), strict=True):
            assert relative_error(p.detach(), q.detach()) < 1e-6
        for k in range(3):
            model.zero_grad()
            loss_of(model, (k + 1) * ROWS[mesh.number]).backward()
        assert session.stats().step == 3
        assert not any(name.startswith("0.") for name in session.stats().layers)
        why = {line.parameter: line.why for line in session.coverage()}
        assert why["0.weight"] == "each site keeps its own: the mean over its 2 ranks"
        assert session.own_names == {"0.weight", "0.bias"}
        with pytest.raises(RuntimeError, match="use loops of equal length"):
            session.join().__enter__()
        session.detach()
        return gradients(model)

    by_rank = run_mesh(2, 2, body)
    doubles = [own_start(site) for site in range(2)]
    for rank, x in enumerate(ROWS.double()):
        (loss_of(doubles[rank // 2], 3 * x) / 2).backward()
    for rank, found in enumerate(by_rank):
        site = doubles[rank // 2]
        for name, p in site.named_parameters():
            both = sum(double.get_parameter(name).grad for double in doubles) / 2
            expected = p.grad if name.startswith("0.") else both
            assert relative_error(found[name], expected) < 5e-6, (rank, name)
    assert_same(by_rank[:2])
    assert_same(by_rank[2:])


def test_ranks_of_a_site_have_the_same_parts_of_their_own():
    def body(mesh: ThreadMesh) -> None:
        model = mlp(6, 9 if mesh.number == 3 else 7 + mesh.site, 5, 4)
        model[0] = nn.Sequential(model[0], nn.Linear(model[0].out_features, 7))
        model[2] = nn.Linear(7, 5)
        method = og.PerLayer({"0.*": og.Local(), "*": og.DAD()})
        with pytest.raises(ValueError, match=r"'0.0.weight'|0.0.weight of the site|take part"):
            og.distribute(model, method, mesh=mesh)

    run_mesh(2, 2, body)


def own_start(site: int) -> nn.Module:
    """What `distribute` makes equal: everywhere, and of what is a site's own on its ranks."""
    double = copy.deepcopy(WIDE).double()
    with torch.no_grad():
        for name, p in double.named_parameters():
            p.add_(0.02 * site * name.startswith("0."))
    return double
