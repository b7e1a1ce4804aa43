"""What a site says of itself when its transport failed: by the kind of the error alone."""

from __future__ import annotations

import pytest

from outergrad.core.errors import ExchangeError, Failure
from outergrad.step.lost import standing_of


@pytest.mark.parametrize("kind", Failure)
@pytest.mark.parametrize("sites", [(), (1, 2)])
def test_nothing_is_read_from_the_words_of_an_error(kind, sites):
    """Whatever they are: another transport has words of its own."""
    for words in [one.value for one in Failure]:
        found = standing_of(ExchangeError(words, sites, kind=kind), 3, 7)
        assert found.timed_out == (kind == Failure.TIMEOUT)
        assert found.gone == (sites if kind == Failure.CLOSED else ())
        assert found.silent == (() if kind == Failure.CLOSED else sites)
        unsaid = sites or kind in (Failure.TIMEOUT, Failure.CLOSED)
        assert found.why == ("" if unsaid else words)
