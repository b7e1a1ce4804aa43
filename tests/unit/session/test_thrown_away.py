"""Gradients that the loop throws away: nothing of them comes back from error feedback."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples.signs import Signs
from torch import Tensor, nn
from torch.amp import GradScaler

import outergrad as og
from covering import covering
from loops import batch, loss_of, net
from outergrad import wire
from outergrad.linalg.outer import formed
from outergrad.step import tentative
from ranks import run_on_lasting_groups

SITES, STEPS = 2, 3
METHODS: dict[str, Any] = {
    "gather": og.RankDAD(rank=1),
    "a matrix": og.RankDAD(rank=1, error_feedback="dense"),
    "two_way": og.RankDAD(rank=1, reduce="two_way"),
    "all_reduce": og.RankDAD(rank=1, reduce="all_reduce"),
    "sides in turn": og.RankDAD(rank=1, reduce="alternate"),
    "vectors": og.RankDAD(rank=1, vectors=wire.Int4()),
    "budget": og.RankDAD(budget=1 / 8),
    "powersgd": og.PowerSGD(rank=1, min_ratio=1),
    "sparse": og.Sparse(density=0.1, always=True),
    "sparse, random": og.Sparse(density=0.1, select="random", always=True),
    "signs": Signs(),
    "per layer": og.PerLayer({"block.*": og.Sparse(density=0.1), "*": og.RankDAD(rank=1)}),
    "auto": og.Auto(among=[og.RankDAD(rank=1), og.Dense()]),
}
ALONE = ("gather", "two_way", "sparse", "signs", "per layer")
"""Whose messages depend on the gradient and on what was not sent alone."""


class Loop:
    """A training loop at one site, which takes down what it uses.

    Attributes:
        session: of the model.
        model: distributed.
        optimizer: which holds its parameters; it leaves the weights as they are.
        applied: the gradients that were used, added up.
        used: how often which step's gradient was among them.
    """

    def __init__(self, method: Any, rank: int, group: Any, **settings: Any) -> None:
        self.model, self._rank = net(), rank
        self.session = og.distribute(self.model, method, group=group, **settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.applied = {n: torch.zeros_like(p).double() for n, p in self.model.named_parameters()}
        self.used: dict[int, int] = {}
        self._number = 0

    def backward(self, factor: float = 1.0) -> int:
        """Of another batch each time."""
        self._number += 1
        (factor * loss_of(self.model, batch(self._rank, self._number))).backward()
        return self._number

    def use(self, *numbers: int) -> None:
        """What is in the gradients is used, and stems from these backward passes."""
        for number in numbers:
            self.used[number] = self.used.get(number, 0) + 1
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.applied[name] += p.grad

    def step(self, *numbers: int) -> None:
        self.use(*numbers)
        self.optimizer.step()


def owed_by(session: Any) -> dict[str, Tensor]:
    """What this site has not sent, of slots and of matrices, each place once."""
    found: dict[str, Tensor] = {}
    for compressor, units in session._exchange.compressors.items():
        places = {m.place: m for unit in units for m in (*unit.slots, *unit.matrices)}
        for slot in places.values():
            if (residual := compressor.residual(slot)) is not None:
                found[slot.weight] = found.get(slot.weight, 0) + formed(residual).double().flatten()
    return found


def attack(loop: Loop) -> None:
    """Adversarial training: gradients of the weights come along with those of the inputs."""
    loop.backward(5.0)
    loop.model.zero_grad()
    loop.backward(5.0)
    loop.model.zero_grad()
    loop.step(loop.backward())
    loop.model.zero_grad()


def attack_in_place(loop: Loop) -> None:
    """Gradients are set to zero, not to None."""
    loop.backward(5.0)
    loop.model.zero_grad(set_to_none=False)
    loop.step(loop.backward())
    loop.model.zero_grad(set_to_none=False)


def attack_past_the_counts(loop: Loop) -> None:
    """Gradients are set to zero through `.data` or numpy, which no count of changes tells of."""
    loop.backward(5.0)
    for p in loop.model.parameters():
        p.grad.data.zero_()
    loop.backward(5.0)
    for p in loop.model.parameters():
        p.grad.numpy().fill(0.0)
    loop.step(loop.backward())
    for p in loop.model.parameters():
        p.grad.data.zero_()


def attack_and_clip(loop: Loop) -> None:
    loop.backward(5.0)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.model.zero_grad()
    loop.step(loop.backward())
    loop.model.zero_grad()


def attack_with_accumulation(loop: Loop) -> None:
    """Two passes add up in `param.grad`, twice; the first two are thrown away together."""
    loop.backward(5.0)
    loop.backward(5.0)
    loop.model.zero_grad()
    first = loop.backward()
    loop.step(first, loop.backward())
    loop.model.zero_grad()


def attack_in_no_sync(loop: Loop) -> None:
    with loop.session.no_sync():
        loop.backward(5.0)
    loop.model.zero_grad()
    loop.step(loop.backward())
    loop.model.zero_grad()


def skip_what_is_large(loop: Loop) -> None:
    """A step is left out every time."""
    loop.optimizer.zero_grad()
    loop.backward(5.0)
    loop.optimizer.zero_grad()
    loop.step(loop.backward())


def plain(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.step(loop.backward())


def accumulate(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    first = loop.backward()
    loop.step(first, loop.backward())


def by_hand(loop: Loop) -> None:
    """An update without an optimizer, beside one that holds the parameters."""
    loop.use(loop.backward())
    with torch.no_grad():
        for p in loop.model.parameters():
            p.sub_(0.0 * p.grad)
            p.grad = None


def two_optimizers_of_all(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    number = loop.backward()
    if number == 1:
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    loop.step(number)


def sharpness_aware(loop: Loop) -> None:
    """The first gradient moves the weights (here by nothing), and is used so."""
    loop.use(loop.backward())
    with torch.no_grad():
        for p in loop.model.parameters():
            p.add_(0.0 * p.grad)
    loop.optimizer.zero_grad()
    loop.step(loop.backward())
    loop.optimizer.zero_grad()


LOOPS = [
    attack,
    attack_in_place,
    attack_past_the_counts,
    attack_and_clip,
    attack_with_accumulation,
    attack_in_no_sync,
    skip_what_is_large,
    plain,
    accumulate,
    by_hand,
    two_optimizers_of_all,
    sharpness_aware,
]


def sums(found: list[tuple[Loop, dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """What each site has applied, and what all have not sent, as parts of the mean."""
    names = found[0][0].applied
    owed = {n: sum(o[n].view_as(names[n]) for _, o in found if n in o) / SITES for n in names}
    return [{n: loop.applied[n] + owed[n] for n in names} for loop, _ in found]


def expected_of(used: dict[int, int]) -> dict[str, Tensor]:
    """The sum of the mean gradients of these passes, by autograd in float64."""
    model = net().double()
    for number, times in used.items():
        for site in range(SITES):
            (times / SITES * loss_of(model, batch(site, number).double())).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def assert_whole(method: Any, loop: Callable[[Loop], None], **settings: Any) -> None:
    """Applied and not sent are the gradients that were used, and no others."""

    def body(rank: int, group: Any) -> tuple[Loop, dict[str, Tensor]]:
        made = Loop(method, rank, group, **settings)
        for _ in range(STEPS):
            loop(made)
        made.session.state_dict()  # what was thrown away at last is known now
        owed = owed_by(made.session)
        made.session.detach()
        return made, owed

    found = run_on_lasting_groups(SITES, body)
    expected = expected_of(found[0][0].used)
    for whole in sums(found):
        for name, t in expected.items():
            error = ((whole[name] - t).norm() / t.norm()).item()
            assert error < 2e-4, (name, error)


@pytest.mark.parametrize(("method", "loop"), covering(METHODS, LOOPS, quick=6, every=3))
def test_only_what_was_used_is_owed(method, loop):
    assert_whole(method, loop)


@pytest.mark.usefixtures("large_matrices")  # what is not sent is kept in factors
@pytest.mark.parametrize("method", ALONE)
def test_the_next_gradient_is_that_of_a_loop_without_the_attack(method):
    def gradients(rank: int, group: Any, attacks: int) -> list[Tensor]:
        model, found = net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session = og.distribute(model, METHODS[method], group=group)
        for k in range(4):
            for j in range(attacks):
                (3 * loss_of(model, batch(rank, 100 + 10 * k + j))).backward()
                model.zero_grad()
            optimizer.zero_grad()
            loss_of(model, batch(rank, k)).backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            optimizer.step()
        session.detach()
        return found

    pairs = [run_on_lasting_groups(SITES, lambda r, g, n=n: gradients(r, g, n)) for n in (0, 2)]
    for without, attacked in zip(pairs[0][0], pairs[1][0], strict=True):
        assert ((without - attacked).norm() / without.norm()).item() < 1e-4


@pytest.mark.parametrize("method", ["gather", "all_reduce", "sparse"])
def test_a_loss_that_goes_through_another_model(method):
    """A generator's loss leaves gradients in the discriminator, which it throws away."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = net(), nn.Linear(40, 40, bias=False)

    def body(rank: int, group: Any) -> Any:
        model = Both()
        model.other.weight = nn.Parameter(torch.eye(40))
        one = torch.optim.SGD(model.one.parameters(), lr=0.0)
        other = torch.optim.SGD(model.other.parameters(), lr=0.0)
        session = og.distribute(model, METHODS[method], group=group)
        applied = {n: torch.zeros_like(p).double() for n, p in model.one.named_parameters()}
        for k in range(3):
            one.zero_grad()
            loss_of(model.one, batch(rank, k)).backward()
            for n, p in model.one.named_parameters():
                applied[n] += p.grad
            one.step()
            other.zero_grad()
            (7 * loss_of(model.one, model.other(batch(rank, 50 + k)))).backward()
            other.step()
        one.zero_grad()
        session.state_dict()
        owed = {n.removeprefix("one."): t for n, t in owed_by(session).items()}
        session.detach()
        return applied, owed

    found = run_on_lasting_groups(SITES, body)
    model = net().double()
    for k in range(3):
        for site in range(SITES):
            (loss_of(model, batch(site, k).double()) / SITES).backward()
    for applied, _ in found:
        for name, p in model.named_parameters():
            owed = sum(o[name].view_as(p) for _, o in found if name in o) / SITES
            assert ((applied[name] + owed - p.grad).norm() / p.grad.norm()).item() < 2e-4, name


