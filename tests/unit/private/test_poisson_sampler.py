"""Samplers draw as they say, differently at each site, and go on to the bit."""

from __future__ import annotations

import pickle
from collections import Counter, namedtuple
from itertools import chain

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from outergrad.checkpoint.parts import Parts, for_a_new_site
from outergrad.private import (
    CollateEmpty,
    Fixed,
    FixedSampler,
    Poisson,
    PoissonSampler,
    sampling_of,
)

ROWS, RATE = 60, 0.05
DATA = TensorDataset(torch.arange(ROWS, dtype=torch.float32)[:, None], torch.arange(ROWS) % 3)


def batches(sampler, epochs=1):
    return [batch for _ in range(epochs) for batch in sampler]


# -- what is drawn --------------------------------------------------------------------------------

DRAWS = 6000


@pytest.fixture(scope="module")
def drawn():
    return batches(PoissonSampler(ROWS, RATE, seed=1, steps=DRAWS))


def test_sizes_of_poisson_batches_are_binomial(drawn):
    sizes = np.array([len(batch) for batch in drawn])
    mean, variance = ROWS * RATE, ROWS * RATE * (1 - RATE)
    assert abs(sizes.mean() - mean) < 4 * np.sqrt(variance / DRAWS)
    assert sizes.var() == pytest.approx(variance, rel=4 * np.sqrt(2 / DRAWS))
    edges = np.arange(9)  # the last class is of 8 and more
    expected = stats.binom.pmf(edges, ROWS, RATE)
    expected[-1] = stats.binom.sf(7, ROWS, RATE)
    counts = np.bincount(np.minimum(sizes, 8), minlength=9)
    assert stats.chisquare(counts, DRAWS * expected).pvalue > 1e-3
    assert (sizes == 0).any()


def test_each_row_is_as_likely_as_any_other_and_comes_by_itself(drawn):
    counts = np.bincount([*chain.from_iterable(drawn)], minlength=ROWS)
    spread = DRAWS * RATE * (1 - RATE)
    chi2 = ((counts - DRAWS * RATE) ** 2 / spread).sum()
    assert stats.chi2.sf(chi2, ROWS) > 1e-3
    both = Counter((0 in batch) + (1 in batch) for batch in drawn)
    expected = DRAWS * stats.binom.pmf([0, 1, 2], 2, RATE)
    assert stats.chisquare([both[0], both[1], both[2]], expected).pvalue > 1e-3
    after = Counter(
        (0 in one) + (0 in next_) for one, next_ in zip(drawn[::2], drawn[1::2], strict=True)
    )
    assert stats.chisquare([after[k] for k in range(3)], expected / 2).pvalue > 1e-3


def test_no_row_is_twice_in_a_batch(drawn):
    fixed = batches(FixedSampler(ROWS, 7, seed=1))
    assert all(len(set(batch)) == len(batch) for batch in [*drawn, *fixed])
    assert all(set(batch) <= set(range(ROWS)) for batch in [*drawn, *fixed])


def test_fixed_batches_are_of_one_size_and_each_is_drawn_anew():
    drawn = batches(FixedSampler(ROWS, 6, seed=3, steps=4000))
    assert {len(batch) for batch in drawn} == {6}
    counts = np.bincount([*chain.from_iterable(drawn)], minlength=ROWS)
    chi2 = ((counts - 400) ** 2 / (400 * 0.9)).sum() * (ROWS - 1) / ROWS
    assert stats.chi2.sf(chi2, ROWS - 1) > 1e-3
    again = sum(0 in one and 0 in next_ for one, next_ in zip(drawn[::2], drawn[1::2], strict=True))
    assert stats.binomtest(again, 2000, 0.01).pvalue > 1e-3


def test_a_rate_of_one_draws_all():
    assert batches(PoissonSampler(5, 1.0)) == [[0, 1, 2, 3, 4]]


# -- sites ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [PoissonSampler, FixedSampler])
def test_sites_draw_differently_and_as_often(make):
    rate = RATE if make is PoissonSampler else 3
    first, second = (make(ROWS, rate, site=site, seed=7) for site in range(2))
    assert len(first) == len(second) == 20
    ours, theirs = batches(first), batches(second)
    assert len(ours) == len(theirs) == 20
    assert ours != theirs


