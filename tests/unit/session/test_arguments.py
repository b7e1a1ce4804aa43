"""What people pass by mistake: one clear line each, on every site, where the sites can talk."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import outergrad as og
from cases import mlp
from ranks import run_ranks, try_ranks


class OwnRule:
    """No rule yet."""


class Same:
    """A transform that changes nothing."""

    needs_samples = needs_all_layers = False

    def __call__(self, gradient: Any) -> Any:
        return gradient


class FakeMesh:
    """As a `DeviceMesh` is."""

    def get_group(self, mesh_dim: Any = None) -> Any:
        raise AssertionError("asked")


def _meta() -> nn.Module:
    with torch.device("meta"):
        return mlp(3, 2)


TOLD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "parameters": (
        {"model": list(mlp(3, 2).parameters())},
        TypeError,
        r"^model=a list of 2 Parameter: pass a torch\.nn\.Module first",
    ),
    "one parameter": (
        {"model": mlp(3, 2)[0].weight},
        TypeError,
        r"^model=a Parameter of shape \(2, 3\): pass a torch\.nn\.Module",
    ),
    "a state": (
        {"model": mlp(3, 2).state_dict()},
        TypeError,
        r"^model=a OrderedDict of 2 Tensor: pass a torch\.nn\.Module",
    ),
    "class of model": (
        {"model": nn.Linear},
        TypeError,
        r"class Linear: pass an object, Linear",
    ),
    "no model": ({"model": None}, TypeError, r"^model=None: pass a torch\.nn\.Module first"),
    "on meta": ({"model": _meta()}, ValueError, r"'0\.weight' is on meta .*to_empty\(device="),
    "method by name": ({"method": "dad"}, TypeError, r"^method='dad': pass og\.DAD\(\.\.\.\)"),
    "class of method": ({"method": og.DAD}, TypeError, r"class DAD: pass an object, as og\.DAD\("),
    "method by number": ({"method": 4}, TypeError, r"^method=4: pass og\.DAD\("),
    "path of recorder": (
        {"recorder": "runs/x"},
        TypeError,
        r"^recorder='runs/x': pass a recorder, as og\.JSONL\('runs/x'\)$",
    ),
    "Path of recorder": ({"recorder": Path("runs")}, TypeError, r"as og\.JSONL\('runs'\)$"),
    "class of recorder": ({"recorder": og.JSONL}, TypeError, r"class JSONL: pass an object, as og"),
    "recorder": ({"recorder": 3}, TypeError, r"^recorder=3 has no method record\(event\)"),
    "text of seconds": ({"timeout": "60"}, TypeError, r"^timeout='60': pass seconds, as 60\.0"),
    "timeout of True": ({"timeout": True}, TypeError, r"^timeout=True: pass seconds"),
    **{
        f"timeout {value}": ({"timeout": value}, ValueError, "timeout=.*use seconds above 0")
        for value in (0, -1.0, math.nan, math.inf, 1e30, timedelta(0), timedelta(seconds=-1))
    },
    "rules as a list": (
        {"rules": [nn.Linear]},
        TypeError,
        r"^rules=a list of 1 type: pass \{",
    ),
    "rules by name": (
        {"rules": {"Linear": 1}},
        TypeError,
        r"^rules=\{'Linear': \.\.\.\} is not",
    ),
    "class of rule": ({"rules": {nn.Linear: OwnRule}}, TypeError, r"Linear: OwnRule\} is no rule"),
    "no rule": ({"rules": {nn.Linear: None}}, TypeError, r"Linear: None\} is no rule"),
    "buffers": (
        {"buffers": "sum"},
        ValueError,
        "^buffers='sum': pass one of broadcast",
    ),
    "buffers as a flag": ({"buffers": True}, ValueError, "^buffers=True: pass one of"),
    "weighting": ({"weighting": "rows"}, ValueError, "^weighting='rows': pass one of sites"),
    "on_drift": ({"on_drift": None}, ValueError, "^on_drift=None: pass one of raise"),
    "verify_every": ({"verify_every": 0}, ValueError, "^verify_every=0: pass a number of steps"),
    "max_bad_steps": ({"max_bad_steps": -1}, ValueError, "^max_bad_steps=-1: pass a number of ste"),
    "max_bad_steps True": ({"max_bad_steps": True}, ValueError, "^max_bad_steps=True: pass a num"),
    "max_bad_steps text": ({"max_bad_steps": "3"}, ValueError, "^max_bad_steps='3': pass a number"),
    "class of transform": ({"transform": Same}, TypeError, r"class Same: pass an object, Same\("),
    "transform": ({"transform": 0.5}, TypeError, r"^transform=0\.5: pass an object that can be c"),
}
"""What the sites can still tell each other of."""


def distribute(group: Any, about: dict[str, Any]) -> og.Session:
    settings = dict(about)
    model = settings.pop("model") if "model" in settings else mlp(3, 2)
    return og.distribute(model, **{"group": group, "method": og.DAD(), **settings})


@pytest.mark.parametrize("what", TOLD)
def test_all_sites_raise_what_one_site_is_told(what):
    about, kind, match = TOLD[what]

    def body(rank, group):
        distribute(group, about if rank == 1 else {})

    first, second = try_ranks(2, body, timedelta(seconds=10))
    assert isinstance(first, ValueError)
    assert "site 1 could not take part" in str(first)
    assert isinstance(second, kind), repr(second)
    with pytest.raises(kind, match=match):
        raise second
    assert "\n" not in str(second)
    assert len(str(second)) < 300


@pytest.mark.parametrize("what", TOLD)
def test_a_group_is_as_before_afterwards(what):
    def body(rank, group):
        with pytest.raises((ValueError, TypeError)):
            distribute(group, TOLD[what][0])
        model = mlp(3, 2)
        og.distribute(model, og.DAD(), group=group)
        model(torch.ones(2, 3)).sum().backward()
        return model[0].weight.grad

    run_ranks(2, body)


ALONE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kit": (
        {"transport": "site.kit"},
        TypeError,
        r"^transport='site\.kit': .*og\.Star",
    ),
    "class of transport": (
        {"transport": og.Star},
        TypeError,
        "class Star: pass an object",
    ),
    "no transport": ({"transport": 3}, TypeError, "^transport=3: pass an object"),
    "group by name": ({"group": "world"}, TypeError, r"^group='world': .*distributed\.new_group"),
    "ranks": ({"group": [0, 1]}, TypeError, "^group=a list of 2 int: pass a process group"),
    "no member": (
        {"group": dist.GroupMember.NON_GROUP_MEMBER},
        ValueError,
        "^this rank is not in group=: call og.distribute.. on the ranks of the group alone",
    ),
    "minus 100": ({"group": -100}, ValueError, "^this rank is not in group="),
    "group as a mesh": ({"group": FakeMesh()}, TypeError, "^group is a FakeMesh: pass mesh="),
    "mesh": ({"mesh": (2, 2)}, TypeError, "^mesh=a tuple of 2 int: pass a torch.*DeviceMesh"),
    "model, no group": ({"model": [1]}, TypeError, "^model=a list of 1 int: pass"),
}
"""What a site cannot reach the others with; there is no process group."""


@pytest.mark.parametrize("what", ALONE)
def test_what_no_other_site_can_hear_of(what):
    about, kind, match = ALONE[what]
    with pytest.raises(kind, match=match):
        distribute(None, about)


def test_in_inference_mode():
    def body(rank, group):
        model = mlp(3, 2)
        with (
            torch.inference_mode(),
            pytest.raises(ValueError, match="in which nothing"),
        ):
            og.distribute(model, og.DAD(), group=group)

    run_ranks(2, body)


def test_two_models_that_share_an_encoder():
    """The remedy works, and is the one that is offered."""

    def body(rank, group):
        encoder = nn.Linear(3, 3)
        first, second = nn.Sequential(encoder, nn.Linear(3, 1)), nn.Sequential(encoder, nn.ReLU())
        third = nn.Sequential(encoder, nn.Linear(3, 2))
        session = og.distribute(first, og.DAD(), group=group)
        with pytest.raises(ValueError, match=r"distributed already: call session\.detach\(\)"):
            og.distribute(second, og.DAD(), group=group)
        remedy = r"'0\.weight' is distributed already, with another model .*ModuleList"
        with pytest.raises(ValueError, match=remedy):
            og.distribute(third, og.DAD(), group=group)
        session.detach()
        og.distribute(nn.ModuleList([first, third]), og.DAD(), group=group)
        x = torch.full((2, 3), rank + 1.0)
        (first(x).sum() + third(x).sum()).backward()
        return encoder.weight.grad

    one, two = run_ranks(2, body)
    assert torch.equal(one, two)


@pytest.mark.filterwarnings("ignore:You are using a Backend")  # of RPC, when it ends
@pytest.mark.parametrize("method", [og.Dense(), og.DAD(always=True)], ids=["dense", "dad"])
def test_the_backward_of_rpc_is_named(method, tmp_path, one_site):
    """Its engine tells nothing of what hooks raise but "python_error"."""
    rpc, autograd = pytest.importorskip("torch.distributed.rpc"), torch.distributed.autograd
    if not torch.distributed.rpc.is_available():
        pytest.skip("no RPC in this PyTorch")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/meeting")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        model = mlp(3, 2)
        session = og.distribute(model, method)
        loss = model(torch.ones(2, 3)).sum()
        with (
            autograd.context() as context,
            pytest.warns(RuntimeWarning, match=r"distributed\.autograd .RPC.*call loss\.backward"),
            pytest.raises(RuntimeError, match="python_error"),
        ):
            autograd.backward(context, [loss])
        model(torch.ones(2, 3)).sum().backward()
        assert model[0].weight.grad is not None
        session.detach()
    finally:
        rpc.shutdown()


OF_SESSIONS: dict[str, tuple[Any, type[Exception], str]] = {
    "join": (
        lambda s: s.join(
            step=torch.optim.SGD(s._exchange.model.params.values(), lr=1.0)
        ).__enter__(),
        TypeError,
        r"join\(step=a SGD\): .*step=optimizer\.step",
    ),
    "make_equal": (
        lambda s: s.make_equal([1]),
        TypeError,
        r"make_equal\(a list\): pass optim",
    ),
    "samples": (lambda s: s.samples("3"), ValueError, r"samples\(3\): pass a whole number"),
    "no samples": (lambda s: s.samples(None), ValueError, r"samples\(None\): pass a whole number"),
    "log": (lambda s: s.log(loss="low"), TypeError, "loss"),
}


@pytest.mark.parametrize("what", OF_SESSIONS)
def test_what_sessions_are_asked(what):
    ask, kind, match = OF_SESSIONS[what]

    def body(rank, group):
        session = og.distribute(mlp(3, 2), og.DAD(), group=group, weighting="samples")
        with pytest.raises(kind, match=match):
            ask(session)
        session.detach()

    run_ranks(2, body)


STARS = {
    "kit": ({"kit": 3}, TypeError, "kit=3: pass a text"),
    "hub": ({"hub": 8443}, TypeError, "hub=8443: pass a text"),
    "wait_s": ({"wait_s": "60"}, ValueError, "wait_s='60': pass seconds above 0"),
    "no wait_s": ({"wait_s": math.nan}, ValueError, "wait_s=nan: pass seconds above 0"),
    "blind": ({"blind": "yes"}, ValueError, "blind='yes': pass True or False"),
    "min_sites": ({"min_sites": 2.5}, ValueError, "min_sites=2.5: pass 1 or more"),
    "when_lost": ({"when_lost": "stop"}, ValueError, "when_lost='stop': pass 'raise' or 'go on'"),
}


@pytest.mark.parametrize("what", STARS)
def test_settings_of_a_star(what):
    about, kind, match = STARS[what]
    with pytest.raises(kind, match=match):
        og.Star(**about)
