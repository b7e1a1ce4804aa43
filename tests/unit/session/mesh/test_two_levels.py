"""Sites of several ranks: the mean over all ranks, and between sites no more than one rank's."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import outergrad as og
from cases import METHODS, Boom, Case, Events, build, mlp, pooled, relative_error, run
from covering import covering
from meshes import ThreadMesh, run_mesh, try_mesh
from outergrad.methods.dad import DADCompressor
from outergrad.session.mesh.pooled import Pooled
from ranks import run_on_lasting_groups
from seeding import seed

CASES = build()
SOME = [
    *(
        "no rows on one site",
        "linear without bias",
        "called several times",
        "embedding twice",
        "tied",
    ),
    *("lstm packed both ways", "unused", "penalty on one site", "two dtypes", "batch norm"),
]
FEW = ("dad", "dad forced", "rank-dad, full rank")
STEPS = 3
seed(1)  # with some weights two entries are alike, and rounding says which one is sparse
WIDE = mlp(200, 150, 150, 20)
BATCHES = torch.randn(4, 6, 200, generator=torch.Generator().manual_seed(3))
LOW_RANK = {
    "rank-dad": og.RankDAD(rank=2),
    "rank-dad two_way": og.RankDAD(rank=2, reduce="two_way"),
    "rank-dad all_reduce": og.RankDAD(rank=2, reduce="all_reduce"),
    "rank-dad alternate": og.RankDAD(rank=2, reduce="alternate"),
    "powersgd": og.PowerSGD(rank=2),
    "sparse": og.Sparse(density=0.02),
    "sparse random": og.Sparse(density=0.02, select="random"),
}


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def assert_same(by_rank: list[dict[str, torch.Tensor | None]]) -> None:
    """To the bit, on all ranks."""
    for found in by_rank[1:]:
        for name, g in found.items():
            first = by_rank[0][name]
            assert g is first or torch.equal(g, first), name


def train(case: Case, method: Any, mesh: ThreadMesh) -> dict[str, torch.Tensor | None]:
    model = copy.deepcopy(case.model)
    session = og.distribute(model, method, mesh=mesh)
    for _ in range(STEPS):
        model.zero_grad()
        seed(7)
        run(model, case, case.batches[mesh.number]).backward()
    session.detach()
    return gradients(model)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        *(("linear", label) for label in METHODS),
        *covering(SOME, FEW, quick=6),
    ],
)
def test_gradients_are_the_mean_over_all_ranks(name, label):
    case = CASES[name]()
    expected = pooled(case, 4)
    by_rank = run_mesh(2, 2, lambda mesh: train(case, METHODS[label], mesh))
    assert_same(by_rank)
    for parameter, gradient in by_rank[0].items():
        error = relative_error(gradient, expected[parameter])
        assert error < 5e-6, f"{parameter}: {error:.1e}"


@pytest.mark.parametrize(
    ("label", "shape"),
    covering(["dense", "dad forced", "rank-dad, full rank"], [(1, 1), (1, 3), (3, 1)], quick=3),
)
def test_meshes_of_any_shape(shape, label):
    case = CASES["linear"]()
    expected = pooled(case, shape[0] * shape[1])
    by_rank = run_mesh(*shape, lambda mesh: train(case, METHODS[label], mesh))
    assert_same(by_rank)
    for name, gradient in by_rank[0].items():
        assert relative_error(gradient, expected[name]) < 5e-6, name


def of_mesh(method: Any, mesh: ThreadMesh, steps: int = STEPS):
    """Gradients and bytes between sites of steps with rows of four ranks."""
    model = copy.deepcopy(WIDE)
    session = og.distribute(model, method, mesh=mesh)
    found = []
    for k in range(steps):
        model.zero_grad()
        loss_of(model, (k + 1) * BATCHES[mesh.number]).backward()
        found.append((gradients(model), session.stats().sent_bytes))
    session.detach()
    return found


def of_one_rank_per_site(method: Any, site: int, group: Any, steps: int = STEPS):
    """The same with the rows of two ranks at once."""
    model = copy.deepcopy(WIDE)
    session = og.distribute(model, method, group=group)
    found = []
    for k in range(steps):
        model.zero_grad()
        loss_of(model, (k + 1) * BATCHES[2 * site : 2 * site + 2].flatten(0, 1)).backward()
        found.append((gradients(model), session.stats().sent_bytes))
    session.detach()
    return found


@pytest.mark.parametrize("label", covering(["dense", "dad", "dad raw", *LOW_RANK], quick=3))
def test_between_sites_travels_what_one_rank_per_site_would_send(label):
    method = {**METHODS, **LOW_RANK}[label]
    whole = run_on_lasting_groups(2, lambda site, group: of_one_rank_per_site(method, site, group))
    by_rank = run_mesh(2, 2, lambda mesh: of_mesh(method, mesh))
    for k in range(STEPS):
        assert_same([steps[k][0] for steps in by_rank])
        if k and label.endswith("two_way"):
            continue  # another site merges, and keeps what does not go into the rank
        for name, gradient in by_rank[0][k][0].items():
            assert relative_error(gradient, whole[0][k][0][name].double()) < 1e-4, (k, name)
    for site in range(2):
        alone = whole[site][-1][1]
        sent = [by_rank[2 * site + local][-1][1] for local in range(2)]
        assert abs(sum(sent) - alone) < 0.01 * alone + 512, (sent, alone)
        assert max(sent) < 0.8 * alone, sent  # the ranks share it out


class Recurrent(nn.Module):
    """What sites of one rank compute again for each other: a chain, a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.chain, self.gru, self.last = mlp(200, 150, 150), nn.GRU(150, 60), nn.Linear(60, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gru(self.chain(x))[0])


