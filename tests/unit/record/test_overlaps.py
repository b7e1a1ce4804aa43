"""The share of duplicate directions is that of the principal angles."""

import math

import pytest
import torch
from torch import nn

import outergrad as og
from cases import Events
from outergrad.linalg.inner import shared_directions
from ranks import run_on_lasting_groups


def by_svd(own_RI, others_TI):
    """Mean squared cosine of the principal angles, by singular vectors in float64."""

    def basis(rows):
        _, sigma, v = torch.linalg.svd(rows.double(), full_matrices=False)
        return v[sigma > 1e-5 * sigma.max()]

    own, others = basis(own_RI), basis(others_TI)
    cosines = torch.linalg.svdvals(own @ others.mT)
    return float(cosines.square().sum()) / len(own)


def share(own_RI, others_TI):
    squares, count = shared_directions(own_RI[None], others_TI[None])
    return squares / count


@pytest.mark.parametrize(("own", "others", "width"), [(4, 6, 30), (8, 3, 9), (5, 20, 12)])
def test_it_is_that_of_singular_vectors(own, others, width):
    torch.manual_seed(own)
    common = torch.randn(2, width)
    own_RI = torch.cat([torch.randn(own, width), common])
    others_TI = torch.cat([torch.randn(others, width), torch.randn(3, 2) @ common])
    own_RI[0] *= 1e3
    assert share(own_RI, others_TI) == pytest.approx(by_svd(own_RI, others_TI), abs=1e-5)


def test_its_ends():
    eye = torch.eye(6)
    assert share(eye[:3], eye[3:]) == 0
    assert share(eye[:3], torch.randn(3, 3) @ eye[:3]) == pytest.approx(1)
    assert share(torch.cat([eye[:2], torch.zeros(2, 6)]), eye[1:3]) == pytest.approx(0.5)
    assert share(eye[:3], eye[:0]) == 0
    assert math.isnan(share(eye[:3] * math.nan, eye[:2]))
    assert shared_directions(torch.zeros(1, 2, 6), eye[None]) == (0, 0)


def test_random_directions_share_as_many_as_there_are():
    torch.manual_seed(0)
    assert share(torch.randn(20, 200), torch.randn(50, 200)) == pytest.approx(50 / 200, abs=0.03)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(40, 60), nn.Linear(60, 50)

    def forward(self, ids):
        return self.layer(self.table(ids)).tanh()


IDS = [torch.tensor([1, 2, 3, 4]), torch.tensor([3, 4, 5, 6, 7])]


def recorded(method):
    torch.manual_seed(2)
    original = Net()

    def body(rank, group):
        net, events = Net(), Events()
        net.load_state_dict(original.state_dict())
        session = og.distribute(net, method, group=group, recorder=events)
        for _ in range(2):
            net.zero_grad()
            net(IDS[rank]).square().mean().backward()
        session.detach()
        return {event.layer: event for event in events.layers}

    return original, run_on_lasting_groups(2, body)


@pytest.mark.parametrize(
    "method", [og.DAD(always=True), og.DAD(always=True, reveal="activations")], ids=["dad", "raw"]
)
def test_recorded_ones_are_of_the_rows_of_the_sites(method):
    """Activations of ids in common are the same at both sites; canonical rows span as much."""
    net, sites = recorded(method)
    rows = [net.table(ids).detach() for ids in IDS]
    for rank, layers in enumerate(sites):
        expected = by_svd(rows[rank], rows[1 - rank])
        assert layers["layer.weight"].duplicates == pytest.approx(expected, abs=1e-4)
        assert layers["table.weight"].duplicates == pytest.approx(2 / len(IDS[rank]))
        assert "duplicates" not in (layers["layer.weight"].unmeasured or {})


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (og.Dense(), "single sites' rows do not arrive"),
        (og.RankDAD(rank=2, reduce="all_reduce"), "single sites' rows do not arrive"),
        (og.RankDAD(rank=2, reduce="two_way"), "single sites' rows do not arrive"),
        (og.Sparse(density=0.1, always=True), "entries arrive, not rows"),
    ],
    ids=["dense", "all_reduce", "two way", "sparse"],
)
def test_where_rows_of_sites_do_not_arrive_it_is_said(method, why):
    for layers in recorded(method)[1]:
        event = layers["layer.weight"]
        assert event.duplicates is None
        assert event.unmeasured == {"duplicates": why}
