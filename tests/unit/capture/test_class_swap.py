"""Modules of any class can be distributed, or travel dense; what fails leaves the model plain."""

from __future__ import annotations

import abc
import copy
from typing import Any, Generic, TypeVar, final
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import relative_error
from outergrad.capture import class_swap as _class_swap
from outergrad.capture.tapped_layer import TappedLayer
from outergrad.capture.weighting import Weighting
from outergrad.session.model_guard import ModelGuard
from outergrad.session.session import Session
from ranks import run_on_lasting_groups

T = TypeVar("T")
REGISTER: list[str] = []
METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "gather": og.RankDAD(rank=1000),
    "two_way": og.RankDAD(rank=1000, reduce="two_way"),
    "all_reduce": og.RankDAD(rank=1000, reduce="all_reduce"),
    "sparse": og.Sparse(density=1.0, always=True),
    "edad": og.EDAD(always=True, inputs="raw"),
    "auto": og.Auto(),
}


class WantsArgument(nn.Linear):
    def __init_subclass__(cls, *, kind: str) -> None:
        REGISTER.append(kind)


class Final(nn.Linear):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses, please")


@final
class SaidToBeFinal(nn.Linear):
    pass


class Registered(nn.Linear):
    def __init_subclass__(cls) -> None:
        assert cls.__name__ not in REGISTER, "twice the same name"
        REGISTER.append(cls.__name__)


class _Meta(type):
    def __new__(mcls, name: str, bases: Any, body: Any, *, kind: str) -> Any:
        REGISTER.append(kind)
        return super().__new__(mcls, name, bases, body)

    def __init__(cls, name: str, bases: Any, body: Any, *, kind: str) -> None:
        super().__init__(name, bases, body)


class OfAMetaclass(nn.Linear, metaclass=_Meta, kind="of a metaclass"):
    pass


class Abstract(nn.Linear, abc.ABC):
    @abc.abstractmethod
    def what(self) -> str: ...


class Concrete(Abstract):
    def what(self) -> str:
        return "it is"


class Both(Abstract):
    """An abstract base that also wants an argument."""

    def __init_subclass__(cls, *, kind: str) -> None:
        REGISTER.append(kind)

    def what(self) -> str:
        return "both"


class Slotted(nn.Linear):
    __slots__ = ("extra",)


class Typed(nn.Linear, Generic[T]):
    pass


class SlottedAndFinal(nn.Linear):
    """No subclass of it can be made."""

    __slots__ = ("extra",)

    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses, please")


