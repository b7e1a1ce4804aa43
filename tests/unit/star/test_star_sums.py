"""What the hub adds up."""

from __future__ import annotations

import numpy as np
import pytest

from outergrad.star.frames import MalformedError
from outergrad.star.sums import DTYPES, added

FLOAT32 = DTYPES.index("float32")


def numbers(*values):
    return np.array(values, "<f4").tobytes()


def test_equally_many_numbers_are_added():
    total = added([numbers(1, 2), numbers(3, 4)], FLOAT32)
    assert np.frombuffer(total, "<f4").tolist() == [4, 6]


@pytest.mark.parametrize("other", [(1,), (), (1, 2, 3), (1, 2, 3, 4, 5)])
def test_a_part_of_another_length_is_refused(other):
    """Of one number, too, which numpy would add to all."""
    with pytest.raises(MalformedError, match=r"numbers beside 4"):
        added([numbers(1, 2, 3, 4), numbers(*other)], FLOAT32)
