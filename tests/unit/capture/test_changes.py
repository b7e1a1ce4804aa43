"""A model that is changed after `distribute`: exact, or refused on all sites, and never silent."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import outergrad as og
from covering import covering
from loops import METHODS, assert_close, batch, loss_of, net
from meshes import run_mesh
from outergrad.capture import changes
from patience import distribute_then_hurry
from ranks import run_on_lasting_groups, run_ranks, try_ranks

SITES = 2


@pytest.fixture(params=["dense", "dad", "gather", "edad", "per layer"])
def method(request):
    return METHODS[request.param]


@pytest.fixture(autouse=True)
def _no_collections():
    """A collection of Python's drops autograd's nodes, and with them what tells of a conversion
    that has changed nothing: such a model is not refused then, and trains as it should."""
    gc.disable()
    yield
    gc.enable()


class LoRA(nn.Module):
    """As peft does it: the weight is frozen, and stays inside."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        with torch.no_grad():
            numbers = torch.linspace(-1, 1, self.lora_B.weight.numel())
            self.lora_B.weight.copy_(numbers.sin().view(self.lora_B.weight.shape))

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def inject_lora(model):
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(parent, LoRA):
                setattr(parent, name, LoRA(child))


def swapped_on_conversion(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def replace_head(model):
    model.last = nn.Linear(48, 12)


def replace_one_parameter(model):
    model.norm.bias = nn.Parameter(torch.ones(48))


def append(model):
    model.block.append(nn.Linear(48, 48))


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrized(model):
    parametrize.register_parametrization(model.last, "weight", Twice())


def weight_norm(model):
    parametrizations.weight_norm(model.last)


def shrink(model):
    model.norm.weight.data = torch.ones(1)


def delete(model):
    del model.norm
    model.norm = nn.Identity()


REFUSED = {
    "double": (lambda m: m.double(), "first.weight"),
    "bfloat16": (lambda m: m.bfloat16(), "first.weight"),
    "one layer's dtype": (lambda m: m.last.to(torch.float64), "last.weight"),
    "there and back": (lambda m: m.double().float(), "first.weight"),
    "swapped there and back": (swapped_on_conversion, "first.weight"),
    "another device": (lambda m: m.to("meta"), "first.weight"),
    "all assigned": (
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
        "first.weight",
    ),
    "a layer": (replace_head, "last.weight"),
    "a parameter": (replace_one_parameter, "norm.bias"),
    "a layer more": (append, "block.3.weight"),
    "a layer inside another": (
        lambda m: m.norm.add_module("more", nn.Linear(2, 2)),
        "norm.more.weight",
    ),
    "a parameter more": (
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
        "scale",
    ),
    "LoRA": (inject_lora, "first.lora_A.weight"),
    "weight_norm": (weight_norm, "last.weight"),
    "parametrized": (parametrized, "last.weight"),
    "another shape": (shrink, "norm.weight"),
    "a layer less": (delete, "norm.weight"),
    "tied": (lambda m: setattr(m.block[2], "weight", m.block[0].weight), "block.2.weight"),
}


def data(model, rank, step=0):
    return batch(rank, step).to(next(model.parameters()))


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("change", REFUSED)
def test_what_would_not_be_shared_is_refused_on_all_sites(method, change):
    change, name = REFUSED[change]

    def body(rank, group):
        model = net()
        session = og.distribute(model, method, group=group)
        loss_of(model, data(model, rank)).backward()
        model.zero_grad()
        change(model)
        for _ in range(2):  # and again, not only once
            with pytest.raises(RuntimeError, match=r"session\.detach\(\)") as caught:
                loss_of(model, data(model, rank)).backward()
            assert f"{name!r} was" in str(caught.value)
            assert f"on site {rank}" in str(caught.value)
        session.detach()

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("change", REFUSED)
def test_a_change_of_one_site_is_told_to_the_others(change):
    change, name = REFUSED[change]

    def body(rank, group):
        model = net()
        session = og.distribute(model, og.DAD(), group=group)
        for step in range(4):  # in the end without headers
            model.zero_grad()
            loss_of(model, data(model, rank, step)).backward()
        if rank == 1:
            change(model)
        with pytest.raises(RuntimeError, match=r"session\.detach\(\)") as caught:
            loss_of(model, data(model, rank)).backward()
        assert "site 1" in str(caught.value)
        assert isinstance(caught.value, og.StepDiscardedError) == (rank == 0)
        if rank == 0:
            assert all(p.grad is None for p in model.parameters())
        session.detach()
        return str(caught.value)

    other, own = run_on_lasting_groups(SITES, body)
    assert name in own
    if name in dict(net().named_parameters()):
        assert name in other


def test_the_remedy():
    """After detach() the changed model is distributed again, with what was done to its classes."""

    def body(rank, group):
        model = net()
        session = og.distribute(model, og.DAD(always=True), group=group)
        weight_norm(model)
        inner = model.block
        inject_lora(inner)
        with pytest.raises(RuntimeError, match=r"og\.distribute"):
            loss_of(model, batch(rank, 0))
        session.detach()
        assert type(model).__mro__[:2] == type(net()).__mro__[:2]
        assert type(model.last).__mro__[1] is nn.Linear
        og.distribute(model, og.DAD(always=True), group=group)
        plain = copy.deepcopy(model).double()
        loss_of(model, batch(rank, 0)).backward()
        (sum(loss_of(plain, batch(s, 0).double()) for s in range(SITES)) / SITES).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        trained = [(p.grad, q.grad) for p, q in pairs if p.requires_grad]
        assert_close(*zip(*trained, strict=True), 5e-6)

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("change", ["another shape", "there and back", "double"])
def test_converted_in_place_and_distributed_again(change, method):
    def body(rank, group):
        model = net()
        session = og.distribute(model, method, group=group)
        loss_of(model, batch(rank, 0)).backward()
        REFUSED[change][0](model)
        with pytest.raises(RuntimeError, match="replaced or converted"):
            loss_of(model, data(model, rank)).backward()
        session.detach()
        del session
        model.zero_grad()
        if change == "another shape":
            model.norm = nn.Identity()
            model.last.weight.data = torch.ones(5, 48)
            model.last.bias.data = torch.ones(5)
        plain = copy.deepcopy(model).double()
        og.distribute(model, method, group=group)
        loss_of(model, data(model, rank)).backward()
        (sum(loss_of(plain, batch(s, 0).double()) for s in range(SITES)) / SITES).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert_close(*zip(*[(p.grad, q.grad) for p, q in pairs], strict=True), 2e-5)

    run_on_lasting_groups(SITES, body)


def to_the_same_memory(model):
    for p in model.parameters():
        memory = p.data
        p.data = memory.double()
        p.data = memory


@pytest.mark.parametrize("change", [to_the_same_memory, parametrized])
def test_a_conversion_that_a_collection_has_hidden_is_exact(change, method):

    def body(rank, group):
        model = net()
        session = og.distribute(model, method, group=group)
        loss_of(model, batch(rank, 0)).backward()
        gc.collect()
        change(model)
        plain = copy.deepcopy(model).double()
        for step in range(3):
            model.zero_grad()
            plain.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            (sum(loss_of(plain, batch(s, step).double()) for s in range(SITES)) / SITES).backward()
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            assert_close(*zip(*[(p.grad, q.grad) for p, q in pairs], strict=True), 2e-5)
        session.detach()

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("change", ["all assigned", "LoRA"])
def test_optimizers_do_not_step_where_no_module_was_called(change):
    """Only parts of the model are called, and none of its parameters is in the backward."""
    change, name = REFUSED[change]

    def body(rank, group):
        model = net()
        session = og.distribute(model, og.Dense(), group=group)
        change(model)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
        model.first(batch(rank, 0)).sum().backward()
        with pytest.raises(RuntimeError, match=name):
            optimizer.step()
        elsewhere = nn.Linear(2, 2)
        elsewhere(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(elsewhere.parameters(), 0.1).step()
        session.detach()
        optimizer.step()

    run_on_lasting_groups(SITES, body)


def test_an_optimizer_of_another_model_is_not_in_the_way(monkeypatch):
    """To look for conversions there and back takes long: that is for the model's own optimizers."""
    looks, found = [], changes.accumulators
    monkeypatch.setattr(changes, "accumulators", lambda ps: looks.append(len(ps)) or found(ps))

    def body(rank, group):
        model, elsewhere = net(), nn.Linear(2, 2)
        session = og.distribute(model, og.Dense(), group=group)
        theirs = torch.optim.SGD(elsewhere.parameters(), 0.1)
        theirs.step()
        assert not looks
        torch.optim.SGD(model.parameters(), 0.1).step()
        assert looks == [len(list(model.parameters()))]
        REFUSED["there and back"][0](model)
        theirs.step()
        with pytest.raises(RuntimeError, match=r"'first\.weight' was replaced or converted"):
            torch.optim.SGD([*elsewhere.parameters(), *model.parameters()], 0.1).step()
        session.detach()

    run_ranks(1, body)


# -- what stays exact ---------------------------------------------------------------------------


def other_storage(model):
    for p in model.parameters():
        p.data = p.detach().clone()


def pruned(model):
    for layer in (model.first, model.block[0], model.last):
        mask = torch.ones_like(layer.weight)
        mask[::3] = 0
        prune.custom_from_mask(layer, "weight", mask)


def rename(model):
    model.head, model.last = model.last, None
    model.forward = lambda x: renamed_forward(model, x)


def renamed_forward(model, x):
    h = model.first(x).relu()
    return model.head(model.norm(h + model.block(h)))


EXACT = {
    "another storage": other_storage,
    "loaded": lambda m: m.load_state_dict({k: v / 2 for k, v in m.state_dict().items()}),
    "pruned": pruned,
    "frozen": lambda m: m.block.requires_grad_(False),
    "frozen, then gone": lambda m: setattr(m, "norm", nn.Identity()) or None,
    "a frozen layer": lambda m: m.add_module("frozen", nn.Linear(3, 3).requires_grad_(False)),
    "a buffer": lambda m: m.register_buffer("table", torch.ones(3)),
    "renamed": rename,
}


def freeze_first(model, name):
    if name == "frozen, then gone":
        model.norm.requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.*weights were loaded")  # by methods that owe something
@pytest.mark.parametrize(
    ("name", "change"), covering(sorted({*METHODS} - {"powersgd"}), EXACT.keys(), quick=4, every=2)
)
def test_what_changes_nothing_that_is_shared_is_exact(name, change):
    """PowerSGD goes on from the step before, so that it is not exact anyway."""
    method = METHODS[name]
    models = [net() for _ in range(SITES)]
    reference = net().double()
    freeze_first(reference, change)
    EXACT[change](reference)
    for site in range(SITES):
        (loss_of(reference, batch(site, 3).double()) / SITES).backward()

    def body(rank, group):
        model = models[rank]
        session = og.distribute(model, method, group=group)
        for step in range(2):
            loss_of(model, batch(rank, step)).backward()
            model.zero_grad()
        freeze_first(model, change)
        EXACT[change](model)
        loss_of(model, batch(rank, 3)).backward()
        pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
        assert [p.grad is None for p, _ in pairs] == [q.grad is None for _, q in pairs]
        found = [(p.grad, q.grad) for p, q in pairs if q.grad is not None]
        assert_close(*zip(*found, strict=True), 2e-5)
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_a_buffer_that_comes_later_is_each_site_s_own():
    def body(rank, group):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        session = og.distribute(model, og.DAD(), group=group)
        for step in range(2):
            model.register_buffer("seen", torch.full((1,), float(rank)))
            model(torch.full((3, 4), 1.0 + rank + step)).sum().backward()
        session.detach()
        return dict(model.named_buffers())

    ours, theirs = run_on_lasting_groups(2, body)
    assert (ours["seen"], theirs["seen"]) == (0.0, 1.0)
    assert ours["1.num_batches_tracked"] == theirs["1.num_batches_tracked"] == 2


def test_own_parts_change_freely():
    """By their names: also layers that were not there."""

    def body(rank, group):
        model = net()
        method = og.PerLayer({"last*": og.Local(), "*": og.Dense()})
        session = og.distribute(model, method, group=group)
        model.last = nn.Sequential(nn.Linear(48, 7), nn.Linear(7, 3))
        for _ in range(2):
            model.zero_grad()
            loss_of(model, batch(rank, 0)).backward()
        own, shared = (p.grad.clone() for p in (model.last[0].weight, model.first.weight))
        model.other = nn.Linear(3, 3)
        with pytest.raises(RuntimeError, match=r"'other.weight' was added"):
            loss_of(model, batch(rank, 0))
        session.detach()
        return own, shared

    (first, shared), (second, shared_too) = run_on_lasting_groups(SITES, body)
    assert not torch.equal(first, second)
    assert torch.equal(shared, shared_too)


def test_weights_lent_for_a_call_are_no_change(method):
    def body(rank, group):
        model = net()
        session = og.distribute(model, method, group=group)
        lent = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
        torch.func.functional_call(model, lent, (batch(rank, 0),)).sum().backward()
        assert all(p.grad is not None for p in lent.values())
        torch.func.grad(lambda w: torch.func.functional_call(model, w, (batch(rank, 0),)).sum())(
            {n: p.detach() for n, p in model.named_parameters()}
        )
        loss_of(model, batch(rank, 0)).backward()
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_evaluation_may_use_other_weights_for_a_while():
    def body(rank, group):
        model = net()
        session = og.distribute(model, og.Dense(), group=group)
        own = dict(model.state_dict(keep_vars=True))
        with torch.no_grad():
            model.load_state_dict({k: v + 1 for k, v in own.items()}, assign=True)
            model(batch(rank, 0))
            for name, p in own.items():
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, p)
        loss_of(model, batch(rank, 0)).backward()
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_copies_pickles_and_the_class_are_those_of_the_plain_model():
    def body(rank, group):
        model, plain = net(), net()
        session = og.distribute(model, og.Dense(), group=group)
        assert vars(model).keys() == vars(plain).keys()
        assert type(model).__name__ == type(plain).__name__
        assert isinstance(model, type(plain))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        found = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
        for other in (*found, torch.load(buffer, weights_only=False)):
            assert type(other) is type(plain)
            replace_head(other)
            loss_of(other, batch(rank, 0)).backward()
        session.detach()
        assert type(model) is type(plain)

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("method", [og.Dense(), og.DAD(always=True)], ids=["dense", "dad"])
def test_converted_between_forward_and_backward(method):
    """On one site: its backward raises, and the others hear of it when it ends the session."""

    def body(rank, group):
        model = net()
        session = og.distribute(model, method, group=group)
        loss = model.first(batch(rank, 0)).square().mean()
        second = (model.last(torch.ones(2, 48)) ** 2).mean()
        if rank == 1:
            model.first.double().float()
            loss = loss + model.first(batch(rank, 0)).square().mean()
            with pytest.raises(RuntimeError, match=r"'first\..*' was replaced or converted"):
                (loss + second).backward()
        else:
            with pytest.raises(og.StepDiscardedError):
                (loss + second).backward()
        session.detach()

    run_on_lasting_groups(SITES, body)


class Sealed(nn.Linear):
    __slots__ = ("extra",)

    def __init_subclass__(cls):
        raise TypeError("no subclasses")


def test_a_class_without_subclasses():
    def body(rank, group):
        model = Sealed(3, 2)
        session = og.distribute(model, og.Dense(), group=group)
        assert type(model) is Sealed
        model.bias = nn.Parameter(torch.ones(2))
        with pytest.raises(RuntimeError, match="'bias' was replaced"):
            model(torch.ones(1, 3)).sum().backward()
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_local_steps_refuse_new_parameters():
    def body(rank, group):
        model = net()
        session = og.distribute(model, og.LocalSteps(2), group=group)
        model.block.append(nn.Linear(48, 48))
        with pytest.raises(RuntimeError, match=r"'block.3.weight' was added"):
            model(batch(rank, 0))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(RuntimeError, match=r"'block.3.weight' was added"):
            optimizer.step()
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_local_steps_tell_the_others_at_their_exchange():
    def body(rank, group):
        model = net()
        session = og.distribute(model, og.LocalSteps(2), group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if rank == 1:
            replace_head(model)
            with pytest.raises(RuntimeError, match=r"'last.weight' was replaced"):
                model(batch(rank, 0))
        else:
            loss_of(model, batch(rank, 0)).backward()
            optimizer.step()
            with pytest.raises(og.StepDiscardedError, match=r"'last.weight' of the model"):
                optimizer.step()
        session.detach()

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("change", ["double", "all assigned", "LoRA", "a layer more"])
def test_ranks_of_a_mesh_refuse_it_too(change):
    change, name = REFUSED[change]

    def body(mesh):
        model = net()
        session = og.distribute(model, og.DAD(), mesh=mesh)
        change(model)
        with pytest.raises(RuntimeError, match=name):
            loss_of(model, data(model, mesh.number)).backward()
        session.detach()

    run_mesh(2, 2, body)


def test_a_change_of_one_rank_of_a_mesh_is_told_to_all():
    def body(mesh):
        model = net()
        session = og.distribute(model, og.DAD(), mesh=mesh)
        loss_of(model, batch(mesh.number, 0)).backward()
        if mesh.number == 3:
            model.bfloat16()
        error = og.StepDiscardedError if mesh.number != 3 else RuntimeError
        with pytest.raises(error) as caught:
            loss_of(model, data(model, mesh.number)).backward()
        session.detach()
        return str(caught.value)

    *_, own = run_mesh(2, 2, body)
    assert "'first.weight' was replaced or converted" in own


def test_a_single_site_may_not_change_its_model_either():
    def body(rank, group):
        model = net()
        session = og.distribute(model, og.DAD(), group=group)
        replace_head(model)
        with pytest.raises(RuntimeError, match=r"'last.weight' was replaced"):
            loss_of(model, batch(rank, 0))
        session.detach()

    run_ranks(1, body)


def test_a_site_that_never_comes_does_not_keep_the_error_back():
    def body(rank, group):
        model = net()
        distribute_then_hurry(model, og.Dense(), group=group)
        if rank == 1:
            replace_head(model)
            with pytest.raises(RuntimeError, match=r"'last.weight' was replaced"):
                loss_of(model, batch(rank, 0))

    assert try_ranks(SITES, body) == [None, None]