@pytest.mark.parametrize(
    ("method", "dad"),
    [
        (og.EDAD(), og.DAD()),
        (og.EDAD(always=True, blocks=["gru"]), og.DAD(always=True)),
        (og.EDAD(inputs="raw"), og.DAD(reveal="activations")),
        (og.PerLayer({"chain.*": og.EDAD(), "*": og.Dense()}), None),
    ],
    ids=["edad", "blocks", "raw", "per layer"],
)
def test_nothing_is_computed_again(method, dad):
    """Rows can be pooled inside a site, uses of a block cannot: all travels as by DAD."""
    torch.manual_seed(0)
    start = Recurrent()

    def body(mesh, method):
        model = copy.deepcopy(start)
        session = og.distribute(model, method, mesh=mesh)
        loss_of(model, BATCHES[mesh.number]).backward()
        assert "replay" not in str(session.coverage())
        found = gradients(model), session.stats().sent_bytes
        session.detach()
        return found

    by_rank = run_mesh(2, 2, lambda mesh: body(mesh, method))
    double = copy.deepcopy(start).double()
    for x in BATCHES.double():
        (loss_of(double, x) / 4).backward()
    for name, gradient in by_rank[0][0].items():
        assert relative_error(gradient, double.get_parameter(name).grad) < 5e-6, name
    if dad is not None:
        assert by_rank[0][1] == run_mesh(2, 2, lambda mesh: body(mesh, dad))[0][1]


def test_a_second_batch_size_on_one_rank_only():
    """Plans are made without headers once the steps are alike: one rank then surprises them."""
    counts = [(4, 4, 4, 4)] * 4 + [(4, 4, 30, 4)] + [(4, 4, 4, 4)] * 2

    def body(mesh):
        model, double = copy.deepcopy(WIDE), copy.deepcopy(WIDE).double()
        og.distribute(model, og.DAD(always=True), mesh=mesh)
        for count in counts:
            model.zero_grad()
            double.zero_grad()
            batches = [BATCHES[r].repeat(5, 1)[:n] for r, n in enumerate(count)]
            loss_of(model, batches[mesh.number]).backward()
            for batch in batches:
                (loss_of(double, batch.double()) / 4).backward()
            for p, q in zip(model.parameters(), double.parameters(), strict=True):
                assert relative_error(p.grad, q.grad) < 5e-6

    run_mesh(2, 2, body)


