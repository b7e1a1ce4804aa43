"""No sentence says more than the table, or contradicts it."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from outergrad.launch.links import ShapedLink
from outergrad.tools.plan.comparison import Comparison, Standing
from outergrad.tools.plan.interval import EVEN, FEWEST, Interval
from outergrad.tools.plan.table import less_than_alone, methods_table
from outergrad.tools.plan.verdict import (
    HIGHEST_BIT_PER_S,
    UNTOLD,
    Look,
    Pays,
    Rates,
    how_to_tell_more,
    sentences,
    verdicts,
)

NO_RATES = Rates()
LINK = ShapedLink(rate_bit_per_s=1e8)
NAMES = ("dense", "dad", "edad", "rank-dad-1", "og-powersgd")
EXACT = ("dense", "dad", "edad")


def standing(name: str, low: float, width: float, sent_bytes: int) -> Standing:
    step_s = Interval(low, low * width)
    return Standing(
        method=name,
        exact=name in EXACT,
        sent_bytes=sent_bytes,
        compute_s=step_s,
        step_s=step_s,
        learnt=f"what {name} shows",
    )


def compared(**lows_and_widths: tuple[float, float, int]) -> Comparison:
    found = [standing(name, *figures) for name, figures in lows_and_widths.items()]
    return Comparison.of(Interval(0.01, 0.011), found)


figures = st.tuples(
    st.floats(0.02, 2), st.sampled_from([1.0, 1.002, 1.02, 1.1, 2.0]), st.integers(1, 10**7)
)
near = st.tuples(st.floats(0.2, 0.21), st.floats(1, 1.05), st.integers(1, 10**7))
comparisons = st.builds(
    lambda dense, others: compared(dense=dense, **others),
    figures | near,
    st.dictionaries(st.sampled_from(NAMES[1:]), figures | near, min_size=1),
)


def said(comparison: Comparison, rates: Rates = NO_RATES) -> str:
    return "\n".join(sentences(comparison, lambda _: rates, LINK))


def shown(comparison: Comparison) -> str:
    network = SimpleNamespace(title="")
    question = SimpleNamespace(sites=2, link=LINK, network=network)
    subject = SimpleNamespace(name="mlp", rows=4)
    plan = SimpleNamespace(comparison=comparison, question=question, subject=subject)
    text = io.StringIO()
    Console(width=200, file=text).print(methods_table(plan))
    return text.getvalue()


@given(comparisons)
def test_the_fastest_is_faster_than_all_others_of_its_kind(comparison):
    told = re.findall(r"(?m)^Of the (\w+) methods (\S+) is the fastest", said(comparison))
    for kind, name in told:
        (best,) = (one for one in comparison.standings if one.method == name)
        assert best.exact == (kind == "exact")
        for other in comparison.standings:
            if other.exact == best.exact and other is not best:
                assert other.step_s.low > best.step_s.high * (1 + EVEN)


@given(comparisons)
def test_a_verdict_beside_dense_holds_for_every_amount_in_the_intervals(comparison):
    dense = comparison.dense.step_s
    for verdict in verdicts(comparison):
        for one in verdict.leaders:
            slowest, fastest = dense.low / one.step_s.high, dense.high / one.step_s.low
            if verdict.pays == Pays.FASTER:
                assert slowest > 1
            if verdict.pays == Pays.SLOWER:
                assert fastest < 1
            if verdict.pays == Pays.EVEN:
                assert 0.95 < slowest <= fastest < 1.05


@given(comparisons)
def test_every_number_of_a_sentence_stands_in_the_table(comparison):
    table = shown(comparison)
    seconds_and_speeds = re.findall(r"([\d.,]+) (?:to|ms|x as)", said(comparison))
    for number in seconds_and_speeds:
        assert number in table, (number, table)


@given(comparisons)
def test_one_sentence_does_not_contradict_the_other(comparison):
    for line in said(comparison, Rates(2e8, 3e9)).splitlines():
        if re.search("None pays|No other pays", line):
            assert "dense is slower" not in line
        assert line.count(UNTOLD) == ("the fastest cannot" in line) + ("Whether that is" in line)
        pays = re.search(r"x as fast as dense\.(?! None pays)", line)
        assert ("dense is slower" in line) == bool(pays)
        assert "other sites learn what" in line


@given(comparisons)
def test_advice_is_given_where_something_cannot_be_told(comparison):
    look = Look(rounds=9, took_s=60, allowed_s=60, busy=0.5)
    advice = [*how_to_tell_more(comparison, look)]
    assert bool(advice) == (UNTOLD in said(comparison))


UNCLEAR = compared(dense=(0.2, 2.0, 1000), dad=(0.2, 2.0, 100))


def advice(rounds: int, took_s: float, allowed_s: float, busy: float) -> str:
    look = Look(rounds=rounds, took_s=took_s, allowed_s=allowed_s, busy=busy)
    return " ".join(how_to_tell_more(UNCLEAR, look))


@given(st.integers(1, FEWEST - 1), st.floats(0.01, 1e4), st.floats(0, 1))
def test_after_too_few_rounds_the_advice_leaves_time_for_enough(rounds, each_s, busy):
    told = advice(rounds, rounds * each_s, 1, busy)
    assert f"time for {rounds} round" in told
    assert "other programs" not in told
    (seconds,) = re.findall(r"--seconds ([\d.]+)\.", told)
    assert float(seconds) > FEWEST * each_s


def test_other_programs_are_named_where_there_were_any():
    assert advice(9, 60, 60, 0.5).startswith("For 50% of their time steps waited for a processor")
    assert advice(9, 60, 60, 0.01).startswith("To tell more, repeat it")
    assert advice(9, 60, 60, 0.01).endswith("--seconds 240.")


@given(comparisons)
def test_narrower_intervals_never_change_what_was_told(comparison):
    """An idle machine agrees with a busy one, or tells what that could not."""
    narrow = Comparison(
        comparison.alone_s,
        tuple(
            standing(one.method, one.step_s.low, (one.step_s.high / one.step_s.low) ** 0.5, 1)
            for one in comparison.standings
        ),
    )
    for before, after in zip(verdicts(comparison), verdicts(narrow), strict=True):
        if len(before.leaders) == 1:
            assert [one.method for one in after.leaders] == [before.leaders[0].method]
        if before.is_told:
            assert after.is_told
        if before.pays != Pays.UNTOLD and not before.has_dense:
            assert after.pays == before.pays


@given(st.floats(0.999, 1.001))
@example(1.0)
def test_dense_is_among_the_candidates(ratio):
    """The verdict that users found: edad was called the fastest beside a dense as fast."""
    told = said(compared(dense=(0.2301, 1.003, 1000), edad=(0.2301 * ratio, 1.003, 1000)))
    assert told.startswith("Of the exact methods dense and edad are equally fast, 2")
    assert "a step. No other pays on this link. Compared to dense, edad sends about as many" in told
    assert "dense is slower" not in told


def test_dense_may_be_the_fastest():
    told = said(compared(dense=(0.1, 1.01, 1000), dad=(0.2, 1.01, 10)))
    assert told == (
        "Of the exact methods dense is the fastest, 100 to 101 ms a step. No other pays on this "
        "link. The other sites learn what dense shows."
    )


def test_more_bytes_are_called_more():
    told = said(compared(dense=(0.2, 1.01, 1000), dad=(0.1, 1.01, 2000)))
    assert "1.98 to 2.02 x as fast as dense. Compared to dense, dad sends 2.0 x more bytes." in told


def test_of_several_each_is_named_with_its_bytes_and_what_it_shows():
    told = said(compared(dense=(1, 1.01, 1000), dad=(0.1, 1.2, 100), edad=(0.11, 1.2, 50)))
    assert f"the fastest {UNTOLD}: dad or edad, 100 to 132 ms a step, 7.57 to" in told
    assert "Compared to dense, dad sends 10 x fewer bytes, edad 20 x fewer." in told
    assert "By dad the other sites learn what dad shows. By edad the other" in told


def test_less_computing_than_alone_is_explained():
    """Low rank forms no gradients of weights; readers had taken it for an error."""
    alone, faster = Interval(0.2, 0.21), compared(dense=(0.21, 1, 10), dad=(0.1, 1.2, 1))
    told = [*less_than_alone(Comparison(alone, faster.standings))]
    assert len(told) == 1
    assert told[0].startswith("dad computes less than training alone, because")
    assert not [*less_than_alone(faster)]


def test_bytes_are_said_of_those_that_save_them():
    """Users had read "dense, dad or edad, with 12 x fewer bytes"."""
    told = said(compared(dense=(1, 1.5, 1200), dad=(1, 1.5, 100), edad=(1, 1.5, 100)))
    assert f"the fastest {UNTOLD}: dense, dad or edad" in told
    assert "a step. Compared to dense, dad and edad send 12 x fewer bytes." in told


def test_rates_are_rounded_towards_what_is_sure():
    faster = compared(dense=(1, 1.01, 1000), dad=(0.1, 1.01, 100))
    assert "Up to 230mbit dense is slower, from 3.5gbit on faster." in said(
        faster, Rates(2.39e8, 3.41e9)
    )
    assert "Up to 100mbit dense is slower. The" in said(faster, Rates(1.009e8, None))
    assert "bytes. Even at 100gbit dense is slower." in said(faster, Rates(HIGHEST_BIT_PER_S, None))
