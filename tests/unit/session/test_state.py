"""What a session saves: training goes on to the bit, and nothing that is owed is lost."""

from __future__ import annotations

import copy
import io
from contextlib import suppress
from datetime import timedelta
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from covering import covering, rest_slow
from outergrad.methods.low_rank import settings as _settings
from outergrad.methods.low_rank.settings import Feedback, Reduce
from ranks import run_on_lasting_groups, try_ranks


@pytest.fixture(autouse=True)
def small(request, monkeypatch):
    """The matrices of the tests count as large, if a test does not want them small."""
    size = getattr(request, "param", 0)
    monkeypatch.setattr(_settings, "_SMALL", size)
    return size


REDUCES = [way for way in get_args(Reduce) if way != "auto"]
FEEDBACKS: list[Feedback] = [None, "factored", "dense", "auto"]


class Net(nn.Module):
    """A layer that pays as factors, one that does not, one whose weight the loss reaches too."""

    def __init__(self):
        super().__init__()
        self.few = nn.Linear(60, 50)
        self.norm = nn.BatchNorm1d(50)
        self.many = nn.Conv1d(1, 12, 9, stride=2)
        self.head = nn.Linear(12 * 21, 40)
        self.mixed = nn.Linear(40, 30)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.few(x)).tanh()
        y = self.head(self.many(hidden.unsqueeze(1)).tanh().flatten(1)).tanh()
        return self.mixed(y).square().mean() + 1e-2 * self.mixed.weight.square().mean()


class Site:
    """A model, its optimizer and its session."""

    def __init__(self, method: Any, rank: int, group: Any, model: type[nn.Module] = Net):
        torch.manual_seed(0)
        self.rank, self.model = rank, model()
        self.session = og.distribute(self.model, method, group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, number: int, rows: int | None = None) -> None:
        rows = 20 + self.rank + number % 2 if rows is None else rows
        self.optimizer.zero_grad()
        self.model(batch(self.rank, number, rows)).backward()
        self.optimizer.step()

    def steps(self, start: int, stop: int) -> Site:
        for number in range(start, stop):
            self.step(number)
        return self

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = (self.model, self.optimizer, self.session)
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> Site:
        parts = (self.model, self.optimizer, self.session)
        for part, state in zip(
            parts, torch.load(io.BytesIO(saved), weights_only=True), strict=True
        ):
            part.load_state_dict(state)
        return self


def batch(rank: int, step: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 60, generator=generator) * torch.arange(1, 61) ** -0.8


def assert_bit_equal(model: nn.Module, other: nn.Module) -> None:
    for (name, t), u in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert t.equal(u), name


def interrupted(method: Any, sites: int) -> None:
    """Trains to step 7 at once, and with an end and a new beginning after step 4."""

    def body(rank, group):
        whole = Site(method, rank, group).steps(0, 4)
        saved, step = whole.save(), whole.session.stats().step
        whole.steps(4, 7)
        again = Site(method, rank, group).load(saved)
        assert again.session.stats().step == step
        again.steps(4, 7)
        assert again.session.stats().step == whole.session.stats().step
        assert_bit_equal(whole.model, again.model)

    run_on_lasting_groups(sites, body)


@pytest.mark.parametrize(
    ("reduce", "feedback", "rank_and_tolerance"),
    covering(REDUCES, FEEDBACKS, [(3, 0.0), (12, 0.6)], quick=8, every=4),
)
def test_training_goes_on_to_the_bit(reduce, feedback, rank_and_tolerance):
    rank, tolerance = rank_and_tolerance
    method = og.RankDAD(rank=rank, reduce=reduce, error_feedback=feedback, tolerance=tolerance)
    interrupted(method, sites=3)


@pytest.mark.parametrize("reduce", REDUCES)
def test_an_adapted_rank_is_saved(reduce):
    state = session_states(trained(og.RankDAD(rank=12, reduce=reduce, tolerance=0.6), 3))[0]
    common = state["exchanges"][0]["common"]
    ranks = list(common["columns"].values()) + [min(n) for n in common["sent_rows"].values()]
    assert 1 <= min(ranks) < 12


OTHERS = {
    "solver": og.RankDAD(rank=3, reduce="gather", solver="subspace_iteration"),
    "bf16": og.RankDAD(rank=3, wire=og.wire.BF16()),
    "codecs": og.RankDAD(rank=3, wire=(og.wire.TopK(0.2), og.wire.Int8())),
    "powersgd": og.PowerSGD(rank=2, min_ratio=1.0),
    "sparse": og.Sparse(density=0.05, momentum=0.9, warmup=6),
    "sparse blocks": og.Sparse(density=0.1, select="blocks", wire=og.wire.Int8()),
    "sparse random": og.Sparse(density=0.05, select="random", warmup=6),
    "sparse signs": og.Sparse(
        density=0.3, select="random_blocks", wire=og.wire.Sign(), vectors=og.wire.Int4()
    ),
    "dad": og.DAD(),
    "dad forced": og.DAD(always=True),
    "dense": og.Dense(),
}