def test_sites_with_other_rows_have_as_many_batches():
    assert len({len(PoissonSampler(rows, 0.013)) for rows in (5, 400, 10_000)}) == 1


def test_seeds_come_from_the_operating_system():
    torch.manual_seed(0)
    np.random.seed(0)
    first = PoissonSampler(ROWS, 0.5)
    torch.manual_seed(0)
    np.random.seed(0)
    assert batches(first) != batches(PoissonSampler(ROWS, 0.5))


def test_seeds_that_differ_above_32_bits_draw_differently():
    one, other = (PoissonSampler(ROWS, 0.5, seed=seed) for seed in (1, 1 + 2**64))
    assert batches(one) != batches(other)


# -- going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [PoissonSampler, FixedSampler])
@pytest.mark.parametrize("after", [0, 7, 20, 33])
def test_a_resumed_sampler_goes_on_to_the_bit(make, after):
    rate = RATE if make is PoissonSampler else 3
    whole = batches(make(ROWS, rate, seed=5), epochs=3)
    sampler, seen = make(ROWS, rate, seed=5), []
    while len(seen) < after:
        for batch in sampler:
            seen.append(batch)
            if len(seen) == after:
                break
    state = pickle.loads(pickle.dumps(sampler.state_dict()))
    resumed = make(ROWS, rate)
    resumed.load_state_dict(state)
    rest = [*resumed]
    assert len(rest) == 20 - after % 20
    while len(seen) + len(rest) < 60:
        rest += [*resumed]
    assert seen + rest == whole


def test_workers_that_ask_ahead_are_no_matter_if_it_is_told_how_far_it_got():
    sampler = PoissonSampler(ROWS, RATE, seed=5)
    ahead = iter(sampler)
    taken = [next(ahead) for _ in range(9)]
    sampler.go_to(4)
    assert [*sampler][:5] == taken[4:]


def test_a_state_of_another_sampler_is_refused():
    state = PoissonSampler(ROWS, RATE).state_dict()
    for other in (PoissonSampler(ROWS + 1, RATE), PoissonSampler(ROWS, 0.1)):
        with pytest.raises(ValueError, match="the state is of"):
            other.load_state_dict(state)


# -- empty batches --------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