class KeepsItsClass(nn.Linear):
    """Nor can one be given to its modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError("I am what I am")
        super().__setattr__(name, value)


SWAPPED = [
    *(WantsArgument, Final, SaidToBeFinal, Registered, OfAMetaclass, Concrete, Both, Slotted, Typed)
]
KEPT = [SlottedAndFinal, KeepsItsClass]


def _built(kind: type[nn.Linear]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), kind(8, 8), nn.Linear(8, 3)).double()


def _loss(m: nn.Module, site: int) -> Tensor:
    generator = torch.Generator().manual_seed(site)
    return m(torch.randn(4 + site, 6, generator=generator, dtype=torch.float64)).square().mean()


def _pooled(original: nn.Module) -> dict[str, Tensor]:
    m = copy.deepcopy(original)
    for site in range(2):
        (_loss(m, site) / 2).backward()
    return {n: p.grad for n, p in m.named_parameters() if p.grad is not None}


def _check(original: nn.Module, method: Any, travels: str | None = None, why: str = "") -> None:
    expected, before = _pooled(original), list(REGISTER)

    def body(site, group):
        m = copy.deepcopy(original)
        session = og.distribute(m, method, group=group)
        for _ in range(3):
            m.zero_grad()
            _loss(m, site).backward()
        line = {line.parameter: line for line in session.coverage()}["2.weight"]
        found = {n: p.grad for n, p in m.named_parameters()}
        session.detach()
        assert [type(x) for x in m.modules()] == [type(x) for x in original.modules()]
        return found, line

    for found, line in run_on_lasting_groups(2, body):
        for name, gradient in expected.items():
            assert relative_error(found[name], gradient) < 1e-10, name
        if travels is not None:
            assert line.travels == travels
            assert why in line.why
    assert before == REGISTER


@pytest.mark.parametrize("kind", SWAPPED, ids=lambda kind: kind.__name__)
def test_a_class_that_minds_its_subclasses_sends_factors(kind):
    _check(_built(kind), METHODS["dad"], "factors")


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.__name__)
def test_a_class_that_allows_none_travels_dense(kind):
    _check(_built(kind), METHODS["dad"], "dense", f"its class, {kind.__name__}, allows no subclass")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [WantsArgument, OfAMetaclass, SlottedAndFinal])
def test_by_every_method(kind, method):
    _check(_built(kind), METHODS[method])


def test_the_model_itself_is_of_such_a_class():
    class Model(nn.Sequential):
        def __init_subclass__(cls, *, kind: str) -> None:
            REGISTER.append(kind)

    torch.manual_seed(0)
    model = Model(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    _check(model, METHODS["dad"], "factors")


def test_questions_about_an_abstract_class_are_answered_as_before():
    """They are kept in the class, and not mixed up with those about the subclass."""
    module, other = Concrete(2, 2), Concrete(2, 2)
    swap = _class_swap.ClassSwap(module, nn.Linear(2, 2).forward)
    assert isinstance(module, Concrete)
    assert not isinstance(other, type(module))
    assert isinstance(other, Concrete)
    assert not isinstance(nn.Linear(2, 2), Abstract)
    swap.restore()
    assert type(module) is Concrete


# -- failures in the middle -----------------------------------------------------------------------

_tapped = TappedLayer.__init__


def _second_layer_fails(self: Any, module: Any, rule: Any, slots: Any, *args: Any) -> None:
    if slots[0].layer == "2":
        raise TypeError("the second layer")
    _tapped(self, module, rule, slots, *args)


def _fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("in the middle")


def _interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


JOINT = og.PerLayer({"0.*": og.Local(), "*": og.DAD(always=True)}, joint=True)
BREAKS: dict[str, tuple[Any, Any, str, Any]] = {
    "the first layer": (METHODS["dad"], TappedLayer, "__init__", _fails),
    "the second layer": (METHODS["dad"], TappedLayer, "__init__", _second_layer_fails),
    "behind the blocks": (METHODS["edad"], Session, "watch", _fails),
    "the samples": (METHODS["auto"], Weighting, "watch", _fails),
    "the samples, interrupted": (METHODS["auto"], Weighting, "watch", _interrupted),
    "behind a joint part": (JOINT, Session, "watch", _fails),
    "the last thing of all": (METHODS["gather"], ModelGuard, "watch", _fails),
}


@pytest.mark.parametrize("where", BREAKS)
def test_a_failure_in_the_middle_leaves_the_model_plain(where):
    method, owner, name, broken = BREAKS[where]
    original = _built(nn.Linear)
    expected = _pooled(original)

    def distributed(m: nn.Module, group: Any) -> str:
        try:
            og.distribute(m, method, group=group)
        except BaseException as error:
            return type(error).__name__
        return "nothing"

    def try_it(site, group):
        m = copy.deepcopy(original)
        raised = distributed(m, group)
        if raised != "nothing":
            assert [type(x) for x in m.modules()] == [type(x) for x in original.modules()]
            assert not any(p._backward_hooks for p in m.parameters())
        return raised, m

    with patch.object(owner, name, broken):
        tried = run_on_lasting_groups(2, try_it)

    def again(site, group):
        raised, m = tried[site]
        session = og.distribute(m, METHODS["dad"], group=group)
        m.zero_grad()
        _loss(m, site).backward()
        session.detach()
        return raised, {n: p.grad for n, p in m.named_parameters()}

    for raised, found in run_on_lasting_groups(2, again):
        assert raised != "nothing"
        for name, gradient in expected.items():
            assert relative_error(found[name], gradient) < 1e-10, name