@pytest.mark.parametrize(
    ("method", "sites", "small"),
    covering(OTHERS, [1, 2], {"large": 0, "small": 50_000}, quick=4, every=2),
    indirect=["small"],
)
def test_every_method_goes_on_to_the_bit(method, sites, small):
    interrupted(method, sites)


@pytest.mark.parametrize(
    ("reduce", "rows", "small"),
    covering(REDUCES, [8, 400], {"large": 0, "small": 50_000}, quick=4, every=2),
    indirect=["small"],
)
def test_what_was_tapped_is_tapped_again(reduce, rows, small):
    """With few rows the products come from factors, with many from the formed gradient."""
    method = og.RankDAD(rank=6, reduce=reduce)

    def body(rank, group):
        whole = Site(method, rank, group)
        for number in range(3):
            whole.step(number, rows)
        saved = whole.save()
        again = Site(method, rank, group).load(saved)
        for site in (whole, again):
            site.step(3, rows)
        assert_bit_equal(whole.model, again.model)
        return again.session.state_dict()["tapped"]

    tapped = run_on_lasting_groups(2, body)[0]
    assert tapped["few.weight"] == (rows == 8 and not small)


def test_a_running_session_goes_back_to_what_it_saved():
    method = og.RankDAD(rank=3, tolerance=0.2)

    def body(rank, group):
        site = Site(method, rank, group).steps(0, 3)
        saved = site.save()
        first = copy.deepcopy(site.steps(3, 6).model)
        site.load(saved).steps(3, 6)
        assert_bit_equal(site.model, first)

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize("feedback", FEEDBACKS)
@pytest.mark.parametrize("reduce", REDUCES)
def test_what_is_remembered_is_laid_out_as_what_is_loaded(reduce, feedback):
    """Products of the same numbers may round otherwise in another layout."""
    method = og.RankDAD(rank=3, reduce=reduce, error_feedback=feedback)

    def body(rank, group):
        whole = Site(method, rank, group).steps(0, 2)
        again = Site(method, rank, group).load(whole.save())
        whole, again = (
            tensors(site.session._exchange.compressors.states()[0]) for site in (whole, again)
        )
        for name, tensor in whole.items():
            assert tensor.stride() == again[name].stride(), name
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name

    run_on_lasting_groups(2, body)


def test_a_state_is_plain_and_its_own():
    """Small tensors of their own, that a further step does not change."""

    def body(rank, group):
        site = Site(og.RankDAD(rank=3, reduce="gather"), rank, group).steps(0, 3)
        state = site.session.state_dict()
        before = copy.deepcopy(state)
        site.steps(3, 5)
        return state, before, site.session.state_dict()

    state, before, later = run_on_lasting_groups(2, body)[0]
    for name, tensor in tensors(state).items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        assert tensor.equal(tensors(before)[name]), name
        assert not tensor.equal(tensors(later)[name]), name
    assert {"few.weight", "head.weight"} <= set(state["exchanges"][0]["own"]["memories"])


def tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        found = [tensors(item, f"{name}/{key}") for key, item in value.items()]
        return {key: tensor for part in found for key, tensor in part.items()}
    assert isinstance(value, bool | int | str) or all(
        isinstance(item, bool | int | str) for item in value
    )
    return {}