@pytest.mark.parametrize("label", ["dense", "dad", "dad forced", "powersgd, full rank"])
def test_passes_under_no_sync_count(label):
    def body(mesh):
        model, double = copy.deepcopy(WIDE), copy.deepcopy(WIDE).double()
        session = og.distribute(model, METHODS[label], mesh=mesh)
        for rank in range(4):
            for k in range(3):
                (loss_of(double, (k + 1) * BATCHES[rank].double()) / 4).backward()
        for _ in range(3):
            model.zero_grad()
            before = session.stats().total_sent_bytes
            with session.no_sync():
                for k in range(2):
                    loss_of(model, (k + 1) * BATCHES[mesh.number]).backward()
            assert session.stats().total_sent_bytes == before
            loss_of(model, 3 * BATCHES[mesh.number]).backward()
            for p, q in zip(model.parameters(), double.parameters(), strict=True):
                assert relative_error(p.grad, q.grad) < 5e-6

    run_mesh(2, 2, body)


def test_training_keeps_all_ranks_equal():
    def body(mesh):
        torch.manual_seed(mesh.number)
        model = copy.deepcopy(WIDE)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(mesh.number)  # made equal by distribute()
        og.distribute(model, og.RankDAD(rank=3), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for k in range(6):
            optimizer.zero_grad()
            loss_of(model, BATCHES[mesh.number][: 2 + (k + mesh.number) % 4]).backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    by_rank = run_mesh(2, 2, body)
    assert_same(by_rank)
    assert all(torch.isfinite(t).all() for t in by_rank[0].values())


# -- errors -----------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Whose backward raises when told to."""

    def __init__(self):
        super().__init__()
        self.body = copy.deepcopy(WIDE)

    def forward(self, x, armed=False):
        return self.body[4](Boom.apply(self.body[:4](x), armed))


FRAGILE = Fragile()


STEADY = {"dense": 0, "dad forced": 3, "rank-dad": 3, "sparse": 3}


@pytest.mark.parametrize(
    ("label", "who"), covering(list(STEADY), [(0,), (1, 2), (0, 1, 2, 3)], quick=3)
)
def test_a_backward_that_raised_discards_the_step_on_all_ranks(label, who):
    method = {**METHODS, **LOW_RANK}[label]

    def body(mesh):
        model = copy.deepcopy(FRAGILE)
        session = og.distribute(model, method, mesh=mesh)
        x = BATCHES[mesh.number]
        for _ in range(STEADY[label]):
            model.zero_grad()
            loss_of(model, x).backward()
        expected = ArithmeticError if mesh.number in who else og.StepDiscardedError
        with pytest.raises(expected):
            model(x, mesh.number in who).square().mean().backward()
        if mesh.number not in who:
            assert all(p.grad is None for p in model.parameters())  # nothing to be applied
        for _ in range(2):
            model.zero_grad()
            loss_of(model, x).backward()
        assert session.stats().step == STEADY[label] + 3
        session.detach()
        return gradients(model)

    by_rank = run_mesh(2, 2, body)
    assert_same(by_rank)
    if label not in LOW_RANK:
        double = copy.deepcopy(FRAGILE).double()
        for x in BATCHES:
            (loss_of(double, x.double()) / 4).backward()
        for name, p in double.named_parameters():
            assert relative_error(by_rank[0][name], p.grad) < 5e-6, name


def test_a_rank_that_ends_after_it_raised_does_not_leave_the_others_waiting():
    def body(mesh):
        model = copy.deepcopy(FRAGILE)
        session = og.distribute(model, og.DAD(), mesh=mesh)
        raises = ArithmeticError if mesh.number == 2 else og.StepDiscardedError
        with pytest.raises(raises):
            model(BATCHES[mesh.number], mesh.number == 2).square().mean().backward()
        session.detach()

    run_mesh(2, 2, body)


def test_a_sparse_gradient_on_one_rank():
    weight = torch.randn(10, 4)

    def body(mesh):
        model = nn.ParameterDict({"table": weight.clone(), "other": torch.ones(4)})
        events = Events()
        session = og.distribute(model, og.Dense(), mesh=mesh, recorder=events)
        ids = torch.tensor([1, 2])

        def loss(sparse):
            rows = nn.functional.embedding(ids, model["table"], sparse=sparse)
            return (rows * model["other"]).sum()

        raises = RuntimeError if mesh.number == 1 else og.StepDiscardedError
        with pytest.raises(raises, match="sparse" if mesh.number == 1 else "another rank raised"):
            loss(mesh.number == 1).backward()
        model.zero_grad()
        loss(False).backward()
        assert session.stats().step == 2
        assert {event.rank for event in events} == {mesh.number}
        return model["table"].grad

    assert all(g is not None for g in run_mesh(2, 2, body))


@dataclass(frozen=True, kw_only=True)
class Breaks:
    """dAD until it is told to fail."""

    told: tuple[dict[str, bool], ...] = ()

    def __repr__(self) -> str:
        return "Breaks()"

    def compressor(self):
        return BreakingCompressor(self.told[0])


class BreakingCompressor(DADCompressor):
    def __init__(self, told: dict[str, bool]) -> None:
        super().__init__(og.DAD(always=True))
        self._told = told

    def route(self, unit, rows_SK, *, tapped):
        if self._told["breaks"]:
            raise ArithmeticError("no way")
        return super().route(unit, rows_SK, tapped=tapped)


def test_an_error_in_the_share_of_one_rank_voids_the_shares_of_all():
    """What the other shares' methods remember must be of steps that counted."""

    def body(mesh, breaking):
        told = {"breaks": False}
        method = og.PerLayer({"4.*": Breaks(told=(told,)), "*": og.RankDAD(rank=1)})
        model = copy.deepcopy(WIDE)
        og.distribute(model, method, mesh=mesh)
        x = BATCHES[mesh.number]
        errors = []
        for k in range(3):
            told["breaks"] = breaking and k == 1
            if k == 1 and not breaking:
                continue
            model.zero_grad()
            try:
                loss_of(model, (k + 1) * x[: k + 3]).backward()
            except (ArithmeticError, og.StepDiscardedError) as error:
                errors.append(type(error).__name__)
        return gradients(model), errors

    broken = run_mesh(2, 2, lambda mesh: body(mesh, True))
    spared = run_mesh(2, 2, lambda mesh: body(mesh, False))
    errors = sorted(error for _, one in broken for error in one)
    assert errors == ["ArithmeticError"] * 2 + ["StepDiscardedError"] * 2
    assert_same([g for g, _ in broken + spared])


def test_a_rank_that_leaves_is_an_error_not_a_hang():
    def body(mesh):
        model = copy.deepcopy(WIDE)
        og.distribute(model, og.DAD(), mesh=mesh)
        loss_of(model, BATCHES[mesh.number]).backward()
        if mesh.number != 1:
            loss_of(model, BATCHES[mesh.number]).backward()

    results = try_mesh(2, 2, body, timeout=timedelta(seconds=2))
    assert results[1] is None
    for rank in (0, 2, 3):
        assert isinstance(results[rank], RuntimeError), results[rank]
        assert " lost " in str(results[rank])


class LeftError(Exception):
    """What a rank raises in place of dying."""


@pytest.mark.slow
def test_a_rank_that_leaves_behind_the_votes_leaves_its_site_in_doubt(monkeypatch):
    """Its neighbour cannot hear of the share that is missing; the other site has all of them."""
    own = threading.local()

    tell = Pooled.tell

    def leave(*args):
        if own.leaves:
            raise LeftError
        return tell(*args)

    monkeypatch.setattr(Pooled, "tell", leave)

    def body(mesh):
        own.leaves = mesh.number == 1
        model = copy.deepcopy(WIDE)
        og.distribute(model, og.DAD(), mesh=mesh)
        loss_of(model, BATCHES[mesh.number]).backward()
        return gradients(model)

    neighbour, gone, *others = try_mesh(2, 2, body, timeout=timedelta(seconds=2))
    assert isinstance(gone, LeftError)
    assert "may have applied it" in str(neighbour)
    assert_same(others)


def test_two_models_on_one_mesh():
    def body(mesh):
        first, second = copy.deepcopy(WIDE), copy.deepcopy(FRAGILE)
        og.distribute(first, og.DAD(), mesh=mesh)
        og.distribute(second, og.RankDAD(rank=1000), mesh=mesh)
        x = BATCHES[mesh.number]
        (loss_of(first, x) + second(x).square().mean()).backward()
        with pytest.raises(ArithmeticError if mesh.number == 0 else og.StepDiscardedError):
            second(x, mesh.number == 0).square().mean().backward()
        first.zero_grad()
        second.zero_grad()
        (loss_of(first, x) + second(x).square().mean()).backward()
        return {**gradients(first), **gradients(second)}

    by_rank = run_mesh(2, 2, body)
    assert_same(by_rank)
    for name, _ in WIDE.named_parameters():
        assert relative_error(by_rank[0][name], by_rank[0][f"body.{name}"].double()) < 5e-6, name


# -- saved and loaded -------------------------------------------------------------------------


def save(model: nn.Module, session: og.Session) -> bytes:
    file = io.BytesIO()
    torch.save([model.state_dict(), session.state_dict()], file)
    return file.getvalue()


def load(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=True)


def steps(model: nn.Module, mesh: ThreadMesh, start: int, stop: int) -> None:
    for k in range(start, stop):
        model.zero_grad()
        loss_of(model, (k + 1) * BATCHES[mesh.number]).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.01)


