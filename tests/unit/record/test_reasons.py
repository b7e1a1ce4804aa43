"""Reasons: sent between ranks as facts, and put into words in the coverage table alone."""

import json
from itertools import product

import pytest
from torch import nn

import outergrad as og
from outergrad.core.blocks import Block
from outergrad.core.reasons import AutoWay, Reason, Why
from outergrad.core.types import Link, Route, Unit
from outergrad.record.coverage import coverage

AUTO = AutoWay(
    way=Route.TWO_WAY,
    seconds=0.012345,
    others=((Route.GATHER, 0.5), (Route.REDUCE, 1.25)),
    link=Link(0.01, 12_500_000.0),
)
AUTO_TEXT = '; reduce="auto": two_way 12.3 ms, gather 500, all_reduce 1.25e+03 at 10 ms, 100 Mbit/s'
SAVED = AutoWay(way=Route.GATHER)
SAVED_TEXT = '; reduce="auto": gather when it was saved'
PAYS = "factors are fewer bytes for fewer than 334 rows per site"
OF_UNITS = {
    Reason(why=Why.FACTORS): ("factors", PAYS),
    Reason(why=Why.FACTORS, auto=AUTO): ("factors", PAYS + AUTO_TEXT),
    Reason(why=Why.LOW_RANK, route=Route.GATHER): ("low rank", "triplets of the formed gradient"),
    Reason(why=Why.LOW_RANK, route=Route.TWO_WAY, tapped=True, auto=AUTO): (
        "low rank",
        f"merged triplets of factors{AUTO_TEXT}",
    ),
    Reason(why=Why.LOW_RANK, route=Route.REDUCE, auto=SAVED): (
        "low rank",
        f"sketches of the formed gradient{SAVED_TEXT}",
    ),
    Reason(why=Why.SPARSE, route=Route.GATHER): ("sparse", "5% of the entries, the largest"),
    Reason(why=Why.CODED, route=Route.GATHER): ("compressed", ""),
    Reason(why=Why.NOT_TAPPED): ("dense", f"accumulated, or not tapped in the last step; {PAYS}"),
    Reason(why=Why.USED_OUTSIDE_LAYER): (
        "dense",
        "the weight is also used outside its layer, or in a gradient of a gradient",
    ),
    Reason(why=Why.OVERLAPPING): ("dense", f"shared by several products; {PAYS}"),
    Reason(why=Why.DENSE): ("dense", "the method is dense"),
    Reason(why=Why.OWING): ("dense", "with it travels what the method before had not sent"),
    Reason(why=Why.WHOLE): (
        "dense",
        "with it travelled all that was owed: session.flush(whole=True)",
    ),
    Reason(why=Why.ROWS): ("dense", f"12,345 rows here; {PAYS}"),
}
BLOCK_PAYS = "pays below 2000000 bytes per step and site"
OF_BLOCKS = {
    Reason(why=Why.REPLAYED): (
        "replayed",
        f"every site computes forward and backward of all 2 sites' rows; {BLOCK_PAYS}",
    ),
    Reason(why=Why.NOT_CAPTURED): (
        "dense",
        f"accumulated, or not captured in the last step; {BLOCK_PAYS}",
    ),
    Reason(why=Why.USED_OUTSIDE_BLOCK): ("dense", "a parameter is also used outside the block"),
    Reason(why=Why.UNSENDABLE): ("dense", "it reads what enters the model, or has hooks"),
    Reason(why=Why.BYTES, nbytes=7_654_321): (
        "dense",
        f"what would be sent of it is 7654321 bytes; {BLOCK_PAYS}",
    ),
}


def told(unit: Unit, reason: Reason) -> tuple[str, str]:
    params = {"weight": nn.Linear(1000, 500, bias=False).weight}
    rows = dict.fromkeys(unit.slots, 12_345)
    method = og.Sparse(density=0.05) if reason.why == Why.SPARSE else og.DAD()
    (line,) = coverage(params, (), [unit], {}, [method.compressor()], 2, [reason], rows, {})
    return line.travels, line.why


@pytest.mark.parametrize(("reason", "text"), OF_UNITS.items())
def test_why_a_layer_travels_as_it_does_in_words(reason, text):
    slot = og.Slot("", "weight", 500, 1000)
    assert told(Unit((slot,), ("weight",), 500_000, (slot,)), reason) == text


@pytest.mark.parametrize(("reason", "text"), OF_BLOCKS.items())
def test_why_a_block_travels_as_it_does_in_words(reason, text):
    assert told(Unit((), ("weight",), 500_000, block=Block("", ("weight",))), reason) == text


@pytest.mark.parametrize("method", [og.Sparse(density=0.9), og.PowerSGD(rank=400)], ids=repr)
@pytest.mark.parametrize(("sites", "learnt"), [(3, "the mean gradient"), (1, "nothing")])
def test_what_compressed_would_be_more_bytes_travels_dense(method, sites, learnt):
    """It is shown to the other sites, of which there may be none."""
    slot = og.Slot("", "weight", 500, 1000)
    unit = Unit((slot,), ("weight",), 500_000, (slot,))
    params, compressor = {"weight": nn.Linear(1000, 500, bias=False).weight}, method.compressor()
    for chosen in (None, Reason(why=Why.ROWS), Reason(why=Why.OVERLAPPING)):
        (line,) = coverage(params, (), [unit], {}, [compressor], sites, [chosen], {slot: 7}, {})
        why = "all of it is fewer bytes" if sites > 1 else "a single site: nothing travels"
        assert (line.travels, line.why, line.reveals) == ("dense", why, learnt)


def test_every_reason_has_words():
    assert {reason.why for reason in (*OF_UNITS, *OF_BLOCKS)} == set(Why)


@pytest.mark.parametrize("reason", [*OF_UNITS, *OF_BLOCKS])
def test_a_reason_is_the_same_when_it_was_sent(reason):
    assert Reason.of(json.loads(json.dumps(reason.plain()))) == reason


def test_what_is_no_reason_is_refused():
    plain = Reason(why=Why.LOW_RANK, route=Route.TWO_WAY, auto=AUTO).plain()
    wrong = ("factors", 0.5, [], {}, [1, 2], "dense")
    replaced = product(range(len(plain)), wrong)
    damaged = [[*plain[:place], value, *plain[place + 1 :]] for place, value in replaced]
    del damaged[0]  # of why: "factors" is one, whatever its route
    for what in (*damaged, None, 7, "factors", [], plain[:-1], [*plain, 0], {"why": "factors"}):
        with pytest.raises(ValueError, match=r"reason|is not a valid|unpack|convert"):
            Reason.of(what)
