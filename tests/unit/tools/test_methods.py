from __future__ import annotations

from functools import partial, wraps
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outergrad as og
from forked import forked_processes
from outergrad.launch.errors import RecipeError
from outergrad.launch.start import run_sites
from outergrad.optim import OuterMuon
from outergrad.tools.named_methods import attach as methods
from outergrad.tools.named_methods.attach import (
    METHODS,
    Distributed,
    Replica,
    all_reduce_bytes,
    attach_of,
)
from outergrad_lab.models.small import mlp
from ranks import run_ranks

STEPS = 4
WIDTHS = (40, 50, 30, 3)
PARAMETERS = sum((inputs + 1) * outputs for inputs, outputs in pairwise(WIDTHS))
SILENT = {"pooled", "alone"}
EXCHANGING = [name for name in METHODS if name not in SILENT]
ROUNDED = [name for name in METHODS if name.startswith(("ddp-fp16", "powersgd", "rank-dad"))]


def take_steps(replica: Replica, rank: int = 0) -> Tensor:
    """Trains for some steps on this site's rows; returns all weights in one row."""
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(replica.model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(8, WIDTHS[0], generator=generator)
        optimizer.zero_grad()
        cross_entropy(replica.model(x), torch.arange(8) % WIDTHS[-1]).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(replica.model.parameters()).detach()


def attach(method: str, group: dist.ProcessGroup | None = None) -> Replica:
    """The same small model every time."""
    torch.manual_seed(0)
    return METHODS[method](mlp(WIDTHS), group)


@pytest.mark.parametrize("method", METHODS)
def test_one_site_takes_its_steps_by_every_method(one_site, method):
    replica, reference = attach(method), attach("alone")
    weights, expected = take_steps(replica), take_steps(reference)
    replica.close()
    if method.startswith("powersgd"):
        assert weights.isfinite().all()
        assert replica.sent_bytes is None
    else:
        assert torch.allclose(weights, expected, atol=1e-3 if method in ROUNDED else 1e-6)
        assert replica.sent_bytes is not None


def test_one_site_sends_nothing_by_ddp(one_site):
    assert attach("ddp").sent_bytes == attach("ddp-fp16").sent_bytes == 0
    assert all_reduce_bytes(nn.Linear(3, 4)) == 0


OURS = [name for name in EXCHANGING if not name.startswith(("ddp", "powersgd"))]


@pytest.mark.parametrize("method", sorted(set(EXCHANGING) - set(OURS)))
def test_ddp_uses_the_group_that_is_passed(one_site, method):
    """By one site: PyTorch's DDP is not made for ranks in threads."""
    group = dist.new_group()
    assert attach(method, group).model.process_group is group


@pytest.mark.parametrize("method", OURS)
def test_ours_use_the_group_that_is_passed(method):
    def body(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, int | None]:
        replica = METHODS[method](model[rank], group)
        weights = take_steps(replica, rank)
        replica.close()
        return weights, replica.sent_bytes

    model = [mlp(WIDTHS) for _ in range(2)]
    (first, sent_bytes), (second, _) = run_ranks(2, body)
    assert first.equal(second)
    if method == "dense":
        assert sent_bytes == pytest.approx(4 * PARAMETERS, rel=0.05)
    else:
        assert 0 < sent_bytes < 4 * PARAMETERS


def spy_on_powersgd() -> list[tuple[int, bool, int]]:
    """Collects index, whether it is the last, and numbers of each bucket from now on."""
    buckets, hook = [], methods.powerSGD_hook

    @wraps(hook)  # DDP looks at a hook's name and signature
    def spying(state, bucket):
        buckets.append((bucket.index(), bucket.is_last(), bucket.buffer().numel()))
        return hook(state, bucket)

    methods.powerSGD_hook = spying
    return buckets


def site_of_rounded_methods() -> None:
    """What one of two sites finds of the methods that lose something; each of them in one go."""
    buckets, weights = spy_on_powersgd(), {}
    for method in ("ddp", *ROUNDED):
        weights[method] = take_steps(attach(method), dist.get_rank())
        both = [torch.empty_like(weights[method]) for _ in range(2)]
        dist.all_gather(both, weights[method])
        assert both[0].equal(both[1]), method
    powersgd = sum(method.startswith("powersgd") for method in ROUNDED)
    assert buckets == [(0, True, PARAMETERS)] * STEPS * powersgd
    assert attach("ddp").sent_bytes == 2 * attach("ddp-fp16").sent_bytes == 4 * PARAMETERS
    errors = {method: (weights[method] - weights["ddp"]).norm().item() for method in ROUNDED}
    assert 0 < errors["ddp-fp16"] < 1e-3
    assert errors["powersgd-1"] > errors["powersgd-4"] > 0


@pytest.mark.slow
def test_two_sites_agree_by_the_methods_that_round():
    with forked_processes():
        run_sites(site_of_rounded_methods, 2)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("dad:bucket_bytes=65536", og.DAD(bucket_bytes=65536)),
        ("rank-dad", og.RankDAD()),
        ("rank-dad:rank=16:tolerance=0.1", og.RankDAD(rank=16, tolerance=0.1)),
        (
            "rank-dad:wire=bf16:error_feedback=None",
            og.RankDAD(wire=og.wire.BF16(), error_feedback=None),
        ),
        ("rank-dad:rank=4:wire=fp32", og.RankDAD()),
        ("edad:inputs=raw", og.EDAD(inputs="raw")),
        ("edad:blocks=a.*+b", og.EDAD(blocks=["a.*", "b"])),
        ("dense:every=3", og.Dense(every=3)),
        ("og-powersgd:rank=2", og.PowerSGD(rank=2)),
        ("dad:wire=int8", og.DAD(wire=og.wire.Int8())),
        ("rank-dad:budget=160kB", og.RankDAD(budget="160kB")),
        ("rank-dad:budget=1/64", og.RankDAD(budget="1/64")),
        ("rank-dad:vectors=int3", og.RankDAD(vectors=og.wire.Int3())),
        ("rank-dad:wire=int4", og.RankDAD(wire=og.wire.Int4())),
        ("rank-dad:wire=topk0.3+int2", og.RankDAD(wire=(og.wire.TopK(0.3), og.wire.Int2()))),
        ("sparse", og.Sparse()),
        (
            "sparse:select=random:wire=sign:vectors=sign",
            og.Sparse(select="random", wire=og.wire.Sign(), vectors=og.wire.Sign()),
        ),
        ("sparse:density=0.01:select=topk", og.Sparse(select="topk")),
        (
            "sparse:density=0.1:select=blocks:block=16:momentum=0.9:warmup=100:wire=int8",
            og.Sparse(
                density=0.1,
                select="blocks",
                block=16,
                momentum=0.9,
                warmup=100,
                wire=og.wire.Int8(),
            ),
        ),
        ("sparse:error_feedback=False:always=True", og.Sparse(error_feedback=False, always=True)),
        ("rank-dad:wire=topk0.1+int8", og.RankDAD(wire=(og.wire.TopK(0.1), og.wire.Int8()))),
    ],
)
def test_a_method_can_be_named_with_settings(name, method):
    assert attach_of(name) == Distributed(method)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("local-steps", og.LocalSteps(50)),
        ("local-steps:k=7", og.LocalSteps(7)),
        (
            "local-steps:k=7:method=rank-dad:rank=2:wire=bf16",
            og.LocalSteps(7, method=og.RankDAD(rank=2, wire=og.wire.BF16())),
        ),
        (
            "local-steps:k=7:method=sparse:density=0.05",
            og.LocalSteps(7, method=og.Sparse(density=0.05)),
        ),
        (
            "local-steps:k=8:stream=2:overlap=1:alpha=0.25:method=rank-dad:budget=3kB",
            og.LocalSteps(8, method=og.RankDAD(budget="3kB"), stream=2, overlap=1, alpha=0.25),
        ),
        (
            "local-steps:k=2:error_reset=True:method=rank-dad-4",
            og.LocalSteps(2, method=og.RankDAD(rank=4), error_reset=True),
        ),
        (
            "local-steps:k=2:error_reset=True:whole=True:method=rank-dad-4",
            og.LocalSteps(2, method=og.RankDAD(rank=4), error_reset=True),
        ),
        ("local-steps:k=2:quorum=2:grace=0.5", og.LocalSteps(2, quorum=2, grace=0.5)),
        ("local-steps:k=2:quorum=0.5:grace=3", og.LocalSteps(2, quorum=0.5, grace=3)),
        (
            "local-steps:k=7:lr=1:momentum=0",
            og.LocalSteps(7, outer=lambda params: torch.optim.SGD(params, lr=1.0)),
        ),
        ("local-steps:k=6:stream=2:outer=muon", og.LocalSteps(6, outer=OuterMuon, stream=2)),
        (
            "local-steps:k=6:outer=muon-tables",
            og.LocalSteps(6, outer=partial(OuterMuon, tables=True)),
        ),
        ("local-steps:k=6:outer=muon:lr=1", og.LocalSteps(6, outer=partial(OuterMuon, lr=1.0))),
    ],
)
def test_local_steps_can_be_named_with_settings(name, method):
    assert repr(attach_of(name).method) == repr(method)