@pytest.mark.parametrize(
    "label", covering(["dad", "rank-dad", "powersgd", "sparse", "sparse random"], quick=3)
)
def test_training_goes_on_to_the_bit(label):
    method = {**METHODS, **LOW_RANK}[label]

    def through(mesh):
        model = copy.deepcopy(WIDE)
        session = og.distribute(model, method, mesh=mesh)
        steps(model, mesh, 0, 3)
        saved = save(model, session)
        steps(model, mesh, 3, 6)
        return saved, model.state_dict()

    whole = run_mesh(2, 2, through)

    def resumed(mesh):
        model = copy.deepcopy(WIDE)
        session = og.distribute(model, method, mesh=mesh)
        weights, state = load(whole[mesh.number][0])
        model.load_state_dict(weights)
        session.load_state_dict(state)
        steps(model, mesh, 3, 6)
        return model.state_dict()

    assert_same([weights for _, weights in whole] + run_mesh(2, 2, resumed))


def test_states_of_another_number_of_sites():
    method = og.RankDAD(rank=2)

    def before(mesh):
        model = copy.deepcopy(WIDE)
        session = og.distribute(model, method, mesh=mesh)
        steps(model, mesh, 0, 3)
        return save(model, session)

    saved = [load(one) for one in run_mesh(2, 2, before)]

    def after(mesh):
        model = copy.deepcopy(WIDE)
        session = og.distribute(model, method, mesh=mesh)
        model.load_state_dict(saved[0][0])
        session.load_state_dict([state for _, state in saved[mesh.local :: 2]])
        steps(model, mesh, 3, 5)
        return model.state_dict()

    assert_same(run_mesh(1, 2, after))


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_state_of_another_local_rank_is_refused_by_all(wrong):
    def body(mesh):
        model = copy.deepcopy(WIDE)
        session = og.distribute(model, og.RankDAD(rank=2), mesh=mesh)
        steps(model, mesh, 0, 1)
        state = session.state_dict()
        if mesh.number == wrong:
            state["two levels"] = [1 - mesh.local, 2]
        with pytest.raises(ValueError, match="local rank"):
            session.load_state_dict(state)
        steps(model, mesh, 1, 2)  # nothing has changed

    run_mesh(2, 2, body)


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_state_that_some_ranks_cannot_load_is_refused_by_all(wrong):
    def body(mesh):
        model = copy.deepcopy(WIDE)
        session = og.distribute(model, og.RankDAD(rank=2), mesh=mesh)
        steps(model, mesh, 0, 1)
        state = session.state_dict()
        if mesh.number == wrong:
            state["method"] = "another"
        with pytest.raises(ValueError, match=r"another|could not take part"):
            session.load_state_dict(state)
        steps(model, mesh, 1, 2)

    run_mesh(2, 2, body)


