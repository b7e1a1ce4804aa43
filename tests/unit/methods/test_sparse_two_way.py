"""Signs through owners: what a mean loses, who owes it, and how many bytes travel."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.wire import Sign
from ranks import run_on_lasting_groups

SIGNS = og.Sparse(
    density=0.5, select="random_blocks", block=8, wire=Sign(), vectors=Sign(), always=True
)

MERGED = replace(SIGNS, reduce="two_way")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def test_signs_that_all_sites_share_arrive_as_they_are():
    """Of one magnitude: neither a site nor an owner has anything to round."""

    def body(rank, group):
        net = nn.Linear(64, 32)
        session = og.distribute(net, replace(MERGED, density=1.0), group=group)
        pattern = torch.arange(32)[:, None] + torch.arange(64) & 1
        loss = (net.weight * (1 - 2 * pattern)).sum() + net.bias.sum()
        (loss + 0 * net(torch.ones(1, 64)).sum()).backward()
        session.detach()
        return net.weight.grad, 1.0 - 2 * pattern, net.bias.grad

    for found, wanted, bias in run_on_lasting_groups(3, body):
        assert found.equal(wanted)
        assert bias.equal(torch.ones(32))


@pytest.mark.parametrize("sites", [3, 5])
def test_a_site_sends_its_values_twice_however_many_sites_there_are(sites):
    original = model()

    def body(rank, group):
        sent = {}
        for method in (SIGNS, MERGED):
            net = copy.deepcopy(original)
            session = og.distribute(net, method, group=group)
            for _ in range(2):
                net(torch.ones(4, 64)).sum().backward()
            sent[method.reduce] = session.stats().sent_bytes
            session.detach()
        return sent["gather"], sent["two_way"]

    numel = sum(p.numel() for p in original.parameters())
    for gathered, merged in run_on_lasting_groups(sites, body):
        values = 0.5 * numel / 8 * (1 + 16 / 256)  # in bytes, with magnitudes
        assert gathered > (sites - 1) * values
        most = 2 * values + 1500 + 64 * sites * len(list(original))  # headers and paddings
        assert merged < most
        assert sites == 3 or merged < gathered


def test_an_owner_without_a_gradient_owes_what_it_rounds():
    """Applied and owed are together the sum of all gradients, though one site has none."""

    def body(rank, group):
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        before = torch.zeros(4, 16, 16, dtype=torch.float64)
        session, own = og.distribute(net, MERGED, group=group), before.clone()
        applied = before.clone()
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(3, 16, generator=generator)
            used = [k for k in range(4) if (k + step) % 3 != rank]
            net.zero_grad()
            sum(net[k](x).square().sum() for k in used).backward()
            copies = [nn.Linear(16, 16).double() for _ in range(4)]
            for k in used:
                copies[k].load_state_dict({n: p.double() for n, p in net[k].state_dict().items()})
                copies[k](x.double()).square().sum().backward()
                own[k] += copies[k].weight.grad
            applied += torch.stack([layer.weight.grad.double() for layer in net])
        (state,) = session.state_dict()["exchanges"]
        memories = state["own"]["memories"]
        owed = torch.stack(
            [memories[f"{k}.weight"]["unsent"].view(16, 16).double() for k in range(4)]
        )
        session.detach()
        return own, applied, owed

    found = run_on_lasting_groups(3, body)
    wanted = sum(own for own, _, _ in found) / 3
    owed = sum(owed for _, _, owed in found) / 3
    for _, applied, _ in found:
        torch.testing.assert_close(applied + owed, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"select": "topk", "wire": Sign(), "reduce": "two_way"},
        {"select": "random", "reduce": "two_way"},
        {"select": "random", "wire": og.wire.BF16(), "reduce": "two_way"},
        {"select": "random", "wire": Sign(), "reduce": "ring"},
    ],
)
def test_owners_merge_drawn_values_in_few_bits_alone(settings):
    with pytest.raises(ValueError, match="Sparse: reduce="):
        og.Sparse(**settings)
