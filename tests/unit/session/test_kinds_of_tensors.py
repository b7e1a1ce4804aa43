"""Parameters and buffers that are no plain rows of numbers: shared, compared or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import outergrad as og
from covering import covering
from ranks import run_on_lasting_groups

SITES = 2
METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "two_way": og.RankDAD(rank=2, reduce="two_way"),
    "all_reduce": og.PowerSGD(rank=2, min_ratio=1),
    "sparse": og.Sparse(density=0.05, always=True),
    "auto": og.Auto(),
    "local steps": og.LocalSteps(2),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


def _quantized(v: float) -> Tensor:
    return torch.quantize_per_tensor(v * torch.ones(3), 0.1, 0, torch.quint8)


def _jagged(v: float, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([v * torch.ones(2), torch.ones(3)], layout=layout)


def _in_inference(v: float) -> Tensor:
    with torch.inference_mode():
        return v * torch.ones(3)


Kind = Callable[[float], Tensor]
COMPARED: dict[str, Kind] = {
    "sparse_coo": lambda v: (v * torch.eye(3)).to_sparse(),
    "sparse_csr": lambda v: (v * torch.eye(3)).to_sparse_csr(),
    "sparse_csc": lambda v: (v * torch.eye(3)).to_sparse_csc(),
    "_mkldnn": lambda v: (v * torch.ones(3)).to_mkldnn(),
    "nested": lambda v: _jagged(v, torch.strided),
    "jagged": lambda v: _jagged(v, torch.jagged),
    "quantized": _quantized,
    "TwoTensor": lambda v: TwoTensor(v * torch.ones(3), torch.ones(3)),
}
SHARED: dict[str, Kind] = {
    "conjugate": lambda v: (v * torch.ones(3, dtype=torch.complex64) * (1 + 1j)).conj(),
    "negative": lambda v: (v * torch.ones(3, dtype=torch.complex64) * (1 + 1j)).conj().imag,
    "inference": _in_inference,
}


def _built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))


NET = _built()


def _train(session: Any, m: nn.Module, site: int) -> None:
    optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * site + step)
        m(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def _with_buffer(kind: Kind, value: float) -> nn.Module:
    m = copy.deepcopy(NET)
    m[1].register_buffer("odd", kind(value))
    return m


def _refused(built: Callable[[int], nn.Module], method: Any = None) -> list[str]:
    def body(site, group):
        with pytest.raises(ValueError, match=r"odd|'0") as raised:
            og.distribute(built(site), method, group=group)
        return str(raised.value)

    return run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize(
    ("kind", "method"), covering(list(COMPARED), list(METHODS), quick=4, every=2)
)
def test_a_buffer_without_elements_stays_where_it_is_the_same(kind, method):
    def body(site, group):
        m = _with_buffer(COMPARED[kind], 1.5)
        session = og.distribute(m, METHODS[method], group=group, verify_every=1)
        _train(session, m, site)
        if method != "local steps":
            session.make_equal()
        session.detach()
        return [p.detach().clone() for p in m.parameters()]

    first, second = run_on_lasting_groups(SITES, body)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("kind", COMPARED)
def test_one_that_differs_is_named_with_its_site(kind):
    for told in _refused(lambda site: _with_buffer(COMPARED[kind], 1.0 + site)):
        assert f"site 1 has 'buffer 1.odd: {kind} with content " in told
        assert "which must be the same on all sites" in told


@pytest.mark.parametrize("kind", ["sparse_coo", "TwoTensor"])
def test_frozen_weights_without_elements(kind):
    def built(value: float) -> nn.Module:
        m = copy.deepcopy(NET)
        m[1].odd = nn.Parameter(COMPARED[kind](value), requires_grad=False)
        return m

    def body(site, group):
        m = built(1.5)
        session = og.distribute(m, og.DAD(always=True), group=group, verify_every=1)
        _train(session, m, site)
        found = {line.parameter: line.travels for line in session.coverage()}
        session.detach()
        return found

    for found in run_on_lasting_groups(SITES, body):
        assert found["1.odd"] == "not trained"
        assert found["0.weight"] == "factors"
    for told in _refused(lambda site: built(1.0 + site)):
        assert f"site 1 has 'parameter 1.odd: {kind} with content " in told


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", SHARED)
def test_views_and_buffers_of_inference_mode_are_made_equal(kind, method):
    def body(site, group):
        m = _with_buffer(SHARED[kind], 1.0 + site)
        session = og.distribute(m, METHODS[method], group=group, verify_every=1)
        _train(session, m, site)
        session.detach()
        return m[1].odd.clone()

    for found in run_on_lasting_groups(SITES, body):
        assert torch.equal(found, SHARED[kind](1.0).clone())


def _of_inference_mode() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.ones(3))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "expanded": (lambda: nn.Parameter(torch.ones(1).expand(3)), "is expanded: make it"),
    "of inference mode": (_of_inference_mode, "was made in torch.inference_mode()"),
    "sparse": (
        lambda: nn.Parameter(torch.eye(3).to_sparse()),
        "is trained and a torch.sparse_coo, whose gradient has no elements to share",
    ),
    "of a subclass": (
        lambda: nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3))),
        "is trained and a TwoTensor, whose gradient has no elements to share",
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", REFUSED)
def test_parameters_that_cannot_be_shared_are_refused_by_name(kind, method):
    make, words = REFUSED[kind]

    def built(site: int) -> nn.Module:
        m = copy.deepcopy(NET)
        m[1].odd = make()
        return m

    for told in _refused(built, METHODS[method]):
        assert told.startswith(f"'1.odd' {words}")


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_parameters_that_are_no_leaves_are_refused_by_name():
    """As `copy.deepcopy` makes of a module of TorchScript."""
    scripted = [copy.deepcopy(torch.jit.script(_built())) for _ in range(SITES)]
    for told in _refused(lambda site: scripted[site]):
        assert told.startswith("'0.weight' was computed from another tensor")