@pytest.mark.parametrize("method", ["gather", "all_reduce", "sparse"])
def test_hooks_that_step_or_take_gradients_away_use_them(method):
    """An optimizer in backward, and a buffer that gradients are moved to."""

    def in_backward(loop: Loop) -> None:
        if not loop.used:
            optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in loop.model.parameters()}

            def step(p: nn.Parameter) -> None:
                name = next(n for n, q in loop.model.named_parameters() if q is p)
                loop.applied[name] += p.grad
                optimizers[p].step()
                optimizers[p].zero_grad()

            for p in loop.model.parameters():
                p.register_post_accumulate_grad_hook(step)
        number = loop.backward()
        loop.used[number] = 1

    def moved(loop: Loop) -> None:
        if not loop.used:

            def move(p: nn.Parameter) -> None:
                name = next(n for n, q in loop.model.named_parameters() if q is p)
                loop.applied[name] += p.grad
                p.grad = None

            for p in loop.model.parameters():
                p.register_post_accumulate_grad_hook(move)
        number = loop.backward()
        loop.used[number] = 1

    for loop in (in_backward, moved):
        assert_whole(METHODS[method], loop)


@pytest.mark.parametrize("method", ["gather", "all_reduce", "sparse"])
def test_without_an_optimizer_nobody_can_know_and_gradients_count(method):
    """As in a sum that is made by hand, or updates through `.data`."""

    def by_data(loop: Loop) -> None:
        loop.optimizer = None  # type: ignore[assignment]
        loop.use(loop.backward())
        for p in loop.model.parameters():
            p.data.sub_(0.0 * p.grad)
            p.grad = None

    assert_whole(METHODS[method], by_data)


