"""Layers where they cannot be tapped: in transforms of torch.func, on nested and sparse tensors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import outergrad as og
from cases import relative_error
from covering import covering
from meshes import run_mesh
from outergrad.capture import untappable as _untappable
from ranks import run_on_lasting_groups

SITES, STEPS = 2, 3

METHODS: dict[str, Any] = {
    "dad forced": og.DAD(always=True),
    "dad raw forced": og.DAD(always=True, reveal="activations"),
    "gather": og.RankDAD(rank=1000),
    "two_way": og.RankDAD(rank=1000, reduce="two_way"),
    "all_reduce": og.RankDAD(rank=1000, reduce="all_reduce"),
    "sparse": og.Sparse(density=1.0, always=True),
    "edad": og.EDAD(blocks=["block"], always=True),
    "edad chains": og.EDAD(always=True, inputs="raw"),
    "per layer": og.PerLayer({"first.*": og.DAD(always=True), "*": og.RankDAD(rank=1000)}),
}
"""Exact but for rounding, in float64."""

IN_TURN = threading.Lock()
"""Forward-mode AD and tracers have one state for all threads of a process, which are sites here."""


class Net(nn.Module):
    """Layers with rules, a block, a layer that is always called as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.block = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sin()
        return self.last(h + self.block(h))