def owed(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What the mean gradient still lacks, per place."""
    total: dict[str, Tensor] = {}
    for state in states:
        for name, memory in state["exchanges"][0]["own"]["memories"].items():
            total[name] = total.get(name, torch.zeros(())) + residual(memory) / len(states)
    return total


def residual(memory: dict[str, Tensor]) -> Tensor:
    if "unsent_deltas" in memory:
        return memory["unsent_deltas"].double().mT @ memory["unsent_activations"].double()
    return memory.get("unsent", torch.zeros(())).double()


def trained(method: Any, sites: int, steps: int = 3) -> list[bytes]:
    def body(rank, group):
        return Site(method, rank, group).steps(0, steps).save()

    return run_on_lasting_groups(sites, body)


def session_states(saved: list[bytes]) -> list[dict[str, Any]]:
    return [torch.load(io.BytesIO(file), weights_only=True)[2] for file in saved]


NUMBERS = [(4, 2), (3, 2), (2, 3), (1, 2), (2, 4), (2, 1)]


@pytest.mark.parametrize(
    ("reduce", "feedback", "numbers"),
    covering([*REDUCES, "auto"], ["factored", "dense"], NUMBERS, quick=8, every=4),
)
def test_what_is_owed_is_shared_out(reduce, feedback, numbers):
    """Over more and over fewer sites, and training goes on."""
    before, after = numbers
    method = og.RankDAD(rank=3, reduce=reduce, error_feedback=feedback, tolerance=0.1)
    states = session_states(trained(method, before))

    def body(rank, group):
        site = Site(method, rank, group)
        site.session.load_state_dict(states)
        found = site.session.state_dict()
        assert found["step"] == states[0]["step"]
        site.steps(3, 6)
        return found, site.model

    found, models = zip(*run_on_lasting_groups(after, body), strict=True)
    expected, shared = owed(states), owed(list(found))
    assert expected.keys() == shared.keys()
    for name, total in expected.items():
        torch.testing.assert_close(shared[name], total, rtol=1e-5, atol=1e-9, msg=name)
    for other in models[1:]:
        for p, q in zip(models[0].parameters(), other.parameters(), strict=True):
            assert p.equal(q)


SPARSE = {
    "sparse": og.Sparse(density=0.05, momentum=0.9, warmup=6),
    "random": og.Sparse(density=0.05, select="random", warmup=6),
}


@pytest.mark.parametrize(
    ("name", "numbers"), covering(SPARSE.keys(), [n for n in NUMBERS if n[0] > 1], quick=4)
)
def test_entries_and_momentum_that_are_owed_are_shared_out(name, numbers):
    """The places of random entries stay the same on all sites, and the warm-up goes on."""
    before, after = numbers
    states = session_states(trained(SPARSE[name], before))

    def body(rank, group):
        site = Site(SPARSE[name], rank, group)
        site.session.load_state_dict(states)
        found = site.session.state_dict()
        assert found["exchanges"][0]["common"] == {"sparse": {"steps": 3}}
        site.steps(3, 6)
        return found, site.model

    found, models = zip(*run_on_lasting_groups(after, body), strict=True)
    for key in ("unsent", "unsent_velocity"):
        expected, shared = total_of(states, key), total_of(list(found), key)
        assert expected.keys() == shared.keys()
        assert bool(expected) == (key == "unsent" or name == "sparse")
        for place, total in expected.items():
            torch.testing.assert_close(shared[place], total, rtol=1e-5, atol=1e-9, msg=place)
    for other in models[1:]:
        assert_bit_equal(models[0], other)


def total_of(states: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    """The mean over the sites of what is remembered under one name, per place."""
    total: dict[str, Tensor] = {}
    for state in states:
        for place, memory in state["exchanges"][0]["own"]["memories"].items():
            if key in memory:
                part = memory[key].double() / len(states)
                total[place] = total.get(place, torch.zeros(())) + part
    return total


def test_sketches_begin_alike_even_after_triplets():
    """As where "auto" takes another way for another number of sites."""
    states = session_states(trained(og.RankDAD(rank=3, reduce="gather"), 2))
    method = og.RankDAD(rank=3, reduce="all_reduce")
    for state in states:
        state["method"] = repr(method)

    def body(rank, group):
        site = Site(method, rank, group)
        site.session.load_state_dict(states)
        return site.session.state_dict()["exchanges"][0]["own"]["memories"]

    first, *others = run_on_lasting_groups(3, body)
    for other in others:
        assert all(other[name]["start"].equal(first[name]["start"]) for name in first)


@pytest.mark.parametrize("way", ["gather", "two_way", "all_reduce"])
def test_what_was_chosen_by_the_link_stays_chosen(way):
    """At the same number of sites; it is measured anew for another."""
    states = session_states(trained(og.RankDAD(rank=3), 3))
    for state in states:
        state["exchanges"][0]["common"]["way"] = {"low rank": way}

    def body(rank, group):
        site = Site(og.RankDAD(rank=3), rank, group)
        site.session.load_state_dict(states)
        site.steps(3, 5)
        return site.session.state_dict()["exchanges"][0]["common"]["way"]

    assert run_on_lasting_groups(3, body) == [{"low rank": way}] * 3


@pytest.mark.parametrize("reduce", rest_slow(REDUCES, REDUCES[:1]))
def test_a_list_of_the_same_length_is_each_its_own(reduce):
    method = og.RankDAD(rank=3, reduce=reduce, tolerance=0.2)
    saved = trained(method, 3)
    states = session_states(saved)

    def body(rank, group):
        alone, listed = (Site(method, rank, group).load(saved[rank]) for _ in range(2))
        listed.session.load_state_dict(states)
        assert_bit_equal(alone.steps(3, 6).model, listed.steps(3, 6).model)

    run_on_lasting_groups(3, body)


def test_a_step_that_raised_is_ended_first():
    """By saving and by loading; what was saved before it is as if it had not been."""
    method = og.RankDAD(rank=3)

    def stumble(site):
        spoil = site.model.few.register_forward_hook(lambda m, x, y: spoiled(y, site.rank == 1))
        with spoil, suppress(og.StepDiscardedError, ZeroDivisionError):
            site.model(batch(site.rank, 9, 20)).backward()

    def body(rank, group):
        site = Site(method, rank, group).steps(0, 3)
        saved = site.save()
        smooth = copy.deepcopy(Site(method, rank, group).load(saved).steps(3, 5).model)
        stumble(site)
        assert site.session.state_dict()["step"] == 4
        stumble(site)
        site.load(saved).steps(3, 5)
        for p, q in zip(site.model.parameters(), smooth.parameters(), strict=True):
            assert p.equal(q)

    run_on_lasting_groups(2, body)


def spoiled(y: Tensor, here: bool) -> None:
    if here:
        y.register_hook(fail)


def fail(_gradient: Tensor) -> None:
    raise ZeroDivisionError


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(40, 31)


METHOD = og.RankDAD(rank=3)


def refused(mistake: Any, sites: int = 2, method: Any = METHOD, model: Any = Net) -> list[str]:
    """What the sites say when they load mistake(states, rank)."""
    states = session_states(trained(METHOD, 2, steps=2))

    def body(rank, group):
        site = Site(method, rank, group, model)
        before = site.session.state_dict()
        with pytest.raises(ValueError, match=r"state|step") as error:
            site.session.load_state_dict(mistake(copy.deepcopy(states), rank))
        assert tensors(before).keys() == tensors(site.session.state_dict()).keys()
        assert site.session.stats().step == 0
        site.steps(0, 1)
        return str(error.value)

    return run_on_lasting_groups(sites, body)


def test_states_of_another_number_of_sites_come_as_a_list():
    for message in refused(lambda states, rank: states[0], sites=3):
        assert "one of 2 sites, now there are 3: pass a list" in message


def test_a_state_is_loaded_by_its_own_site():
    for message in refused(lambda states, rank: states[1 - rank]):
        assert "load what this site saved" in message


def test_the_list_is_in_the_order_of_ranks():
    for message in refused(lambda states, rank: states[::-1], sites=3):
        assert "in the order of their ranks" in message


def test_one_site_with_a_wrong_state_stops_all():
    ours, others = refused(lambda states, rank: states[0])[::-1]
    assert "the state is of rank 0, and site 1 has rank 1" in ours
    assert others == f"site 1 could not take part: {ours}"


def test_another_method_is_named():
    for message in refused(lambda states, rank: states[rank], method=og.RankDAD(rank=4)):
        assert "RankDAD(rank=3" in message
        assert "RankDAD(rank=4" in message


def test_another_model_is_named():
    for message in refused(lambda states, rank: states[rank], model=Wider):
        assert "parameter 'mixed.weight' was [30, 40] and is [31, 40]" in message


@pytest.mark.parametrize("wrong", [{"version": 99}, {}, [], None])
def test_another_version_is_named(wrong):
    for message in refused(lambda states, rank: wrong):
        assert "session.state_dict()" in message or "empty" in message


def test_states_are_of_one_step():
    def later(states, rank):
        states[1]["step"] += 1
        return states

    for message in refused(later, sites=3):
        assert "after step 3, that of rank 0 after step 2" in message
    first, second = refused(lambda states, rank: later(states, rank)[rank])
    assert first == second
    assert "site 1 has 'step: 3' where site 0 has 'step: 2'; load on every site" in first


def test_a_session_that_ended_loads_nothing():
    def body(rank, group):
        site = Site(og.DAD(), rank, group)
        state = site.session.state_dict()
        site.session.detach()
        with pytest.raises(RuntimeError, match="attached"):
            site.session.load_state_dict(state)

    run_on_lasting_groups(1, body)


def test_a_site_that_lost_the_others_saves_nothing():
    """What it has applied of the last step and what the others have cannot be known."""

    def body(rank, group):
        site = Site(METHOD, rank, group).steps(0, 2)
        if rank == 1:
            return
        with pytest.raises(RuntimeError, match="lost site 1"):
            site.step(2)
        with pytest.raises(RuntimeError, match="lost site 1"):
            site.session.state_dict()

    assert try_ranks(2, body, timedelta(seconds=2)) == [None, None]