class Rows(torch.utils.data.Dataset):
    """Rows as users have them: named, nested, with texts."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        pair = Pair(torch.full((2, 4), float(index)), index)
        return {"pair": pair, "name": f"patient {index}", "parts": [torch.ones(2), "left"]}


def test_an_empty_batch_has_the_form_of_others_and_no_rows():
    rows = Rows()
    collate = CollateEmpty(rows)
    full, empty = collate([rows[1], rows[2]]), collate([])
    assert full["pair"].x.shape == (2, 2, 4)
    assert empty.keys() == full.keys()
    assert isinstance(empty["pair"], Pair)
    assert empty["pair"].x.shape == (0, 2, 4)
    assert empty["pair"].y.shape == (0,)
    assert empty["pair"].y.dtype == full["pair"].y.dtype
    assert empty["name"] == []
    assert empty["parts"][0].shape == (0, 2)
    assert full["parts"][1] == ("left", "left")
    assert empty["parts"][1] == ()


def test_what_cannot_be_cut_is_refused():
    collate = CollateEmpty([object()], lambda rows: rows[0])
    with pytest.raises(TypeError, match="cannot be made of object: pass a collate_fn of your own"):
        collate([])


def test_a_model_trains_through_empty_batches():
    sampler = PoissonSampler(ROWS, 0.01, seed=0, steps=40)
    loader = DataLoader(DATA, batch_sampler=sampler, collate_fn=CollateEmpty(DATA))
    model, sizes = nn.Linear(1, 3), set()
    for x, y in loader:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        sizes.add(len(x))
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert len(x) or not any(p.grad.any() for p in model.parameters())
    assert {0, 1} <= sizes


# -- what a loader does ---------------------------------------------------------------------------


def test_loaders_that_draw_are_known():
    poisson = PoissonSampler(ROWS, RATE)
    loader = DataLoader(DATA, batch_sampler=poisson, collate_fn=CollateEmpty(DATA))
    assert sampling_of(loader) == Poisson(RATE)
    fixed = DataLoader(DATA, batch_sampler=FixedSampler(ROWS, 4))
    assert sampling_of(fixed) == Fixed(4, ROWS)


@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders_that_go_through_their_rows_are_not_taken_for_drawn(shuffle):
    for drop_last in (False, True):
        loader = DataLoader(DATA, 8, shuffle=shuffle, drop_last=drop_last)
        assert sampling_of(loader) == Fixed(8, ROWS, fresh=False)
    assert sampling_of(DataLoader(DATA, 1000, shuffle=shuffle)) == Fixed(ROWS, ROWS, fresh=False)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def with_sampler(sampler):
    return DataLoader(DATA, 8, sampler=sampler)


UNKNOWN = {
    "empty batches": (
        lambda: DataLoader(DATA, batch_sampler=PoissonSampler(ROWS, RATE)),
        r"collate_fn=CollateEmpty\(dataset\)",
    ),
    "other rows": (
        lambda: DataLoader(ConcatDataset([DATA, DATA]), batch_sampler=FixedSampler(ROWS, 4)),
        r"FixedSampler draws from 60 rows, and the loader's dataset has 120: pass FixedSampler\(",
    ),
    "a stream": (lambda: DataLoader(Stream(), 2), "the loader's dataset is a stream"),
    "weights": (lambda: with_sampler(WeightedRandomSampler([1.0] * ROWS, ROWS)), "WeightedRandom"),
    "replacement": (lambda: with_sampler(RandomSampler(DATA, True)), "come from a RandomSampler"),
    "rows twice": (
        lambda: with_sampler(RandomSampler(DATA, num_samples=2 * ROWS)),
        "come from a RandomSampler",
    ),
    "shares of ranks": (
        lambda: with_sampler(DistributedSampler(DATA, 7, 0)),
        r"DistributedSampler, .* pass batch_sampler=PoissonSampler\(len\(dataset\), rate\)",
    ),
    "one's own": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [1, 2]]), "come from a list"),
    "no batches": (lambda: DataLoader(DATA, batch_size=None), "come from a NoneType"),
}


@pytest.mark.parametrize(("make", "said"), UNKNOWN.values(), ids=UNKNOWN)
def test_other_loaders_are_refused_with_what_to_change(make, said):
    with pytest.raises(ValueError, match=said):
        sampling_of(make())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PoissonSampler(0, 0.1), "rows must be 1 or more"),
        (lambda: PoissonSampler(5, 2.0), "rate must be above 0"),
        (lambda: PoissonSampler(5, 0.1, steps=0), "steps must be 1 or more"),
        (lambda: PoissonSampler(5, 0.1, site=-1), "site must be 0 or more"),
        (lambda: FixedSampler(5, 6), "size must be from 1 to rows=5"),
        (lambda: PoissonSampler(5, 0.1).go_to(-1), "drawn must be 0 or more"),
    ],
)
def test_what_cannot_be_drawn_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_seed_is_not_handed_to_new_sites():
    sampler, optimizer = PoissonSampler(ROWS, RATE), torch.optim.SGD([torch.ones(1)])
    saved = Parts({"sampler": sampler, "optimizer": optimizer}, ()).state()
    handed = for_a_new_site(saved["parts"], saved["own"])
    assert "sampler" not in handed
    assert "optimizer" in handed
    theirs = PoissonSampler(ROWS, RATE, site=1)
    before = theirs.state_dict()
    parts = Parts({"sampler": theirs, "optimizer": optimizer}, ())
    parts.load(handed, new=True)
    assert theirs.state_dict() == before
    with pytest.raises(ValueError, match="no 'sampler'"):
        parts.load(handed, new=False)
    parts.load(saved["parts"], new=False)
    assert theirs.state_dict() == sampler.state_dict() != before
