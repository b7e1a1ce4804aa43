"""Methods that change while a model trains: nothing of a gradient is lost or counted twice."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import Boom, mlp, relative_error
from covering import covering
from meshes import ThreadMesh, run_mesh
from ranks import run_on_lasting_groups
from watched import owed_by

START = mlp(60, 80, 70, 10)
ROWS = torch.randn(4, 16, 60, generator=torch.Generator().manual_seed(2))
METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(),
    "dad forced": og.DAD(always=True),
    "rank-dad": og.RankDAD(rank=2),
    "rank-dad, dense memory": og.RankDAD(rank=2, error_feedback="dense"),
    "rank-dad all_reduce": og.RankDAD(rank=3, reduce="all_reduce"),
    "rank-dad two_way": og.RankDAD(rank=3, reduce="two_way"),
    "rank-dad alternate": og.RankDAD(rank=2, reduce="alternate"),
    "powersgd": og.PowerSGD(rank=1),
    "sparse": og.Sparse(density=0.03),
    "sparse random": og.Sparse(density=0.05, select="random"),
    "per layer": og.PerLayer({"2.*": og.Sparse(density=0.1), "*": og.RankDAD(rank=1)}),
}

REMEMBERING = ("rank-dad", "rank-dad all_reduce", "sparse", "per layer")


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) ** 2).mean()


def batch(number: int, step: int) -> Tensor:
    return (1 + step % 3) * ROWS[number][: 10 + 3 * (step % 2)]


class Account:
    """What became of a site's gradients: those that it had, and what was applied."""

    def __init__(self) -> None:
        self.had = {name: torch.zeros_like(p.double()) for name, p in START.named_parameters()}
        self.applied = copy.deepcopy(self.had)
        self._double = copy.deepcopy(START).double()

    def book(self, model: nn.Module, x: Tensor) -> None:
        """Of a step that counts; of the gradients of one batch."""
        self._double.zero_grad()
        loss_of(self._double, x.double()).backward()
        for name, p in self._double.named_parameters():
            self.had[name] += p.grad
            self.applied[name] += model.get_parameter(name).grad


def assert_balanced(found: Sequence[tuple[Account, dict[str, Tensor]]]) -> None:
    """Applied everywhere, and owed by some site, is what all had."""
    sites = len(found)
    for name, applied in found[0][0].applied.items():
        assert all(torch.equal(account.applied[name], applied) for account, _ in found), name
        whole = sites * applied + sum(owing.get(name, 0) for _, owing in found)
        assert relative_error(whole, sum(account.had[name] for account, _ in found)) < 1e-6, name


def train(method: Any, sites: int, steps: int) -> None:
    def body(rank: int, group: Any) -> tuple[Account, dict[str, Tensor]]:
        model, account = copy.deepcopy(START), Account()
        session = og.distribute(model, method, group=group)
        for step in range(steps):
            model.zero_grad()
            loss_of(model, x := batch(rank, step)).backward()
            account.book(model, x)
        found = owed_by(session)
        session.detach()
        return account, found

    assert_balanced(run_on_lasting_groups(sites, body))


@pytest.mark.parametrize(
    ("first", "second"),
    covering({name: METHODS[name] for name in REMEMBERING}, METHODS, quick=6, every=3),
)
def test_nothing_is_lost_from_one_method_to_another(first, second):
    train(og.Schedule({0: first, 4: second}), 2, 8)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_in_any_order(seed):
    rng, step = random.Random(seed), 0
    methods = {0: rng.choice(list(METHODS.values()))}
    for _ in range(7):
        step += rng.randint(1, 3)
        methods[step] = rng.choice(list(METHODS.values()))
    train(og.Schedule(methods), 2 + seed % 2, step + 3)


def test_what_a_method_without_a_memory_cannot_take_over_travels_once():
    """Dense for one step, of which the table tells; exact from then on."""

    def body(rank: int, group: Any) -> None:
        model, double = copy.deepcopy(START), copy.deepcopy(START).double()
        method = og.Schedule({0: og.RankDAD(rank=1), 3: og.DAD(always=True)})
        session = og.distribute(model, method, group=group)
        for step in range(6):
            model.zero_grad()
            double.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            for site in range(2):
                (loss_of(double, batch(site, step).double()) / 2).backward()
            told = str(session.coverage())
            assert ("had not sent" in told) == (step == 3), told
            errors = [
                relative_error(p.grad, double.get_parameter(name).grad)
                for name, p in model.named_parameters()
            ]
            assert (max(errors) < 5e-6) == (step > 3), (step, errors)
        session.detach()

    run_on_lasting_groups(2, body)


