"""DistributionCorrection: sorted matching, its distance, and what sites share of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.nn import DistributionCorrection, collecting, share
from ranks import run_on_lasting_groups, run_ranks


def drawn(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def referred(x, quantiles, **more):
    correction = DistributionCorrection(x.shape[1], quantiles=quantiles, **more).double()
    with collecting(correction):
        correction(x)
    return correction.eval()


def test_equal_numbers_are_matched_by_their_order():
    """With as many quantiles as values, the k-th smallest becomes the reference's k-th smallest."""
    reference, x = drawn(0, 4, 3, 5), 3 * drawn(1, 4, 3, 5) ** 3 + 1
    found = referred(reference, quantiles=20)(x)
    for channel in range(3):
        ours, theirs = x[:, channel].flatten(), reference[:, channel].flatten().sort().values
        order = ours.argsort().argsort()
        torch.testing.assert_close(found[:, channel].flatten(), theirs[order], rtol=0, atol=1e-12)


def test_the_distance_is_the_mean_difference_of_what_is_sorted():
    reference, x = drawn(0, 10, 2), drawn(1, 10, 2) + 2
    found = referred(reference, quantiles=10).distance(x)
    expected = (reference.sort(dim=0).values - x.sort(dim=0).values).abs().mean(0)
    torch.testing.assert_close(found, expected)


def test_a_rising_map_of_the_reference_is_undone():
    """Contrast, brightness and every other rising change of a channel, of any number of values."""
    reference = drawn(0, 200, 2, 10)
    correction = referred(reference, quantiles=2000)
    for changed in (reference * 0.2 + 3, reference.exp(), reference.sinh() - 1):
        torch.testing.assert_close(correction(changed), reference, rtol=0, atol=1e-9)


def test_few_quantiles_err_by_little():
    reference = drawn(0, 500, 1)
    found = referred(reference, quantiles=64)(reference * 5)
    assert (found - reference).abs().mean() < 0.05


def test_equal_values_stay_equal_and_order_is_kept():
    x = drawn(1, 50, 1).relu()
    found = referred(drawn(0, 50, 1), quantiles=16)(x)
    assert len(found[x == 0].unique()) == 1
    assert found.flatten()[x.flatten().argsort()].diff().min() >= 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ranks_are_exact_for_values_of_a_short_type(dtype):
    """100,000 ranks are no numbers of float16; one value of many is off by the type alone."""
    reference = drawn(0, 100_000, 1)
    correction = referred(reference, quantiles=64).float()
    x = (reference * 0.5 + 1).to(dtype)
    exact = correction(x.float())
    error = (correction(x).float() - exact).abs()
    assert (error <= 2 * torch.finfo(dtype).eps * exact.abs().clamp(min=1)).all()
    torch.testing.assert_close(
        correction.distance(x), correction.distance(x.float()).to(dtype), rtol=0.05, atol=0.01
    )