@pytest.mark.parametrize("settings", ["outer=adam", "outer=muon:momentum=0.9", "outer=muon:lr=0"])
def test_other_outer_optimizers_are_refused(settings):
    with pytest.raises(RecipeError, match=r"(outer|momentum|lr)=.*; (use|outer=muon has none)"):
        attach_of(f"local-steps:k=6:{settings}")


@pytest.mark.parametrize("inner", ["dense", "rank-dad:rank=2"])
def test_federated_averaging_adopts_the_mean_by_samples(inner):
    found = attach_of(f"fedavg:k=7:method={inner}")
    assert repr(found.method) == repr(
        attach_of(f"local-steps:k=7:lr=1:momentum=0:method={inner}").method
    )
    assert found.options == {"weighting": "samples"}


def test_local_steps_may_leave_parts_local():
    found = attach_of("local-steps:k=7", local=["stem.*"]).method
    assert found.method == og.PerLayer({"stem.*": og.Local(), "*": og.Dense()})
    with pytest.raises(RecipeError, match="joint=True"):
        attach_of("local-steps:k=7", local=["stem.*"], joint=True)


def test_the_hook_of_powersgd_has_the_rank_that_is_named(one_site, monkeypatch):
    states = []
    monkeypatch.setattr(methods, "PowerSGDState", lambda **made: states.append(made))
    attach_of("powersgd:rank=16")(mlp(WIDTHS), None)
    assert states[0]["matrix_approximation_rank"] == 16


