"""Tensors of subclasses: factors where the class only annotates, else the true reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outergrad as og
from cases import relative_error
from covering import covering
from outergrad.capture.untappable import Annotating, plain
from ranks import run_on_lasting_groups

SITES, STEPS = 2, 3
EXACT: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(),
    "dad, raw rows": og.DAD(reveal="activations"),
    "gather": og.RankDAD(rank=1000),
    "two_way": og.RankDAD(rank=1000, reduce="two_way"),
    "all_reduce": og.RankDAD(rank=1000, reduce="all_reduce"),
    "sparse": og.Sparse(density=1.0, always=True),
    "edad": og.EDAD(always=True),
    "auto": og.Auto(),
}
FACTORS = ("dad", "dad, raw rows")


class Plain(Tensor):
    """With Tensor's own `__torch_function__`: what comes out is of the class again."""


class Carrying(Tensor):
    """Carries where a picture lies, and passes that on, as MONAI's `MetaTensor` does."""

    where: Any = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, cls):
            found.where = next((a.where for a in args if isinstance(a, cls)), None)
        return found


class Forgetting(Tensor):
    """What comes out is a plain tensor, as of torchvision's pictures."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Doubling(Tensor):
    """Computes linear layers in a way of its own."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        own = func in (nn.functional.linear, nn.functional.conv2d)
        return 2 * found if own else found


def _carrying(x: Tensor) -> Tensor:
    made = x.as_subclass(Carrying)
    made.where = (1, 2, 3)
    return made


def _meta_tensor(x: Tensor) -> Tensor:
    monai = pytest.importorskip("monai.data", reason="monai is not installed")
    return monai.MetaTensor(x, meta={"filename": "a.nii"})


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x.as_subclass(Plain),
    "carrying": _carrying,
    "forgetting": lambda x: x.as_subclass(Forgetting),
    "MetaTensor": _meta_tensor,
}