def test_a_scaler_that_skips_a_step_throws_it_away():
    """An infinity, or a step that the loop leaves out: what was owed before is owed."""

    def body(rank: int, group: Any) -> Any:
        loop = Loop(og.RankDAD(rank=1), rank, group)
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=100)
        loop.step(loop.backward())
        loop.optimizer.zero_grad()
        before = {n: t.clone() for n, t in owed_by(loop.session).items()}
        scaler.scale(loss_of(loop.model, batch(rank, 9) * 1e38)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        loop.session.state_dict()
        after = owed_by(loop.session)
        loop.session.detach()
        return before, after

    for before, after in run_on_lasting_groups(SITES, body):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) for n in before)


def surgery(loop: Loop) -> None:
    """Gradients of tasks are taken out and combined by hand."""
    kept = []
    for _ in range(2):
        loop.optimizer.zero_grad()
        loop.backward()
        kept.append([p.grad.clone() for p in loop.model.parameters()])
    for p, *own in zip(loop.model.parameters(), *kept, strict=True):
        p.grad = torch.stack(own).sum(0)
    loop.optimizer.step()


@pytest.mark.parametrize("method", ["gather", "sparse"])
def test_gradients_that_are_combined_by_hand_are_warned_of(method, monkeypatch):
    def body(rank: int, group: Any) -> None:
        loop = Loop(METHODS[method], rank, group)
        for _ in range(3):
            surgery(loop)
        loop.session.detach()

    texts: list[str] = []
    monkeypatch.setattr(tentative, "warnings", SimpleNamespace(warn=lambda t, **_: texts.append(t)))
    run_on_lasting_groups(SITES, body)
    assert texts
    assert all("combined by hand" in text for text in texts)


def test_an_attack_is_not_taken_for_gradients_that_are_combined():
    def body(rank: int, group: Any) -> None:
        loop = Loop(METHODS["gather"], rank, group)
        for made in (attack, attack_and_clip, attack_in_place):
            made(loop)  # a warning would be an error
        loop.session.detach()

    run_on_lasting_groups(SITES, body)


def test_what_was_thrown_away_is_not_saved():
    def body(rank: int, group: Any) -> None:
        loop = Loop(METHODS["gather"], rank, group)
        loop.step(loop.backward())
        loop.optimizer.zero_grad()
        before = unsent(loop.session)
        loop.backward(5.0)
        loop.optimizer.zero_grad()
        after = unsent(loop.session)
        assert before
        assert before.keys() == after.keys()
        assert all(torch.equal(before[place], after[place]) for place in before)
        loop.session.detach()

    run_on_lasting_groups(SITES, body)


def unsent(session: og.Session) -> dict[str, Tensor]:
    """What a checkpoint has of it."""
    (state,) = session.state_dict()["exchanges"]
    memories = state["own"]["memories"]
    return {place: m["unsent"] for place, m in memories.items() if "unsent" in m}
