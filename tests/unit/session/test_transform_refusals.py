"""What a transform could not see, or not tell apart, is refused by name and with a remedy."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from examples.privacy import DPSGD, ClippedLayers, ClippedSite, Half
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import outergrad as og
from cases import Branches, mlp
from meshes import run_mesh
from ranks import run_on_lasting_groups


class OwnRule:
    """Of a user, who knew nothing of samples."""

    owns = ()

    def objection(self, module):
        return None

    def slots(self, module, name):
        return og.RULES[nn.Linear].slots(module, name)

    def forward(self, module, tap, x):
        return og.RULES[nn.Linear].forward(module, tap, x)

    def rows(self, module, args, kwargs):
        return og.RULES[nn.Linear].rows(module, args, kwargs)

    def factors(self, module, slot, call):
        return og.RULES[nn.Linear].factors(module, slot, call)


class Own(nn.Linear):
    pass


class NoRepr:
    needs_samples = needs_all_layers = False

    def __call__(self, gradient):
        return gradient


@dataclass(frozen=True)
class NoNeeds:
    needs_samples = True

    def __call__(self, gradient):
        return gradient


def normed(norm):
    return nn.Sequential(nn.Linear(6, 4), norm, nn.Linear(4, 2))


def buffered():
    model = mlp(6, 4)
    model.register_buffer("seen", torch.zeros(1))
    return model


MODEL, DEEPER = mlp(6, 7, 5), mlp(6, 7, 7, 5)
LISTED = nn.ParameterList([torch.ones(4)])
SITE, SAMPLES = ClippedSite(1.0), DPSGD(1.0)
FROZEN = r"freeze it .* or make it og.Local\(\)"
REFUSED = {
    "parametrised": (
        nn.Sequential(weight_norm(nn.Linear(6, 4))),
        og.DAD(),
        SAMPLES,
        rf"'0.parametrizations.weight.original0' .*remove_parametrizations.*{FROZEN}",
    ),
    "parametrised, dense": (
        nn.Sequential(weight_norm(nn.Linear(6, 4))),
        og.Dense(),
        SAMPLES,
        rf"'0.parametrizations.weight.original0' .*{FROZEN}",
    ),
    "a list": (
        Branches(lambda m, x: m.layer(x) * m.p[0], layer=nn.Linear(6, 4), p=LISTED),
        og.DAD(),
        SAMPLES,
        rf"'p.0' .*ParameterList.*{FROZEN}",
    ),
    "frozen in part": (
        mlp(6, 4)[:1].requires_grad_(True),
        og.PerLayer({"0.bias": og.Local(), "*": og.DAD()}),
        SAMPLES,
        r"'0.weight' .*part of the layer is frozen or local",
    ),
    "mixes samples": (normed(nn.BatchNorm1d(4, affine=False)), og.DAD(), SAMPLES, r"'1' .*mixes"),
    "a buffer": (buffered(), og.DAD(), SAMPLES, r"buffer 'seen', .*: pass buffers='local'"),
    "rule without samples": (Own(6, 4), og.DAD(), SAMPLES, r"OwnRule, has no by_sample\(\): write"),
    "every, by sample": (MODEL, og.DAD(every=2), SAMPLES, r"'0.weight' has every=2.* every=1"),
    "every, several": (
        MODEL,
        og.PerLayer({"0.*": og.DAD(every=2), "*": og.DAD()}),
        SITE,
        r"'0.weight' travels with every=2 and '2.weight' with every=1: give all",
    ),
    "local steps": (MODEL, og.LocalSteps(2), SAMPLES, r"LocalSteps .* '0.weight' .*use og.DAD"),
    "fragments": (MODEL, og.LocalSteps(2, stream=2), SITE, r"stream=2\) .* a time: use stream=1"),
    "edad": (DEEPER, og.EDAD(always=True), Half(), r"'2.weight' would be .*again.*og.DAD\(\)"),
    "edad blocks": (MODEL, og.EDAD(blocks=["2"]), SITE, r"would be computed again"),
    "replayed": (nn.GRU(6, 4), og.DAD(reveal="activations"), Half(), r"'weight_ih_l0' would be"),
    "joint": (
        MODEL,
        og.PerLayer({"0.*": og.Local(), "*": og.DAD()}, joint=True),
        Half(),
        r"joint=True.* '0', .*joint=False",
    ),
    "no repr": (MODEL, og.DAD(), NoRepr(), r"transform=NoRepr: .*give it a __repr__"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_the_model_is_distributed(name):
    model, method, transform, match = REFUSED[name]

    def body(rank, group):
        replica = copy.deepcopy(model)
        about = {"group": group, "rules": {**og.RULES, Own: OwnRule()}}
        with pytest.raises(ValueError, match=match) as caught:
            og.distribute(replica, method, transform=transform, **about)
        assert "\n" not in str(caught.value)
        og.distribute(replica, method, **about).detach()  # nothing is left behind

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize("transform", [NoNeeds(), 3, lambda gradient: gradient])
def test_what_is_no_transform(transform):
    def body(rank, group):
        with pytest.raises(TypeError, match="needs_samples and needs_all_layers, True or False"):
            og.distribute(copy.deepcopy(MODEL), group=group, transform=transform)

    run_on_lasting_groups(1, body)


def test_buffers_that_each_site_keeps():
    def body(rank, group):
        about = {"group": group, "buffers": "local", "transform": SAMPLES}
        og.distribute(buffered(), og.DAD(), **about).detach()
        about = {"group": group, "transform": SITE}
        og.distribute(buffered(), og.DAD(), **about).detach()

    run_on_lasting_groups(2, body)


def test_sites_with_other_settings_are_told():
    def body(rank, group):
        with pytest.raises(ValueError, match=r"transform: ClippedSite\(limit=1.0\)"):
            og.distribute(copy.deepcopy(MODEL), group=group, transform=ClippedSite(1.0 + rank))

    run_on_lasting_groups(2, body)


def test_samples_of_sites_of_several_ranks():
    def body(mesh):
        match = r"mesh= with transform=DPSGD.*, which needs_samples: .*use group= over all ranks"
        with pytest.raises(ValueError, match=match):
            og.distribute(copy.deepcopy(MODEL), mesh=mesh, transform=SAMPLES)

    run_mesh(2, 1, body)


X = torch.randn(4, 6)
DEEP = torch.randn(4, 3, 6)


def flattened(model, session):
    model(DEEP)


def by_itself(model, session):
    model[0](X)


def several_forwards(model, session):
    (model(X).sum() + model(X).sum()).backward()


def penalised(model, session):
    (model(X).sum() + model[0].weight.sum()).backward()


def left_over(model, session):
    model(X).sum().backward()
    model(X).sum().backward()


def zeros_left(model, session):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model(X).sum().backward()


def unsynced(model, session):
    with session.no_sync():
        model(X).sum().backward()


def left_over_unsynced(model, session):
    model(X).sum().backward()
    unsynced(model, session)


def packed(model, session):
    model(nn.utils.rnn.pack_padded_sequence(DEEP, [3, 3, 2, 1], batch_first=True))


def of_others(model, session):
    """Reads the parameter of a norm outside of it."""
    (model(X) * model[1].weight.sum()).sum().backward()


def bare(forward, *shape):
    """A layer, and a parameter that a forward reads."""
    p = nn.Parameter(torch.ones(shape))
    return Branches(lambda m, x: forward(m.layer(x), m.p), layer=nn.Linear(6, 4), p=p)


def rows_joined(y, p):
    return torch.cat([y, p.expand(4, 4)])


BARE = {
    "a matrix": (lambda y, p: y @ p, (4, 4), r"'p' is used by \w+\(\) with tensors of samples"),
    "in place": (lambda y, p: y * p.mul_(2), (4,), r"'p' is used by mul_\(\) in place"),
    "its data": (lambda y, p: y * p.data, (4,), r"'p' is used by data\(\) as .data"),
    "flattened samples": (lambda y, p: y.flatten() * p.repeat(4), (4,), r"whose first dimension"),
    "joined": (rows_joined, (1, 4), r"along the dimension of the samples"),
    "a number of it": (lambda y, p: y * float(p.sum()), (4,), r"cannot be computed by sample"),
}


@pytest.mark.parametrize("name", BARE)
def test_parameters_whose_use_is_not_known(name):
    forward, shape, match = BARE[name]

    def body(rank, group):
        replica = bare(forward, *shape)
        session = og.distribute(replica, og.DAD(), group=group, transform=SAMPLES)
        with pytest.raises(RuntimeError, match=f"{match}.* freeze it .*give its module a rule"):
            replica(X)
        assert "p" not in vars(replica)
        session.detach()

    run_on_lasting_groups(2, body)


FLAT = Branches(lambda m, x: m.layer(x.flatten(0, 1)), layer=nn.Linear(6, 4))
SEQUENCES = Branches(lambda m, x: m.layer(x)[0], layer=nn.GRU(6, 4, batch_first=True))
ZERO = r"zero_grad\(set_to_none=True\)"
IN_TIME = {
    "flattened": (FLAT, SAMPLES, flattened, r"'layer' sees 12 samples, .* called with 4"),
    "by itself": (MODEL, SAMPLES, by_itself, r"'0' is called outside of the model's forward"),
    "several forwards": (MODEL, SAMPLES, several_forwards, "one forward, of all samples, per"),
    "several forwards, by layer": (MODEL, ClippedLayers(1.0), several_forwards, "one forward"),
    "penalty": (MODEL, SAMPLES, penalised, r"autograd has a gradient for '0.weight'.*og.Local"),
    "left over": (MODEL, Half(), left_over, rf"'0.weight' had a gradient before.*{ZERO}"),
    "left over, of all layers": (MODEL, SITE, left_over, ZERO),
    "outside of its norm": (
        normed(nn.LayerNorm(4)),
        SAMPLES,
        of_others,
        r"'1.weight' outside of its layer .*leave that out",
    ),
    "left over, by sample": (MODEL, SAMPLES, left_over, ZERO),
    "zeros left": (MODEL, SITE, zeros_left, ZERO),
    "no_sync": (MODEL, SAMPLES, unsynced, r"no_sync\(\): DPSGD.* share every backward"),
    "left over in no_sync": (MODEL, Half(), left_over_unsynced, ZERO),
    "packed": (SEQUENCES, SAMPLES, packed, r"'layer': .*PackedSequence.*pad the sequences"),
}


@pytest.mark.parametrize("name", IN_TIME)
@pytest.mark.parametrize("method", [og.DAD(always=True), og.Dense()], ids=str)
def test_refused_in_time_and_training_goes_on(name, method):
    model, transform, use, match = IN_TIME[name]
    good = {FLAT: X[:, None], SEQUENCES: DEEP}.get(model, X)

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, method, group=group, transform=transform)
        with pytest.raises(RuntimeError, match=match):
            use(replica, session)
        for _ in range(2):
            replica.zero_grad()
            replica(good).square().mean().backward()
        session.detach()
        assert type(replica) is type(model)
        return [p.grad for p in replica.parameters()]

    for first, second in zip(*run_on_lasting_groups(2, body), strict=True):
        assert torch.equal(first, second)


class Sloppy:
    """Returns what it should not."""

    needs_samples = needs_all_layers = False

    def __init__(self, what, *, forms=False):
        self._what, self.forms = what, forms

    def __repr__(self):
        return "Sloppy()"

    def __call__(self, gradient):
        return self._what(gradient)


def fewer_rows(gradient):
    rows = {
        s: og.SampleRows(og.Factors(p.factors.d_GRO[:, 1:], p.factors.a_GRI[:, 1:]))
        for s, p in gradient.rows.items()
    }
    return og.SiteGradient(rows, gradient.formed, gradient.params)


def other_shape(gradient):
    found = og.transforms.formed(gradient)
    return og.SiteGradient({}, {n: g[None] for n, g in found.formed.items()}, gradient.params)


def nothing(gradient):
    return og.SiteGradient({}, {}, gradient.params)


SLOPPY = {
    "none": (Sloppy(lambda gradient: None), "returned NoneType: return a SiteGradient"),
    "formed": (Sloppy(og.transforms.formed), "set forms = True"),
    "rows": (Sloppy(lambda g: g, forms=True), r"with forms = True return transforms.formed"),
    "fewer rows": (Sloppy(fewer_rows), "return as many rows"),
    "shape": (Sloppy(other_shape, forms=True), r"'0.weight': .* of its shape \(7, 6\)"),
    "nothing": (Sloppy(nothing, forms=True), r"returned nothing for '0.weight'"),
    "raises": (Sloppy(lambda gradient: 1 / 0), "division by zero"),
}


@pytest.mark.parametrize("name", SLOPPY)
def test_what_a_transform_returns_is_checked(name):
    transform, match = SLOPPY[name]

    def body(rank, group):
        replica = copy.deepcopy(MODEL)
        og.distribute(replica, og.DAD(always=True), group=group, transform=transform)
        with pytest.raises((ValueError, ZeroDivisionError), match=match):
            replica(X).sum().backward()

    run_on_lasting_groups(2, body)
