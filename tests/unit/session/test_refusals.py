"""What cannot be right is refused, by name and with a remedy, on every site."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import outergrad as og
from cases import METHODS, mlp
from ranks import run_on_lasting_groups, run_ranks, try_ranks

MODEL = mlp(6, 7, 5)
X = torch.randn(3, 6)


@pytest.fixture(params=["dense", "dad", "dad forced"])
def method(request):
    return METHODS[request.param]


def refused_in_backward(method, use, match):
    """Two sites run `use(model)`, which must raise, and then a good step."""

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, method, group=group)
        with pytest.raises(RuntimeError, match=match):
            use(model)
        model.zero_grad()
        model(X).sum().backward()
        alone = copy.deepcopy(MODEL)
        alone(X).sum().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        session.detach()

    run_on_lasting_groups(2, body)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("whole", [True, False])
def test_reentrant_checkpointing(method, whole):
    def use(model):
        x = X.clone().requires_grad_()
        part = model if whole else model[2]
        inside = x if whole else model[1](model[0](x))
        checkpoint(part, inside, use_reentrant=True).sum().backward()

    refused_in_backward(method, use, "use_reentrant=False")


@pytest.mark.parametrize("index", [0, 3])
def test_autograd_grad_of_weights(method, index):
    def use(model):
        torch.autograd.grad(model(X).sum(), list(model.parameters())[index])

    refused_in_backward(method, use, r"torch\.autograd\.grad of parameter")


def test_hessian_vector_products_are_of_clones(method):
    def use(model):
        params = list(model.parameters())
        torch.autograd.grad(model(X).square().sum(), params, create_graph=True)

    refused_in_backward(method, use, r"p\.clone\(\) for n, p in model.named_parameters\(\)")


class Reenters(torch.autograd.Function):
    """Leaves gradients in parameters in its own backward."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        ctx.save_for_backward(x)
        return model(x)

    @staticmethod
    def backward(ctx, delta):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.model(x)
        y.backward(delta)
        return x.grad, None


def test_functions_that_call_backward_in_backward(method):
    def use(model):
        Reenters.apply(X.clone().requires_grad_(), model).sum().backward()

    refused_in_backward(method, use, r"should call torch\.autograd\.grad in its backward")


@pytest.mark.parametrize("first", [True, False])
def test_hooks_that_call_backward(method, first):
    """Before the first event of the outer backward, or in the middle of its step."""

    def use(model):
        y = model(X) if first else model[0](X)
        inner = model(X + 1).sum()
        y.register_hook(lambda delta: inner.backward())
        (y.sum() if first else model[2:](y).sum()).backward()

    refused_in_backward(method, use, "a backward runs inside another one")


def test_joint_parts_in_double_backward():
    def body(rank, group):
        model = nn.ModuleDict({"own": nn.Linear(6, 4), "shared": nn.Linear(4, 3)})
        method = og.PerLayer({"own.*": og.Local(), "*": og.DAD()}, joint=True)
        og.distribute(model, method, group=group)
        x = X.clone().requires_grad_()
        y = model["shared"](model["own"](x))
        with pytest.raises(RuntimeError, match=r"joint=True.*create_graph=True.*joint=False"):
            torch.autograd.grad(y.sum(), x, create_graph=True)

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_double_backward(method):
    def use(model):
        model(X).sum().backward(create_graph=True)

    refused_in_backward(method, use, "create_graph=True")


def refused(build, method=None, match="", sites=1, error=ValueError, **kwargs):
    def body(rank, group):
        with pytest.raises(error, match=match):
            og.distribute(build(group), method, group=group, **kwargs)

    run_ranks(sites, body)


def test_wrapped_in_ddp():
    def wrap(group):
        return nn.Sequential(nn.parallel.DistributedDataParallel(mlp(3, 2), process_group=group))

    refused(wrap, match="'0' is wrapped in DistributedDataParallel.*pass the plain module")


@pytest.fixture
def default_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrapped_in_fsdp(default_group):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    model = fully_shard(mlp(3, 2), mesh=mesh)
    with pytest.raises(ValueError, match=r"FSDP|DTensor"):
        og.distribute(model)


def test_default_group_is_used(default_group):
    model = mlp(3, 2)
    session = og.distribute(model)
    model(torch.randn(2, 3)).sum().backward()
    assert model[0].weight.grad is not None
    session.detach()


def test_no_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        og.distribute(mlp(3, 2))


def test_distributed_twice():
    def twice(group):
        model = mlp(3, 2)
        og.distribute(model, og.DAD(always=True), group=group)
        return model

    refused(twice, match=r"distributed already: call session\.detach\(\)", sites=2)


