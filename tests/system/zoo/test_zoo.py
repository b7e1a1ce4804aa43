"""Models that nobody here wrote: gradients are DDP's, by every method that loses nothing."""

from __future__ import annotations

from functools import partial

import pytest
from zoo_methods import EXACT, QUICK
from zoo_runs import assert_all_replayed, assert_as_near_as_ddp, assert_equal_sites, course, train
from zoo_table import ZOO

from covering import covering

pytestmark = pytest.mark.filterwarnings(
    "ignore:Grad strides do not match bucket view strides",  # what DDP says of some convolutions
)

SMALL = [name for name, case in ZOO.items() if case.quick]
PAIRS = {
    pair.values: pair
    for pair in (
        *covering(ZOO.keys(), EXACT.keys(), quick=0, every=4),
        *covering(SMALL, sorted(QUICK)),
    )
}


@pytest.mark.parametrize(("name", "method"), PAIRS.values())
def test_gradients_are_as_near_to_the_mean_in_double_as_those_of_ddp(name, method):
    """In the first step, of which the rows are not known, and in those that go by its plan."""
    case = ZOO[name]
    blocks = case.blocks if method == "edad" else ()
    results = train(name, EXACT[method](case), partial(assert_all_replayed, blocks=blocks))
    assert_equal_sites([found for found, _ in results])
    for found, step in zip(results[0][0], course(name), strict=True):
        assert_as_near_as_ddp(found, step.by_ddp, step.expected)