def test_parts_may_be_local():
    found = attach_of("dad", local=["encoder.*", "stem.*"], joint=True)
    local = {"encoder.*": og.Local(), "stem.*": og.Local()}
    assert found == Distributed(og.PerLayer({**local, "*": og.DAD()}, joint=True))
    with pytest.raises(RecipeError, match="do not go with --method ddp"):
        attach_of("ddp", local=["encoder.*"])
    with pytest.raises(RecipeError, match="joint=True"):
        attach_of("dad", joint=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("magic", "must be one of pooled"),
        ("magic:rank=2", "must be one of pooled"),
        ("ddp:rank=2", "must be one of pooled.*, not 'ddp:rank=2': ddp has no settings"),
        ("rnak-dad", r"not 'rnak-dad' \(did you mean rank-dad\?\)"),
        ("DAD", r"did you mean dad\?"),
        ("rank-dad:rnk=16", r"there is no setting 'rnk' \(did you mean rank\?\)"),
        ("rank-dad:rank=abc", "RankDAD: rank='abc'; use a whole number"),
        ("rank-dad:rank=2.5", "RankDAD: rank=2.5; use a whole number"),
        ("rank-dad:rank=8:rank=4", "rank= is there twice"),
        ("rank-dad-0", "RankDAD: rank=0; use 1 or more"),
        ("dad:always=1", "DAD: always=1; use True or False"),
        ("sparse:density=x", "Sparse: density='x'; use a number"),
        ("local-steps:k=a", "LocalSteps: k='a'; use a whole number"),
        ("rank-dad:rank=0", "rank-dad:rank=0: RankDAD: rank=0; use 1 or more"),
        ("rank-dad:rank", "rank"),
        (
            "rank-dad:wire=int5",
            "wire=int5; use bf16, int8, int4, int3, int2, sign, topk with a fraction",
        ),
        ("rank-dad:wire=topk", "wire=topk; use bf16, int8, int4, int3, int2, sign, topk with a f"),
        ("rank-dad:wire=topk2", "TopK: fraction=2.0; use a number in"),
        ("rank-dad:wire=bf16+int8", "BF16 and Int8 each write values in a dtype of their own"),
        ("og-powersgd:wire=int8", "PowerSGD: wire="),
        ("sparse:density=0", "sparse:density=0: Sparse: density=0; use a number in"),
        ("sparse:select=best", "Sparse: select=.best.; use one of"),
        ("sparse:select=random:vectors=int8", "a wire that drops numbers"),
        ("powersgd:rank=0", "powersgd:rank=0: rank=0; use 1 or more"),
        ("dense:rank=2", "there is no setting 'rank'; use every"),
        ("local-steps:k=0", "LocalSteps: k=0; use a whole number, 1 or more"),
        ("local-steps:k=9:stream=2", "LocalSteps: stream=2; use a whole number, 1 or more, that"),
        ("local-steps:method=ddp", "method=ddp; use dense, rank-dad, og-powersgd or sparse"),
        ("local-steps:method=local-steps:k=2", "use dense, rank-dad, og-powersgd or sparse"),
        ("local-steps:method=dad", "has no factors"),
        ("dad:colour=red", "there is no setting 'colour'; use"),
    ],
)
def test_a_method_that_is_not_there_is_one_line(name, said):
    with pytest.raises(RecipeError, match=said) as caught:
        attach_of(name)
    assert "\n" not in str(caught.value)


def test_a_rank_may_stand_in_the_name():
    assert attach_of("rank-dad-3") == Distributed(og.RankDAD(rank=3))
    assert callable(attach_of("powersgd-3"))