# -- what is told -----------------------------------------------------------------------------


def test_coverage_and_stats_say_what_goes_between_sites():
    def body(mesh):
        model = copy.deepcopy(WIDE)
        session = og.distribute(model, og.DAD(), mesh=mesh)
        for _ in range(2):
            loss_of(model, BATCHES[mesh.number]).backward()
        lines = {line.parameter: line for line in session.coverage()}
        stats = session.stats()
        assert lines["0.weight"].travels == "factors"
        assert "pooled over 2 ranks, sent by local rank" in lines["0.weight"].why
        assert sum(layer.sent_bytes for layer in stats.layers.values()) <= stats.sent_bytes
        return {n: (line.travels, line.why) for n, line in lines.items()}, set(stats.layers)

    (first, own), (second, others), *_ = run_mesh(2, 2, body)
    assert first == second
    assert own
    assert others
    assert own.isdisjoint(others)
    assert own | others == {"0.weight", "2.weight", "4.weight"}


def test_recorders_tell_ranks_apart():
    def body(mesh):
        model, events = copy.deepcopy(WIDE), Events()
        og.distribute(model, og.RankDAD(rank=2), mesh=mesh, recorder=events)
        for _ in range(3):
            loss_of(model, BATCHES[mesh.number]).backward()
        assert {event.rank for event in events} == {mesh.number}
        assert {event.sites for event in events if isinstance(event, og.events.Run)} == {4}
        return {event.layer for event in events.layers}

    names = run_mesh(2, 2, body)
    assert names[0] | names[1] >= {"0.weight", "2.weight", "4.weight"}
    assert names[0].isdisjoint(names[1])