CHANGES = {
    "taken over": {0: METHODS["sparse"], 3: METHODS["rank-dad"]},
    "sent once": {0: METHODS["rank-dad"], 3: METHODS["dad"]},
    "back": {0: METHODS["rank-dad"], 3: METHODS["sparse"], 5: METHODS["rank-dad"]},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("failing", [2, 3, 4])
def test_a_step_that_does_not_count_changes_nothing(name, failing):
    """Before the change, in its first step, and behind it."""

    def body(rank: int, group: Any) -> tuple[Account, dict[str, Tensor]]:
        model, account = copy.deepcopy(START), Account()
        session = og.distribute(model, og.Schedule(CHANGES[name]), group=group)
        for step in range(8):
            x = batch(rank, step)
            model.zero_grad()
            if step == failing:
                loss = loss_of(model[2:], Boom.apply(model[:2](x), rank == 1))
                with pytest.raises((ArithmeticError, og.StepDiscardedError)):
                    loss.backward()
                continue
            loss_of(model, x).backward()
            account.book(model, x)
        found = owed_by(session)
        session.detach()
        return account, found

    assert_balanced(run_on_lasting_groups(2, body))


@pytest.mark.parametrize(("name", "saved_after"), covering(list(CHANGES), [2, 3, 4, 6], quick=3))
def test_resume_to_the_bit(name, saved_after):
    method = og.Schedule(CHANGES[name])

    def body(rank: int, group: Any) -> list[dict[str, Tensor]]:
        model, found, state = copy.deepcopy(START), [], {}
        session = og.distribute(model, method, group=group)
        for step in range(9):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            found.append({n: p.grad.clone() for n, p in model.named_parameters()})
            if step + 1 == saved_after:
                state = session.state_dict()
        session.detach()
        session = og.distribute(model, method, group=group)
        session.load_state_dict(state)
        for step in range(saved_after, 9):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            for n, p in model.named_parameters():
                assert torch.equal(p.grad, found[step][n]), (step, n)
        session.detach()
        return found

    run_on_lasting_groups(2, body)


def test_what_is_owed_goes_to_another_number_of_sites():
    """Three sites that owe when they are saved, in the middle of a change, go on as two."""
    method = og.Schedule({0: og.RankDAD(rank=1), 3: og.DAD()})
    steps = 3

    def before(rank: int, group: Any) -> tuple[Account, dict[str, Tensor], Any]:
        model, account = copy.deepcopy(START), Account()
        session = og.distribute(model, method, group=group)
        for step in range(steps):
            model.zero_grad()
            loss_of(model, x := batch(rank, step)).backward()
            account.book(model, x)
        saved = account, owed_by(session), session.state_dict()
        session.detach()
        return saved

    three = run_on_lasting_groups(3, before)

    def after(rank: int, group: Any) -> Account:
        model, account = copy.deepcopy(START), Account()
        session = og.distribute(model, method, group=group)
        session.load_state_dict([state for *_, state in three])
        loss_of(model, x := batch(rank, steps)).backward()
        account.book(model, x)
        assert not owed_by(session)
        session.detach()
        return account

    two = run_on_lasting_groups(2, after)
    for name, applied in two[0].applied.items():
        mean = sum(account.had[name] for account in two) / 2
        owing = [found[name] for _, found, _ in three if name in found]
        assert relative_error(applied, mean + sum(owing) / 3) < 1e-6, name
    assert len(owing_of_first(three)) == 3


def owing_of_first(found: Sequence[tuple[Account, dict[str, Tensor], Any]]) -> list[Tensor]:
    return [owing["0.weight"] for _, owing, _ in found if owing["0.weight"].any()]


@pytest.mark.parametrize("name", CHANGES)
def test_between_sites_of_several_ranks(name):
    def body(mesh: ThreadMesh) -> tuple[Account, dict[str, Tensor]]:
        model, account = copy.deepcopy(START), Account()
        session = og.distribute(model, og.Schedule(CHANGES[name]), mesh=mesh)
        for step in range(8):
            model.zero_grad()
            loss_of(model, x := batch(mesh.number, step)).backward()
            account.book(model, x)
        found = owed_by(session)
        session.detach()
        return account, found

    found = run_mesh(2, 2, body)
    for name_, applied in found[0][0].applied.items():
        had = sum(account.had[name_] for account, _ in found) / 4
        owing = sum(owing.get(name_, torch.zeros_like(had)) for _, owing in found) / 2
        assert relative_error(applied + owing, had) < 1e-6, name_


@pytest.mark.parametrize(
    ("methods", "error", "said"),
    [
        ({}, ValueError, "from step 0 on"),
        ({1: og.DAD()}, ValueError, "from step 0 on"),
        ({0: og.DAD(), -1: og.Dense()}, ValueError, "from step 0 on"),
        ({0: og.DAD(), 3: "dense"}, TypeError, "step 3: 'dense' is no method"),
        ({0: og.LocalSteps(2)}, TypeError, "step 0: .* is no method of a part"),
        ({0: og.Schedule({0: og.DAD()})}, TypeError, "is no method of a part"),
    ],
    ids=str,
)
def test_impossible_schedules(methods, error, said):
    with pytest.raises(error, match=said) as caught:
        og.Schedule(methods)
    assert "\n" not in str(caught.value)


LOCAL = og.PerLayer({"0.*": og.Local(), "*": og.DAD()})
PARTIAL = og.PerLayer({"0.*": og.DAD()})
TORN = og.PerLayer({"2.weight": og.RankDAD(), "*": og.DAD()})
REFUSED = {
    "local later": ({0: og.DAD(), 3: LOCAL}, "'0.weight' is og.Local.. in some steps only"),
    "every": ({0: og.DAD(), 3: og.DAD(every=2)}, "'0.weight' has methods with different every="),
    "torn apart": ({0: og.DAD(), 3: TORN}, "but they travel together"),
    "no pattern": (
        {0: og.DAD(), 3: og.PerLayer({"0.*": og.DAD()})},
        "no pattern matches '2.weight'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_change_is_refused(name):
    methods, said = REFUSED[name]

    def body(rank: int, group: Any) -> None:
        with pytest.raises(ValueError, match=said):
            og.distribute(copy.deepcopy(START), og.Schedule(methods), group=group)

    run_on_lasting_groups(2, body)
