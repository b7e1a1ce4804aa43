"""What would break the promise of `og.Private` is refused, by name and with the remedy."""

from __future__ import annotations

import copy

import pytest
import torch
from examples.privacy import DPSGD
from torch import nn

import outergrad as og
from cases import mlp
from ranks import run_on_lasting_groups

SETTINGS = {"clip": 1.0, "noise": 1.0, "batch": 8}
PRIVATE = og.Private(**SETTINGS)
REFUSED_SETTINGS = {
    "clip": ({"clip": 0.0}, "clip=0.0; use a number above 0"),
    "clip, not finite": ({"clip": float("inf")}, "clip=inf; use a number above 0"),
    "noise": ({"noise": -1.0}, "noise=-1.0; use 0 or more"),
    "batch": ({"batch": 0}, "batch=0; use a number above 0"),
    "clipping": ({"clipping": "ghost"}, "use one of flat, per_layer, automatic, adaptive"),
    "stability": ({"stability": 0.0}, "stability=0.0; use"),
    "quantile": ({"quantile": 1.0}, "use a number between 0 and 1"),
    "rate": ({"rate": 0.0}, "rate=0.0; use"),
    "count noise": (
        {"clipping": "adaptive", "count_noise": 0.5},
        "count_noise=0.5; use more than noise / 2 = 0.5",
    ),
    "count noise of a small batch": ({"clipping": "adaptive"}, "or None with a larger batch"),
    "no generator": ({"generator": 3}, "a torch.Generator with a seed"),
    "seed": ({"generator": torch.Generator().manual_seed(1 << 32)}, "with an n below 4294967296"),
    "no seed": ({"generator": torch.Generator()}, "another one at each site"),
    "both": ({"secure": True, "generator": torch.Generator()}, "None with secure=True"),
}
SUMS = r"use og.Dense\(\), og.RankDAD\(reduce='all_reduce' or 'alternate'\)"
FEEDBACK = (
    r"keeps what it has not sent and adds it to later sums.*"
    r"error_feedback=None \(og.RankDAD\) or False"
)
WIDE = mlp(40, 48, 32)
NORMED = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
REFUSED = {
    "weights of sites": (WIDE, og.Dense(), {"weighting": "samples"}, "leave weighting='sites'"),
    "batch norm": (NORMED, og.Dense(), {"buffers": "local"}, "'1' is a BatchNorm1d.*GroupNorm"),
    "buffers": (NORMED[1:], og.Dense(), {}, "BatchNorm1d"),
    "feedback": (WIDE, og.RankDAD(reduce="all_reduce"), {}, rf"'0.weight' {FEEDBACK}"),
    "feedback of powersgd": (WIDE, og.PowerSGD(), {}, FEEDBACK),
    "feedback of entries": (WIDE, og.Sparse(select="random"), {}, FEEDBACK),
    "triplets": (WIDE, og.RankDAD(reduce="gather", error_feedback=None), {}, SUMS),
    "owners": (WIDE, og.RankDAD(reduce="two_way", error_feedback=None), {}, SUMS),
    "whatever is faster": (WIDE, og.RankDAD(error_feedback=None), {}, SUMS),
    "own entries": (WIDE, og.Sparse(error_feedback=False), {}, SUMS),
    "signs": (
        WIDE,
        og.Sparse(select="random", error_feedback=False, wire=og.wire.Sign()),
        {},
        SUMS,
    ),
    "later in a schedule": (
        WIDE,
        og.Schedule({0: og.Dense(), 9: og.RankDAD(error_feedback=None)}),
        {},
        SUMS,
    ),
    "of a layer": (
        WIDE,
        og.PerLayer({"2.*": og.PowerSGD(), "*": og.Dense()}),
        {},
        rf"'2.weight' {FEEDBACK}",
    ),
    "local steps": (WIDE, og.LocalSteps(4), {}, "og.LocalSteps sends how weights"),
    "edad": (mlp(6, 7, 7, 5), og.EDAD(), {}, r"computed again by every site.*og.DAD\(\)"),
    "several passes": (WIDE, og.Dense(every=2), {}, "every=2.*leave every=1"),
}
FITTING = {
    "dense": og.Dense(),
    "dad": og.DAD(),
    "sketches": og.RankDAD(rank=2, reduce="all_reduce", error_feedback=None),
    "alternating": og.RankDAD(rank=2, reduce="alternate", error_feedback=None),
    "powersgd": og.PowerSGD(rank=2, error_feedback=False),
    "entries": og.Sparse(density=0.1, select="random", error_feedback=False),
    "schedule": og.Schedule({0: og.Dense(), 2: og.PowerSGD(error_feedback=False)}),
    "parts": og.PerLayer({"0.*": og.Local(), "*": og.Dense()}),
}