class Net(nn.Module):
    """Convolutions and linear layers, as of a classifier of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 16, 3, stride=2)
        self.first, self.last = nn.Linear(16 * 9, 200), nn.Linear(200, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.conv(x).relu().flatten(1)).relu())


torch.manual_seed(0)
NET = Net().double()


def pictures(site: int) -> Tensor:
    generator = torch.Generator().manual_seed(site)
    return torch.randn(3 + site, 2, 7, 7, generator=generator, dtype=torch.float64)


def loss(y: Tensor) -> Tensor:
    return (y * y).mean() + y.sin().mean()


def pooled(make: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Tensor]:
    m = copy.deepcopy(NET)
    for site in range(SITES):
        (plain(loss(m(make(pictures(site))))) / SITES).backward()
    return {name: p.grad for name, p in m.named_parameters() if p.grad is not None}


def train(
    method: Any, make: Callable[[Tensor], Tensor], forward: Any = None
) -> list[tuple[dict[str, Tensor], dict[str, Any], int, Any]]:
    def body(site, group):
        m = copy.deepcopy(NET)
        session = og.distribute(m, method, group=group)
        for _ in range(STEPS):
            m.zero_grad()
            y = m(make(pictures(site))) if forward is None else forward(m, make(pictures(site)))
            loss(y).backward()
        found = {name: p.grad.clone() for name, p in m.named_parameters() if p.grad is not None}
        lines = {line.parameter: line for line in session.coverage()}
        sent = session.stats().sent_bytes
        session.detach()
        return found, lines, sent, y

    return run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize(("kind", "method"), covering(list(KINDS), list(EXACT), quick=4))
def test_gradients_bytes_and_coverage_are_those_of_plain_tensors(kind, method):
    _ = KINDS[kind](torch.ones(1))
    expected, usual = pooled(), train(EXACT[method], lambda x: x)
    found = train(EXACT[method], KINDS[kind])
    for (gradients, lines, sent, _), (_, plain_lines, plain_sent, _) in zip(
        found, usual, strict=True
    ):
        for name, gradient in expected.items():
            assert relative_error(gradients[name], gradient) < 1e-10, name
            assert type(gradients[name]) is Tensor
        if method != "auto":  # which goes by the time of steps
            assert sent == plain_sent
            assert lines == plain_lines
        if method in FACTORS:
            assert {n: lines[f"{n}.weight"].travels for n in ("conv", "first", "last")} == {
                "conv": "dense",  # 27 rows of 36 positions: the matrix is smaller
                "first": "factors",
                "last": "factors",
            }


def test_what_the_class_carries_comes_out():
    for _, _, _, y in train(og.DAD(), _carrying):
        assert type(y) is Carrying
        assert y.where == (1, 2, 3)


@pytest.mark.parametrize("kind", ["carrying", "MetaTensor"])
def test_under_checkpoints(kind):
    _ = KINDS[kind](torch.ones(1))

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(m, x, use_reentrant=False)

    for gradients, lines, *_ in train(og.DAD(), KINDS[kind], forward):
        assert lines["first.weight"].travels == "factors"
        for name, gradient in pooled().items():
            assert relative_error(gradients[name], gradient) < 1e-10, name


def test_coverage_says_how_many_rows_a_convolution_has():
    """Batch times positions, also where that is too many."""
    for site, (_, lines, *_) in enumerate(train(og.DAD(), _carrying)):
        assert lines["conv.weight"].why.startswith(f"{9 * (3 + site)} rows here; ")


@pytest.mark.parametrize("method", ["dad", "gather"])
def test_a_class_that_computes_in_its_own_way_travels_dense_and_coverage_says_why(method):
    def make(x: Tensor) -> Tensor:
        return x.as_subclass(Doubling)

    expected = pooled(make)
    for gradients, lines, *_ in train(EXACT[method], make):
        for name, gradient in expected.items():
            assert relative_error(gradients[name], gradient) < 1e-10, name
        for name in ("conv", "first", "last"):
            why = lines[f"{name}.weight"].why
            if method == "dad":
                assert why == (
                    "not tapped here: what it is called with is a Doubling, a subclass that "
                    "computes in its own way"
                )


def test_one_site_alone_has_such_a_class():
    """The other says that it is not for its own rows."""

    def body(site, group):
        m = copy.deepcopy(NET)
        session = og.distribute(m, og.DAD(), group=group)
        for _ in range(STEPS):
            m.zero_grad()
            x = pictures(site)
            loss(m(x if site else x.as_subclass(Doubling))).backward()
        return {line.parameter: line.why for line in session.coverage()}

    first, second = run_on_lasting_groups(SITES, body)
    assert "is a Doubling" in first["first.weight"]
    assert second["first.weight"].startswith("4 rows here; ")
    assert second["first.weight"].endswith("another site has more, or cannot tap it")


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (
            lambda m, x: m.last(torch.vmap(m.first)(m.conv(x).flatten(1))),
            "inside a transform of torch.func",
        ),
        (lambda m, x: m.last(m.first(m.conv(x).flatten(1).to_sparse())), "is sparse"),
        (
            lambda m, x: m.last(
                m.first(
                    torch.nested.nested_tensor(
                        [*m.conv(x).detach().flatten(1)[:, None]], layout=torch.jagged
                    )
                )
            ).values(),
            "is nested",
        ),
    ],
    ids=["transform", "sparse", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_coverage_says_why_others_are_not_tapped(forward, words):
    for _, lines, *_ in train(og.DAD(), lambda x: x, forward):
        assert lines["first.weight"].why.startswith("not tapped here: ")
        assert words in lines["first.weight"].why


class TestAnnotating:
    """The decision, by class."""

    def test_each_class_with_a_function_of_its_own_is_tried_once(self):
        asked = []

        def same(args: Any, kwargs: Any) -> bool:
            asked.append(type(args[0]))
            return type(args[0]) is Carrying

        annotating = Annotating(same)
        x = torch.ones(2)
        kinds = (Plain, Carrying, Forgetting, Doubling)
        for _ in range(2):
            found = [annotating.may_be_tapped((x.as_subclass(kind),), {}) for kind in kinds]
            assert found == [True, True, True, False]
        assert asked == [Carrying, Doubling]

    def test_where_a_layer_draws_random_numbers_nothing_is_tried(self):
        annotating = Annotating(None)
        assert annotating.may_be_tapped((torch.ones(2).as_subclass(Plain),), {})
        assert not annotating.may_be_tapped((torch.ones(2).as_subclass(Carrying),), {})

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
    def test_other_memory_is_never_plain(self):
        annotating = Annotating(lambda *_: True)
        assert not annotating.may_be_tapped((torch.eye(2).to_sparse(),), {})
        jagged = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
        assert not annotating.may_be_tapped((jagged,), {})