# -- refusals ---------------------------------------------------------------------------------


REFUSED: dict[str, tuple[nn.Module, Any, dict[str, Any], str]] = {
    "local steps by samples": (WIDE, og.LocalSteps(2), {"weighting": "samples"}, "count alike"),
    "own parts that step by themselves": (
        WIDE,
        og.LocalSteps(2, method=og.PerLayer({"0.*": og.Local(), "*": og.Dense()})),
        {},
        r"og.Local\(\) for '0.weight'",
    ),
    "joint": (
        WIDE,
        og.PerLayer({"0.*": og.Local(), "*": og.DAD()}, joint=True),
        {},
        "use joint=False",
    ),
    "mean buffers": (WIDE, og.LocalSteps(2), {"buffers": "mean"}, "each rank keeps its own"),
    "broadcast buffers": (
        WIDE,
        og.LocalSteps(2),
        {"buffers": "broadcast"},
        "each rank keeps its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_sites_of_one_rank(name):
    model, method, settings, match = REFUSED[name]

    def body(mesh):
        with pytest.raises(ValueError, match=f"^mesh= with .*{match}"):
            og.distribute(copy.deepcopy(model), method, mesh=mesh, **settings)

    run_mesh(1, 1, body)


# -- replicas that differ -----------------------------------------------------------------------


OWN_PART = og.PerLayer({"0.*": og.Local(), "*": og.Dense()})


def trained_apart(mesh, odd, method=None, **settings):
    """A session whose rank `odd` changes a weight after its second step, and its error."""
    model = copy.deepcopy(WIDE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    session = og.distribute(model, method or og.RankDAD(rank=2), mesh=mesh, **settings)
    told = ""
    for k in range(4):
        optimizer.zero_grad()
        try:
            loss_of(model, BATCHES[mesh.number]).backward()
        except og.DriftError as error:
            told = f"{error.sites} {error}"
            break
        optimizer.step()
        if k == 1 and mesh.number == odd:
            with torch.no_grad():
                model[2].weight[0, 0] += 1e-6
    return model, optimizer, session, told


@pytest.mark.parametrize("odd", [0, 1, 3, None])
def test_replicas_of_all_ranks_are_compared(odd):
    def body(mesh):
        *_, session, told = trained_apart(mesh, odd, verify_every=1)
        session.detach()
        return told

    told = run_mesh(2, 2, body)
    assert told == told[:1] * 4
    if odd is None:
        assert told[0] == ""
    else:
        who = "ranks 1, 2, 3 have" if odd == 0 else f"rank {odd} has"
        assert f"after step 3: {who} another '2.weight' than rank 0" in told[0]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_replicas_of_all_ranks_are_mended(odd):
    def body(mesh):
        model, optimizer, session, told = trained_apart(mesh, odd, verify_every=1, on_drift="mend")
        assert told == ""
        session.detach()
        momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        weights = {name: p.detach() for name, p in model.named_parameters()}
        return {**weights, **dict(enumerate(momenta))}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(run_mesh(2, 2, body))
    told = [str(one.message) for one in caught if "the replicas differ" in str(one.message)]
    assert len(told) == 4


@pytest.mark.parametrize("odd", [0, 1, 2, None])
def test_replicas_of_all_ranks_are_made_equal(odd):
    def body(mesh):
        model, optimizer, session, _ = trained_apart(mesh, odd)
        differed = session.make_equal(optimizer)
        assert not session.make_equal(optimizer)
        session.detach()
        return differed, {name: p.detach() for name, p in model.named_parameters()}

    differed, weights = zip(*run_mesh(2, 2, body), strict=True)
    assert differed == (odd is not None,) * 4
    assert_same(list(weights))


def test_parts_of_a_site_are_not_compared_with_those_of_others():
    def body(mesh):
        model, optimizer, session, told = trained_apart(mesh, None, OWN_PART, verify_every=1)
        assert told == ""
        before = model[0].weight.detach().clone()
        assert not session.make_equal(optimizer)
        session.detach()
        return torch.equal(before, model[0].weight), float(before.sum())

    kept, sums = zip(*run_mesh(2, 2, body), strict=True)
    assert all(kept)
    assert sums[0] == sums[1] != sums[2] == sums[3]


@pytest.mark.parametrize("names", [None, ("site",), ("dp", "local"), ("site", "local", "tp")])
def test_other_dimensions(names):
    mesh = ThreadMesh(0, 0, 1, {}, names)
    with pytest.raises(ValueError, match="needs 'site' and 'local'"):
        og.distribute(nn.Linear(2, 2), mesh=mesh)


def test_mesh_and_group():
    def body(mesh):
        with pytest.raises(ValueError, match="mesh= and group="):
            og.distribute(nn.Linear(2, 2), mesh=mesh, group=mesh.get_group("site"))

    run_mesh(1, 1, body)


@pytest.mark.parametrize("odd", [0, 1, 2, 3])
def test_ranks_that_differ_all_raise(odd):
    def body(mesh):
        method = og.DAD(always=mesh.number == odd)
        with pytest.raises(ValueError, match=r"do not agree|could not take part") as raised:
            og.distribute(copy.deepcopy(WIDE), method, mesh=mesh)
        return str(raised.value)

    assert all("DAD" in text for text in run_mesh(2, 2, body))


@pytest.mark.parametrize("odd", [0, 3])
def test_an_error_of_one_rank_reaches_all(odd):
    def body(mesh):
        model = copy.deepcopy(WIDE)
        if mesh.number == odd:
            model.requires_grad_(False)
        with pytest.raises(ValueError, match="no parameter that requires a gradient"):
            og.distribute(model, mesh=mesh)

    run_mesh(2, 2, body)