@pytest.mark.parametrize(("settings", "told"), REFUSED_SETTINGS.values(), ids=REFUSED_SETTINGS)
def test_a_setting_out_of_range(settings, told):
    with pytest.raises(ValueError, match=f"Private: .*{told}"):
        og.Private(**(SETTINGS | settings))


@pytest.mark.parametrize(("model", "method", "about", "told"), REFUSED.values(), ids=REFUSED)
def test_refused_on_every_site(model, method, about, told):
    def body(rank, group):
        with pytest.raises(ValueError, match=told):
            og.distribute(copy.deepcopy(model), method, group=group, transform=PRIVATE, **about)

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize("method", FITTING.values(), ids=FITTING)
def test_methods_that_send_sums_train(method):
    def body(rank, group):
        torch.manual_seed(0)
        model, found = copy.deepcopy(WIDE), []
        session = og.distribute(model, method, group=group, transform=og.Private(**SETTINGS))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for size in (4, 0, 6):
            optimizer.zero_grad()
            model(torch.ones(size, 40)).square().mean().backward()
            optimizer.step()
            found += [p.grad for n, p in model.named_parameters() if n in dict(session_params)]
        session.detach()
        return found

    session_params = [(n, p) for n, p in WIDE.named_parameters() if not n.startswith("0.")]
    first, second = run_on_lasting_groups(2, body)
    assert all(
        torch.equal(*pair) and bool(pair[0].any()) for pair in zip(first, second, strict=True)
    )


def in_session(do, noise=1.0):
    def body(rank, group):
        model = copy.deepcopy(WIDE)
        private = og.Private(**(SETTINGS | {"noise": noise}))
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        do(session, model)
        session.detach()

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_site_may_not_run_out(noise):
    def do(session, model):
        with pytest.raises(RuntimeError, match="every site make the same number of steps"):
            session.join()

    in_session(do, noise)


def test_a_scaler_is_refused_before_its_first_step():
    def do(session, model):
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = copy.deepcopy(model.state_dict())
        scaler.scale(model(torch.ones(2, 40)).mean()).backward()
        with pytest.raises(RuntimeError, match="train without a GradScaler"):
            scaler.step(optimizer)
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())

    in_session(do)


def test_a_scaler_that_does_nothing_or_steps_another_model_is_not():
    def do(session, model):
        off = torch.amp.GradScaler("cpu", enabled=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        off.scale(model(torch.ones(2, 40)).mean()).backward()
        off.step(optimizer)
        other, scaler = nn.Linear(2, 2), torch.amp.GradScaler("cpu")
        scaler.scale(other(torch.ones(1, 2)).sum()).backward()
        scaler.step(torch.optim.SGD(other.parameters(), lr=0.1))

    in_session(do)


def test_every_transform_that_needs_samples_refuses_a_scaler():
    def body(rank, group):
        model = copy.deepcopy(WIDE)
        session = og.distribute(model, og.Dense(), group=group, transform=DPSGD(1.0))
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 40)).mean()).backward()
        with pytest.raises(RuntimeError, match="train without a GradScaler"):
            scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
        session.detach()

    run_on_lasting_groups(2, body)


def test_sites_with_other_settings_are_told_so():
    def body(rank, group):
        private = og.Private(**(SETTINGS | {"noise": 1.0 + rank}))
        with pytest.raises(ValueError, match=r"noise=2\.0"):
            og.distribute(copy.deepcopy(WIDE), og.Dense(), group=group, transform=private)

    run_on_lasting_groups(2, body)
