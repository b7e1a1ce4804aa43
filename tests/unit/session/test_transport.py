"""What `transport=` goes with, and what a transport must be able to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outergrad as og
from cases import mlp
from meshes import run_mesh
from outergrad.comm.cost import StarCost
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.trace import Tracer
from outergrad.core.transport import Capability
from outergrad.core.types import Link, Route
from outergrad.session.attach import attach
from ranks import run_on_lasting_groups

CPU = torch.device("cpu")


class Unopened:
    """A transport that goes by no setting of `distribute`."""

    settings = frozenset()

    def open(self, device):
        raise AssertionError("opened")


class Mesh:
    mesh_dim_names = ("site", "local")


REFUSED = {
    "group": ({"group": object()}, "group= and transport=Unopened.*leave it out"),
    "timeout": ({"timeout": 3.0}, "timeout= and transport=Unopened.*leave it out"),
    "mesh": ({"mesh": Mesh()}, "mesh= with transport=Unopened.*leave one of them out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_transport_does_not_go_by_is_refused(case):
    settings, match = REFUSED[case]
    with pytest.raises(ValueError, match=match):
        og.distribute(nn.Linear(2, 2), transport=Unopened(), **settings)


def test_without_a_process_group_the_default_says_what_to_do():
    with pytest.raises(RuntimeError, match="init_process_group"):
        og.distribute(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="init_process_group"):
        og.TorchDistributed().open(CPU)


def test_the_one_that_is_given_is_what_a_session_sends_through():
    x = torch.randn(2, 3, 4)

    class Kept(og.TorchDistributed):
        def open(self, device, **settings):
            self.comm = super().open(device, **settings)
            return self.comm

    def body(rank, group):
        kept, model = Kept(), nn.Linear(4, 2)
        session = og.distribute(model, transport=kept, group=group, timeout=3.0)
        model(x[rank]).sum().backward()
        assert kept.comm.patience_s == 3.0
        assert session.stats().total_sent_bytes == kept.comm.sent_bytes > 0
        session.detach()

    run_on_lasting_groups(2, body)


def test_a_mesh_opens_the_one_that_is_given_twice():
    """Between the sites, and inside each."""
    x = torch.randn(4, 3, 4)

    class Kept(og.TorchDistributed):
        def __init__(self):
            self.opened = []

        def open(self, device, **settings):
            self.opened.append(super().open(device, **settings))
            return self.opened[-1]

    def body(mesh):
        kept, model = Kept(), nn.Linear(4, 2)
        session = og.distribute(model, og.DAD(always=True), mesh=mesh, transport=kept)
        model(x[mesh.number]).sum().backward()
        session.detach()
        assert [comm.key for comm in kept.opened] == list(map(mesh.get_group, ("site", "local")))
        return model.weight.grad

    for found in run_mesh(2, 2, body):
        torch.testing.assert_close(found, x.sum(1).mean(0).expand(2, 4))


# -- what a transport cannot do -------------------------------------------------------------------


class Gathering(MirrorComm):
    """Without messages of their own for every site."""

    capabilities = frozenset({Capability.ALL_REDUCE})


class Sumless(MirrorComm):
    capabilities = frozenset({Capability.ALL_TO_ALL})


LINK = Link(1e-2, 1e5)
LACKING = {
    "two ways": (og.RankDAD(rank=2, reduce="two_way"), Gathering, "all_to_all.*reduce='gather'"),
    "in a part": (
        og.PerLayer({"0.*": og.RankDAD(rank=2, reduce="two_way"), "*": og.DAD()}),
        Gathering,
        "PerLayer.*all_to_all.*reduce='gather'",
    ),
    "dense": (og.Dense(), Sumless, "Dense.*all_reduce.*use another transport"),
    "maybe dense": (og.DAD(always=True), Sumless, "DAD.*all_reduce.*use another transport"),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_a_method_needs_and_the_transport_lacks_is_refused(case):
    method, kind, match = LACKING[case]
    with pytest.raises(ValueError, match=match):
        attach(mlp(6, 8, 5), method, kind(4, Tracer()), LINK)


def test_distribute_refuses_it_on_all_sites_in_the_same_words():
    class Lacking(og.TorchDistributed):
        def open(self, device, **settings):
            comm = super().open(device, **settings)
            comm.capabilities = frozenset({Capability.ALL_REDUCE})
            return comm

    def body(rank, group):
        method = og.RankDAD(rank=2, reduce="two_way")
        with pytest.raises(ValueError, match=r"RankDAD.*all_to_all.*TorchComm") as caught:
            og.distribute(nn.Linear(4, 2), method, transport=Lacking(), group=group)
        return str(caught.value)

    first, second = run_on_lasting_groups(2, body)
    assert first == second


@pytest.mark.parametrize("what", ["cost", "capabilities"])
def test_sites_whose_transports_differ_would_plan_differently(what):
    other = {"cost": StarCost(3), "capabilities": frozenset({Capability.ALL_REDUCE})}[what]

    class Odd(og.TorchDistributed):
        def open(self, device, **settings):
            comm = super().open(device, **settings)
            if comm.rank == 1:
                setattr(comm, what, other)
            return comm

    def body(rank, group):
        with pytest.raises(ValueError, match="the sites do not agree: site 1") as caught:
            og.distribute(nn.Linear(4, 2), transport=Odd(), group=group)
        return str(caught.value)

    assert len({*run_on_lasting_groups(3, body)}) == 1


def test_low_rank_takes_no_way_that_the_transport_does_not_have():
    """Four sites of a link on which two ways are the fastest."""
    method = og.RankDAD(rank=2)
    compressor, lacking = method.compressor(), method.compressor()
    units = attach(mlp(200, 200, 5), method, MirrorComm(4, Tracer()), LINK)._exchange.model.units
    for one, kind in ((compressor, MirrorComm), (lacking, Gathering)):
        comm = kind(4, Tracer())
        one.settle(comm.cost, comm.capabilities)
        one.settle_reduce(units, 4, Link(delay_s=0.022, bytes_per_s=1e5))
    assert compressor.auto_way.way == Route.TWO_WAY
    assert lacking.auto_way.way != Route.TWO_WAY