@pytest.mark.parametrize("amount", [0.3, 0.7, 1.0])
def test_nan_stays_nan_and_the_others_are_moved(amount):
    reference, x = drawn(0, 50, 2), drawn(1, 50, 2)
    correction, gone = referred(reference, 8, amount=amount), x.clone()
    gone[3, 0] = float("nan")
    found = correction(gone)
    assert found[:, 0].isnan().nonzero().flatten().tolist() == [3]
    assert found[:, 1].equal(correction(x)[:, 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reference_takes_no_batch_that_is_not_finite(bad):
    correction = DistributionCorrection(2, quantiles=8).double()
    x = drawn(0, 8, 2)
    with collecting(correction):
        correction(x)
        with pytest.raises(ValueError, match="NaN or infinities"):
            correction(x.where(x != x[0, 0], bad))
    assert correction.batches == 1
    assert correction.reference.isfinite().all()


def test_a_constant_channel_takes_the_median():
    reference = drawn(0, 9, 1)
    found = referred(reference, quantiles=9)(torch.full((4, 1), 7.0, dtype=torch.float64))
    torch.testing.assert_close(found, reference.median().expand(4, 1))


def test_a_part_of_the_way():
    reference, x = drawn(0, 8, 2), drawn(1, 8, 2) * 4
    whole, half, none = (referred(reference, 8, amount=a)(x) for a in (1.0, 0.5, 0.0))
    torch.testing.assert_close(half, (x + whole) / 2)
    assert none.equal(x)


def test_in_training_and_without_a_reference_nothing_changes():
    x = drawn(1, 8, 2) * 4
    correction = referred(drawn(0, 8, 2), 8)
    assert not correction(x).equal(x)
    assert correction.train()(x).equal(x)
    assert DistributionCorrection(2).double().eval()(x).equal(x)


def test_the_reference_is_the_mean_over_batches_and_is_saved():
    first, second = drawn(0, 8, 2), drawn(1, 8, 2)
    both = DistributionCorrection(2, quantiles=8).double()
    with collecting(both):
        both(first)
        both(second)
    expected = (first.sort(dim=0).values + second.sort(dim=0).values) / 2
    torch.testing.assert_close(both.reference, expected.T)
    loaded = DistributionCorrection(2, quantiles=8).double()
    loaded.load_state_dict(both.state_dict())
    assert loaded.eval()(first).equal(both.eval()(first))


def test_collecting_starts_anew_and_restores_the_mode():
    model = nn.Sequential(DistributionCorrection(2, quantiles=8), nn.BatchNorm1d(2)).double()
    mean = model[1].running_mean.clone()
    model[1].eval()  # as a norm that is kept fixed
    for seed in (0, 1):
        with collecting(model):
            model(drawn(seed, 8, 2))
    assert [module.training for module in model.modules()] == [True, True, False]
    assert model[1].running_mean.equal(mean)
    torch.testing.assert_close(model[0].reference, drawn(1, 8, 2).sort(dim=0).values.T)


def test_other_dimensions_may_hold_the_channels():
    reference, x = drawn(0, 4, 3, 5), drawn(1, 4, 3, 5) + 1
    last = DistributionCorrection(3, quantiles=20, dim=-1).double()
    with collecting(last):
        last(reference.movedim(1, -1))
    found = last.eval()(x.movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(found, referred(reference, 20)(x))


def test_sites_share_the_mean_of_their_quantiles_by_batches():
    batches = [[drawn(0, 8, 2)], [drawn(1, 8, 2), drawn(2, 8, 2)], []]

    def body(rank, group):
        model = nn.Sequential(DistributionCorrection(2, quantiles=8)).double()
        with collecting(model):
            for x in batches[rank]:
                model(x)
        return share(model, group=group), model[0]

    found = run_on_lasting_groups(3, body)
    ordered = [x.sort(dim=0).values.T for own in batches for x in own]
    for sent, correction in found:
        torch.testing.assert_close(correction.reference, sum(ordered) / 3)
        assert correction.batches == 3
        assert sent == pytest.approx(2 * 2 / 3 * 8 * (2 * 8 + 1), abs=8)  # of a ring, float64


def test_references_of_a_short_type_are_shared_without_overflow():
    def body(rank, group):
        model = DistributionCorrection(1, quantiles=4).half()
        model.reference.fill_(100)
        model.batches.fill_(3000)
        return share(model, group=group), model

    for sent, model in run_on_lasting_groups(2, body):
        assert model.reference.eq(100).all()
        assert model.batches == 6000
        assert sent == 4 * (4 + 1)


def test_corrections_that_differ_are_told():
    def body(rank, group):
        with pytest.raises(ValueError, match=r"site \d has 'correction 0: \(2, [89]\)"):
            share(DistributionCorrection(2, quantiles=8 + rank), group=group)

    run_on_lasting_groups(2, body)


def test_a_site_that_does_not_share_is_named():
    def body(rank, group):
        if rank == 0:
            with pytest.raises(og.SiteLostError, match=r"site 1.*og\.nn\.share"):
                share(DistributionCorrection(2), group=group, timeout=0.5)

    run_ranks(2, body)


def test_sites_without_any_reference_are_told():
    def body(rank, group):
        with pytest.raises(ValueError, match="no site has a reference"):
            share(DistributionCorrection(2), group=group)

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"channels": 0}, "channels=0"),
        ({"channels": 2, "quantiles": 1}, "quantiles=1"),
        ({"channels": 2, "amount": 1.5}, "amount=1.5"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        DistributionCorrection(**settings)


@pytest.mark.parametrize("shape", [(8, 3), (1, 2)])
def test_a_batch_that_does_not_fit_is_refused(shape):
    with pytest.raises(ValueError, match="give 2 channels in dimension 1, and 2 or more values"):
        referred(drawn(0, 8, 2), 8)(drawn(1, *shape))


def test_a_model_without_a_correction_is_refused():
    with pytest.raises(ValueError, match="place one before a norm"), collecting(nn.Linear(2, 2)):
        pass