class Kinds(nn.Module):
    """A layer of every kind that has a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.Embedding(11, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cell, self.memory = nn.GRUCell(8, 8), nn.GRU(8, 8, batch_first=True)
        self.last = nn.Linear(8, 5)

    def embedded(self, ids: Tensor, shift: float | Tensor = 0.0) -> Tensor:
        h = self.first(ids) + shift
        h = h + self.conv(h.mT).mT
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return h + self.cell(h.flatten(0, 1)).view(h.shape)

    def forward(self, ids: Tensor, shift: float | Tensor = 0.0) -> Tensor:
        h = self.embedded(ids, shift)
        h = h + self.memory(h)[0]
        return self.last(h + self.block(h))


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


NETS = {kind: built(kind) for kind in (Net, Kinds)}


def rows(site: int) -> Tensor:
    generator = torch.Generator().manual_seed(site)
    return torch.randn(4 + site, 6, generator=generator, dtype=torch.float64)


def ids(site: int) -> Tensor:
    return torch.randint(0, 11, (3 + site, 4), generator=torch.Generator().manual_seed(site))


def mean(y: Tensor) -> Tensor:
    return (y * y).mean() + y.sin().mean()


def parameters(m: nn.Module, factor: float = 1.0) -> dict[str, Tensor]:
    return {name: factor * p for name, p in m.named_parameters()}


def ragged(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([x[:1], x[1:]], layout=layout)


# -- losses: of the model, a batch and the site ---------------------------------------------------


def with_vmap(m, x, site):
    h = vmap(m.first)(x).sin()
    return mean(m.last(h + vmap(m.block)(h)))


def vmap_on_one_site(m, x, site):
    h = vmap(m.first)(x).sin() if site == 1 else m.first(x).sin()
    return mean(m.last(h + m.block(h)))


def contractive_penalty(m, x, site):
    jacobian = vmap(jacrev(lambda row: m.block(m.first(row).sin())))(x)
    return mean(m(x)) + (jacobian**2).mean()


def forces(m, x, site):
    return mean(grad(lambda positions: m(positions).square().sum())(x))


def energy_and_forces(m, x, site):
    return mean(m(x)) + forces(m, x, site)


def inner_loop(m, x, site):
    """MAML: a step of gradient descent, and the loss of the weights that it leads to."""
    given = dict(m.named_parameters())
    gradients = grad(lambda p: mean(functional_call(m, p, (x,))))(given)
    fast = {name: p - 0.1 * gradients[name] for name, p in given.items()}
    return mean(functional_call(m, fast, (x.flip(0),)))


def weights_made_of_others(m, x, site):
    h = m.first(x)
    made = {"weight": m.last.weight + h.mean(0), "bias": h.mean(0)[:5]}
    return mean(functional_call(m.last, made, (m.block(h),)))


def beside_averaged_weights(m, x, site):
    others = {n: nn.Parameter(1.1 * p.detach()) for n, p in m.named_parameters()}
    return mean(functional_call(m, others, (x,)) - m(x))


def beside_per_sample_gradients(m, x, site):
    one = grad(lambda p, row: functional_call(m, p, (row,)).sum())
    found = vmap(one, in_dims=(None, 0))(parameters(m), x)
    return mean(m(x)) + mean(found["block.0.weight"])


def checkpointed(m, x, site):
    def part(v):
        return m.last(m.first(v).sin() + vmap(m.first)(v))

    return mean(checkpoint(part, x, use_reentrant=False))


def nested_jagged(m, x, site):
    return mean(m(ragged(x, torch.jagged)).values())


def nested_strided(m, x, site):
    return mean(m.last(m.first(ragged(x, torch.strided))).to_padded_tensor(0.0))


def sparse_coo(m, x, site):
    h = m.first(x.relu().to_sparse()).sin()
    return mean(m.last(h + m.block(h)))


def sparse_csr_by_name(m, x, site):
    return mean(m.last(m.first(input=x.relu().to_sparse_csr())))


class Annotated(Tensor):
    """A tensor subclass that stays one."""


def of_a_subclass(m, x, site):
    return mean(m(x.as_subclass(Annotated))).as_subclass(Tensor)


def every_kind_in_vmap(m, x, site):
    h = vmap(m.first)(x)
    h = h + vmap(m.conv)(h.mT).mT
    h = h + vmap(lambda t: m.attention(t, t, t, need_weights=False)[0])(h)
    return mean(h + vmap(m.cell)(h)) + mean(m(x))


def every_kind_in_grad(m, x, site):
    zero = m.first.weight.new_zeros(8)
    return mean(grad(lambda shift: m(x, shift).square().mean())(zero))


def with_jvp(m, x, site):
    y, tangent = jvp(m, (x,), (torch.ones_like(x),))
    return mean(y) + mean(tangent)


def with_jacfwd(m, x, site):
    return mean(m(x)) + mean(vmap(jacfwd(m))(x))


def with_hessian(m, x, site):
    return mean(m(x)) + mean(hessian(lambda row: m(row).sum())(x[0]))


def dual_numbers(m, x, site):
    with forward_ad.dual_level():
        y = m.first(forward_ad.make_dual(x, torch.ones_like(x)))
        h, tangent = forward_ad.unpack_dual(y)
    return mean(tangent) + mean(m.last(h))


def of_a_traced_copy_of_the_code(m, x, site):
    return mean(torch.jit.trace(m, x)(x))


Loss = Callable[[Any, Tensor, int], Tensor]

LOSSES: list[Loss] = [
    with_vmap,
    vmap_on_one_site,
    contractive_penalty,
    energy_and_forces,
    inner_loop,
    weights_made_of_others,
    beside_averaged_weights,
    beside_per_sample_gradients,
    checkpointed,
    nested_jagged,
    nested_strided,
    sparse_coo,
    sparse_csr_by_name,
    of_a_subclass,
    every_kind_in_vmap,
    every_kind_in_grad,
    with_jvp,
    with_jacfwd,
    with_hessian,
    dual_numbers,
    of_a_traced_copy_of_the_code,
]
IN_TURNS = {with_jvp, with_jacfwd, with_hessian, dual_numbers, of_a_traced_copy_of_the_code}
OF_KINDS = {every_kind_in_vmap, every_kind_in_grad}


def beginning(loss: Loss) -> tuple[nn.Module, Callable[[int], Tensor]]:
    return (NETS[Kinds], ids) if loss in OF_KINDS else (NETS[Net], rows)


def gradients_of(m: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in m.named_parameters()}


def pooled(loss: Loss, sites: int = SITES, weights: Any = None) -> dict[str, Tensor | None]:
    net, batch = beginning(loss)
    m, weights = copy.deepcopy(net), weights or [1 / sites] * sites
    for site, weight in enumerate(weights):
        (weight * loss(m, batch(site), site)).backward()
    return gradients_of(m)


def backward(loss: Loss, m: nn.Module, batch: Tensor, site: int) -> None:
    with IN_TURN if loss in IN_TURNS else nullcontext():
        value = loss(m, batch, site)
    value.backward()


def assert_all_close(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], where):
    for name, gradient in expected.items():
        error = relative_error(found[name], gradient)
        assert error < 1e-10, f"{where}, {name}: {error:.1e}"


@pytest.fixture(autouse=True)
def attention_with_second_derivatives():
    """For all threads at once: the choice is the process's."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.filterwarnings("ignore:`torch.jit")  # which PyTorch's jvp uses, too
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize(("loss", "label"), covering(LOSSES, METHODS.keys(), quick=16, every=4))
def test_gradients_equal_the_pooled_ones_in_every_step(loss, label):
    net, batch = beginning(loss)

    def body(site, group):
        m, found = copy.deepcopy(net), []
        session = og.distribute(m, METHODS[label], group=group)
        for _ in range(STEPS):
            m.zero_grad()
            backward(loss, m, batch(site), site)
            found.append(gradients_of(m))
        session.detach()
        return found

    expected = pooled(loss)
    for site, found in enumerate(run_on_lasting_groups(SITES, body)):
        for step, gradients in enumerate(found):
            assert_all_close(gradients, expected, (site, step))


def test_the_rest_of_the_model_still_travels_as_factors():
    def body(site, group):
        m = copy.deepcopy(NETS[Net])
        session = og.distribute(m, og.DAD(always=True), group=group)
        for _ in range(STEPS):
            with_vmap(m, rows(site), site).backward()
        return {line.parameter: line.travels for line in session.coverage()}

    for travels in run_on_lasting_groups(SITES, body):
        assert travels["last.weight"] == "factors"
        assert travels["first.weight"] == travels["block.0.weight"] == "dense"


