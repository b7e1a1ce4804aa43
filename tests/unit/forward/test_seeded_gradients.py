"""SeededGradients: what sites form from seeds and scalars, and how far it is from the gradient."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.core.transport import Comm
from outergrad.forward import LocalMixer, SeededGradients, seeded
from outergrad.forward.signs import signs
from ranks import run_on_lasting_groups, run_ranks

SITES = 2


MODEL = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def mlp():
    """A copy for each site: their threads share one stream of random numbers."""
    return copy.deepcopy(MODEL)


def batch(rank, rows=6):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def loss_of(model, x, y):
    return cross_entropy(model(x), y)


def mean_gradient(model, sites=SITES):
    model.zero_grad()
    for rank in range(sites):
        (loss_of(model, *batch(rank)) / sites).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def on_sites(body, sites=SITES):
    return run_on_lasting_groups(sites, body)


def test_all_directions_together_give_the_gradient_to_rounding(monkeypatch):
    """With every combination of signs once, there is no error of drawing: the mean is exact."""
    weight = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
    model = nn.Module()
    model.weight = weight
    whole = torch.tensor([*itertools.product((-1.0, 1.0), repeat=5)], dtype=torch.float64)
    parts = {0: whole[:, :2], 1: whole[:, 2:]}
    monkeypatch.setattr(seeded, "signs", lambda shape, like, *words: parts[words[-1]])

    def loss(model):
        return (model.weight.tanh() * torch.arange(1.0, 7.0).view(2, 3)).sum()

    def body(rank, group):
        return SeededGradients(model, loss, draws=len(whole), seed=0, group=group).step()

    on_sites(body, sites=1)
    (expected,) = torch.autograd.grad(loss(model), weight)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_mean_and_variance_are_those_of_the_formula():
    """Mean within 4.5 standard errors in each place, E‖ĝ - g‖² = (d - 1) / (S K) ‖g‖² for sites
    with equal batches within 10 %."""
    draws, steps = 4, 250

    def body(rank, group):
        model = mlp()
        gradients = SeededGradients(model, loss_of, draws=draws, seed=1, group=group)
        found = []
        for _ in range(steps):
            gradients.step(*batch(0))
            found.append(nn.utils.parameters_to_vector([p.grad for p in model.parameters()]))
        return torch.stack(found)

    found, other = on_sites(body)
    assert found.equal(other)
    model = mlp()
    loss_of(model, *batch(0)).backward()
    exact = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    error = found.std(0) / steps**0.5
    assert ((found.mean(0) - exact).abs() <= 4.5 * error).all()
    assert error.norm() < 0.2 * exact.norm()
    square = (found - exact).square().sum(1).mean()
    expected = (exact.numel() - 1) / (SITES * draws) * exact.square().sum()
    assert square.item() == pytest.approx(expected.item(), rel=0.1)


def test_sites_with_other_data_agree_on_the_mean_of_both():
    draws = 3000

    def body(rank, group):
        model = mlp()
        if rank:
            nn.init.zeros_(model[0].weight)  # rank 0's weights count
        before = SeededGradients(model, loss_of, draws=draws, seed=2, group=group)
        before.step(*batch(rank))
        return {name: p.grad for name, p in model.named_parameters()}

    ours, theirs = on_sites(body)
    for name, grad in mean_gradient(mlp()).items():
        assert ours[name].equal(theirs[name])
        # d = 43 weights: the relative error of the whole is about sqrt(43 / 6000) = 8 %
        assert (ours[name] - grad).norm() < 0.5 * grad.norm() + 0.02, name


@pytest.mark.parametrize("sites", [2, 3])
def test_a_step_is_the_weighted_sum_of_the_directions_of_all_sites(sites):
    """Against a reference that draws whole matrices and differentiates by backward."""
    draws, seed = 3, 5

    def body(rank, group):
        model = mlp()
        gradients = SeededGradients(model, loss_of, draws=draws, seed=seed, group=group)
        gradients.taken = 7
        gradients.step(*batch(rank))
        return {name: p.grad for name, p in model.named_parameters()}

    ours, *_ = on_sites(body, sites)
    model = mlp()
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for site in range(sites):
        model.zero_grad()
        loss_of(model, *batch(site)).backward()
        directions = {}
        for k, (name, p) in enumerate(model.named_parameters()):
            u = signs((draws, len(p)), p, seed, 7, site, k, 0)
            w = signs((draws, p[0].numel()), p, seed, 7, site, k, 1)
            directions[name] = (u[:, :, None] * w[:, None, :]).view(draws, *p.shape)
        for d in range(draws):
            s = sum((p.grad * directions[n][d]).sum() for n, p in model.named_parameters())
            for name in expected:
                expected[name] += s * directions[name][d] / (sites * draws)
    for name, grad in expected.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-10, atol=1e-12)


def test_local_losses_are_as_exact_as_so_many_more_directions_of_one():
    """(d_l - 1) ‖g_l‖² / K, summed over the losses l, within 10 %."""
    draws, steps = 4, 250
    torch.manual_seed(0)
    model = LocalMixer(4, 3, channels=6, groups=3, blocks=2).double()
    x, y = batch(0)

    def losses(model, x, y):
        return model.local_losses(x, y).mean(1).sum(1)

    def body(rank, group):
        owners = model.owners()
        made = SeededGradients(model, losses, draws=draws, seed=0, owners=owners, group=group)
        found = []
        for _ in range(steps):
            made.step(x, y)
            found.append({name: p.grad for name, p in model.named_parameters()})
        return found

    (found,) = on_sites(body, sites=1)
    model.zero_grad()
    losses(model, x, y).sum().backward()
    square = expected = 0.0
    sizes, norms = torch.zeros(6), torch.zeros(6, dtype=torch.float64)
    for name, p in model.named_parameters():
        stack = torch.stack([one[name] for one in found])
        assert ((stack.mean(0) - p.grad).abs() <= 4.5 * stack.std(0) / steps**0.5).all(), name
        square += (stack - p.grad).square().flatten(1).sum(1).mean().item()
        owned = model.owners()[name]
        rows = p.grad.square().reshape(len(p), -1).sum(1)
        norms += owned.double() @ rows
        sizes += owned.sum(1) * p[0].numel()
    expected = ((sizes - 1) * norms).sum().item() / draws
    assert square == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("draws", [1, 100])
def test_a_site_sends_four_bytes_per_number_and_eight(draws):
    def body(rank, group):
        model = mlp().float()
        made = SeededGradients(model, loss_of, draws=draws, seed=0, group=group)
        for _ in range(3):
            x, y = batch(rank)
            made.step(x.float(), y)
        return made.sent_bytes

    assert on_sites(body) == [3 * (8 + 4 * draws)] * SITES


def test_whole_numbers_of_any_type_draw_the_same():
    like = torch.zeros(())
    assert signs((20,), like, 3, 1).equal(signs((20,), like, torch.tensor(3), True))


def test_sites_that_differ_are_told_before_anything_travels():
    def body(rank, group):
        with pytest.raises(ValueError, match=r"seed: [01]"):
            SeededGradients(mlp(), loss_of, draws=2, seed=rank, group=group)

    on_sites(body)


def test_a_site_at_another_step_is_named():
    def body(rank, group):
        made = SeededGradients(mlp(), loss_of, draws=2, seed=0, group=group)
        made.taken = rank
        with pytest.raises(RuntimeError, match=rf"site {1 - rank} is at step {1 - rank}"):
            made.step(*batch(rank))

    on_sites(body)


def test_no_gradient_changes_where_a_site_has_none_that_is_finite():
    def body(rank, group):
        model = mlp()
        made = SeededGradients(model, loss_of, draws=2, seed=0, group=group)
        x, y = batch(rank)
        with pytest.raises(ValueError, match="site 1 are not finite"):
            made.step(x * float("nan") if rank == 1 else x, y)
        assert all(p.grad is None for p in model.parameters())
        made.step(x, y)  # and training goes on

    on_sites(body)


def rows_of(model, x, y):
    return cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("before", [0, 1])
def test_sites_with_other_numbers_of_losses_are_told_and_go_on(before):
    def body(rank, group):
        model = mlp()
        made = SeededGradients(model, rows_of, draws=2, seed=0, group=group)
        for _ in range(before):
            made.step(*batch(rank))
        grads = [p.grad for p in model.parameters()]
        with pytest.raises((ValueError, RuntimeError)) as raised:
            made.step(*batch(rank, rows=6 - rank))
        assert all(p.grad is old for p, old in zip(model.parameters(), grads, strict=True))
        made.step(*batch(rank))
        assert made.taken == before + 1
        assert made.sent_bytes == (made.taken + before) * (8 + 8 * 2 * 6)
        return str(raised.value)

    first, second = on_sites(body)
    if before:
        assert "site 1 has no derivatives for step 1" in first
        assert "5 losses of torch.float64 where earlier steps had 6" in second
    else:
        assert first == second
        assert "site 1 has 'losses: 5 of torch.float64'" in first


@pytest.mark.parametrize("before", [0, 1])
def test_a_site_whose_losses_raise_leaves_no_site_waiting(before):
    def body(rank, group):
        made = SeededGradients(mlp(), loss_of, draws=2, seed=0, group=group)
        for _ in range(before):
            made.step(*batch(rank))
        x, y = batch(rank)
        with pytest.raises((ValueError, RuntimeError)) as raised:
            made.step(x[:, : 4 - rank], y)
        made.step(x, y)
        return str(raised.value)

    told, own = on_sites(body)
    assert told.startswith("SeededGradients: site 1 has no" if before else "site 1 could not take")
    assert "shapes cannot be multiplied" in own


def test_a_lost_site_is_named():
    def body(rank, group):
        made = SeededGradients(mlp(), loss_of, draws=1, seed=0, group=group, timeout=0.5)
        made.step(*batch(rank))
        if rank == 2:
            return
        for _ in range(2):  # the second time at once
            with pytest.raises(og.SiteLostError, match=r"site 2.*last checkpoint") as raised:
                made.step(*batch(rank))
            assert raised.value.step == 1

    run_ranks(3, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_a_short_type_get_gradients_of_it(dtype):
    """The losses may be of a longer type, as after `.float()`."""

    def body(rank, group):
        model = mlp().to(dtype)
        made = SeededGradients(
            model,
            lambda m, x, y: loss_of(lambda x: m(x).float(), x, y),
            draws=2,
            seed=0,
            group=group,
        )
        x, y = batch(rank)
        made.step(x.to(dtype), y)
        return [p.grad for p in model.parameters()]

    ours, theirs = on_sites(body)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype
        assert one.isfinite().all()
        assert one.equal(other)


def test_owners_of_another_number_of_losses_are_refused():
    def body(rank, group):
        owners = {"0.weight": torch.ones(2, 5)}
        made = SeededGradients(mlp(), loss_of, draws=1, seed=0, owners=owners, group=group)
        with pytest.raises(ValueError, match=r"1 losses, and owners of '0\.weight' for 2"):
            made.step(*batch(rank))

    on_sites(body)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"draws": 0}, "draws=0"),
        ({"owners": {"head": torch.ones(1, 3)}}, "names 'head'"),
        ({"owners": {"0.weight": torch.ones(1, 4)}}, r"give \(losses, 5\)"),
        ({"owners": {"0.weight": torch.full((1, 5), 0.5)}}, "must be 0 or 1"),
    ],
)
def test_a_setting_out_of_range_is_refused(more, said):
    def body(rank, group):
        with pytest.raises(ValueError, match=said):
            SeededGradients(mlp(), loss_of, **{"draws": 1, "seed": 0, "group": group, **more})

    on_sites(body, sites=1)


def test_a_model_that_trains_nothing_is_refused():
    with pytest.raises(ValueError, match="requires a gradient"):
        SeededGradients(mlp().requires_grad_(False), loss_of, draws=1, seed=0)


def test_it_learns():
    def body(rank, group):
        model = mlp()
        made = SeededGradients(model, loss_of, draws=20, seed=0, group=group)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        losses = []
        for _ in range(150):
            losses.append(made.step(*batch(rank)).item())
            optimizer.step()
        return losses[0], losses[-1]

    for first, last in on_sites(body):
        assert last < 0.5 * first


def test_any_transport_of_the_library_is_used(monkeypatch):
    opened = []

    class Watched:
        settings = frozenset({"group"})

        def open(self, device, *, group) -> Comm:
            from outergrad.comm.process_group import TorchDistributed

            opened.append(group)
            return TorchDistributed().open(device, group=group)

    def body(rank, group):
        made = SeededGradients(mlp(), loss_of, draws=1, seed=0, transport=Watched(), group=group)
        made.step(*batch(rank))
        return made.taken

    assert on_sites(body) == [1, 1]
    assert len(opened) == SITES