BAGS = {
    "sparse": ({"sparse": True}, r"0: sparse=True is not supported; set sparse=False"),
    "max_norm": ({"max_norm": 1.0}, r"0: max_norm changes the table in forward"),
}


@pytest.mark.parametrize("bag", BAGS)
def test_embedding_bags_that_cannot_be_shared(bag, method):
    settings, match = BAGS[bag]
    refused(lambda _: nn.Sequential(nn.EmbeddingBag(5, 3, **settings)), method, match)


def test_embedding_bags_of_which_nothing_is_shared():
    def body(rank, group):
        model = nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True), nn.Linear(3, 2))
        own = og.PerLayer({"0.*": og.Local(), "*": og.DAD()})
        og.distribute(model, own, group=group)
        model(torch.tensor([[0, 1]])).sum().backward()
        assert model[0].weight.grad.is_sparse

    run_ranks(2, body)


def test_embedding_with_max_norm():
    refused(lambda _: nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), match="0: max_norm")


def test_sparse_embedding():
    refused(lambda _: nn.Embedding(5, 3, sparse=True), match="sparse=False")


def test_nothing_to_train():
    refused(lambda _: mlp(3, 2).requires_grad_(False), match="no parameter that requires")


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_module():
    refused(lambda _: nn.LazyLinear(3), match="run one forward of the lazy module")


@pytest.mark.parametrize(
    ("method", "match"),
    [("dad", "pass og.DAD"), (og.DAD, r"the class DAD: pass an object, as og\.DAD\(")],
)
def test_not_a_method(method, match):
    refused(lambda _: mlp(3, 2), method=method, match=match, error=TypeError)


def test_a_method_in_the_place_of_the_model():
    with pytest.raises(TypeError, match=r"pass a torch\.nn\.Module first, then the method"):
        og.distribute(og.DAD(), mlp(3, 2))


@pytest.mark.parametrize("around", [og.PerLayer, og.Schedule])
def test_a_class_is_no_method_of_a_part(around):
    with pytest.raises(TypeError, match="is no method of a part"):
        around({"*": og.DAD} if around is og.PerLayer else {0: og.DAD})


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"reveal": "nothing"}, "reveal='nothing'"), ({"bucket_bytes": 0}, "bucket_bytes=0")],
)
def test_settings_are_checked(settings, match):
    with pytest.raises(ValueError, match=match):
        og.DAD(**settings)


DIFFERENCES = {
    "shape": (
        lambda rank: mlp(6, 7 + (rank == 1), 5),
        lambda rank: og.DAD(),
        r"parameter 0\.weight",
    ),
    "name": (
        lambda rank: nn.ModuleDict({f"layer{rank == 1}": nn.Linear(3, 2)}),
        lambda rank: og.DAD(),
        "layerTrue",
    ),
    "dtype": (
        lambda rank: mlp(3, 2).double() if rank == 1 else mlp(3, 2),
        lambda rank: og.DAD(),
        "float64",
    ),
    "frozen": (
        lambda rank: mlp(3, 2).requires_grad_(True) if rank != 1 else _half_frozen(),
        lambda rank: og.DAD(),
        "trained",
    ),
    "more layers": (
        lambda rank: mlp(*[4] * (2 + (rank == 1))),
        lambda rank: og.Dense(),
        "2.weight",
    ),
    "method": (
        lambda rank: mlp(3, 2),
        lambda rank: og.Dense() if rank == 1 else og.DAD(),
        "method",
    ),
    "settings": (lambda rank: mlp(3, 2), lambda rank: og.DAD(always=rank == 1), "always=True"),
}


def _half_frozen():
    model = mlp(3, 2)
    model[0].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("what", DIFFERENCES)
def test_sites_that_differ_all_raise_the_same_error(what, sites):
    build, method, match = DIFFERENCES[what]

    def body(rank, group):
        with pytest.raises(ValueError, match=match) as caught:
            og.distribute(build(rank), method(rank), group=group)
        return str(caught.value)

    messages = set(run_ranks(sites, body))
    assert len(messages) == 1
    if sites == 3:
        assert "site 1 has" in messages.pop()


def test_an_error_of_one_site_reaches_the_others():
    def body(rank, group):
        og.distribute(nn.Embedding(5, 3, max_norm=1.0 if rank == 1 else None), group=group)

    first, second = try_ranks(2, body)
    assert "site 1 could not take part" in str(first)
    assert "max_norm" in str(first)
    assert "max_norm" in str(second)