@pytest.mark.parametrize("loss", [with_vmap, energy_and_forces], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("label", ["dad forced", "edad", "all_reduce"])
def test_accumulated_without_sync(loss, label):
    net, batch = beginning(loss)

    def body(site, group):
        m = copy.deepcopy(net)
        session = og.distribute(m, METHODS[label], group=group)
        for _ in range(STEPS):
            m.zero_grad()
            with session.no_sync():
                (0.25 * mean(m(batch(site)))).backward()
                (0.25 * loss(m, batch(site), site)).backward()
            (0.5 * loss(m, batch(site), site)).backward()
        return gradients_of(m)

    both = lambda m, x, site: 0.25 * mean(m(x)) + 0.75 * loss(m, x, site)  # noqa: E731
    expected = pooled(both)
    for found in run_on_lasting_groups(SITES, body):
        assert_all_close(found, expected, label)


@pytest.mark.parametrize("label", ["dad forced", "gather"])
def test_sites_of_two_ranks(label):
    def body(mesh):
        m = copy.deepcopy(NETS[Net])
        session = og.distribute(m, METHODS[label], mesh=mesh)
        for _ in range(STEPS):
            m.zero_grad()
            contractive_penalty(m, rows(mesh.number), 0).backward()
        session.detach()
        return gradients_of(m)

    expected = pooled(contractive_penalty, sites=4)
    for found in run_mesh(2, 2, body):
        assert_all_close(found, expected, label)


# -- weighting by samples -------------------------------------------------------------------------


def test_samples_are_counted_where_the_model_runs_inside_of_grad():
    def body(site, group):
        m = copy.deepcopy(NETS[Net])
        og.distribute(m, og.DAD(always=True), group=group, weighting="samples")
        forces(m, rows(site), site).backward()
        return gradients_of(m)

    whole = sum(len(rows(site)) for site in range(SITES))
    expected = pooled(forces, weights=[len(rows(site)) / whole for site in range(SITES)])
    for found in run_on_lasting_groups(SITES, body):
        assert_all_close(found, expected, "samples")


def test_samples_have_to_be_said_where_vmap_hides_them():
    def whole(m, x, site):
        return mean(vmap(m)(x))

    def body(site, group):
        m = copy.deepcopy(NETS[Net])
        session = og.distribute(m, og.DAD(), group=group, weighting="samples")
        mean(m(rows(site))).backward()
        m.zero_grad()
        with pytest.raises(RuntimeError, match=r"outside of torch\.vmap.*session\.samples"):
            whole(m, rows(site), site).backward()
        m.zero_grad()
        session.samples(3 + site)
        whole(m, rows(site), site).backward()
        return gradients_of(m)

    expected = pooled(whole, weights=[3 / 7, 4 / 7])
    for found in run_on_lasting_groups(SITES, body):
        assert_all_close(found, expected, "samples")


# -- what is refused ------------------------------------------------------------------------------


def test_joint_backpropagation_inside_of_a_transform():
    def body(site, group):
        m = copy.deepcopy(NETS[Net])
        method = og.PerLayer({"first.*": og.Local(), "*": og.DAD()}, joint=True)
        session = og.distribute(m, method, group=group)
        with pytest.raises(RuntimeError, match="joint=True: 'first' runs inside a transform"):
            vmap(m)(rows(0))
        mean(m(rows(0))).backward()
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_parameters_that_were_replaced_are_still_an_error():
    def body(site, group):
        m = copy.deepcopy(NETS[Net])
        session = og.distribute(m, og.DAD(always=True), group=group)
        m.last.weight = nn.Parameter(m.last.weight.detach().clone())
        with pytest.raises(RuntimeError, match=r"'last\.weight' was replaced or converted"):
            m(rows(site))
        session.detach()

    run_on_lasting_groups(SITES, body)


# -- the decision ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "ordinary"),
    [
        (torch.ones(2), True),
        (nn.Parameter(torch.ones(2)), True),
        (torch.ones(2).bfloat16(), True),
        ((torch.ones(2), [None, 3]), True),
        ({"mask": torch.ones(2)}, True),
        (F.relu, True),
        (torch.eye(2).to_sparse(), False),
        ([torch.ones(2), {"x": torch.eye(2).to_sparse()}], False),
        (torch.ones(2).as_subclass(Annotated), False),
    ],
    ids=[
        *("tensor-True", "parameter-True", "bfloat16-True", "nested-tuple-True", "mapping-True"),
        *("function-True", "sparse-False", "sparse-inside-False", "subclass-False"),
    ],
)
def test_ordinary_tensors(value, ordinary):
    assert _untappable.is_ordinary(value) == ordinary


def test_nothing_is_left_behind_after_a_transform():
    vmap(torch.sin)(torch.ones(2))
    assert not _untappable.is_transformed()
    assert not _untappable.is_vmapped()
    assert not _untappable.is_traced((torch.ones(2),), {})
