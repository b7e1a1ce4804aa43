"""The store at the hub, as PyTorch's stores, and against sites that ask for too much."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from outergrad.star.backend.store import HubStore
from outergrad.star.frames import Frame, Kind, MalformedError
from outergrad.star.values import MOST_VALUE, Ask, Values, packed
from stars import on_star

KB = 1 << 10


def stores(sites, body):
    limit = timedelta(seconds=5)
    return on_star(sites, lambda rank, one: body(rank, HubStore(one.connected(5.0), limit)))


def test_it_answers_as_pytorchs_own_stores_do():
    def asked(store):
        store.set("a", "1")
        store.set("b", b"\x00\xff")
        found = [store.get("a"), store.get("b"), store.add("n", 3), store.add("n", -1)]
        found += [store.compare_set("new", "", "x"), store.compare_set("new", "", "y")]
        found += [store.compare_set("new", "x", "z"), store.compare_set("none", "p", "q")]
        found += [store.check(["a", "b"]), store.check(["a", "no"]), store.delete_key("a")]
        found += [store.delete_key("a"), store.check(["a"])]
        store.append("n", "0")
        return [*found, store.get("n"), store.num_keys()]

    (of_hub,) = stores(1, lambda _, store: asked(store))
    assert of_hub == asked(dist.HashStore())


def test_prefixes_and_pytorchs_calls_from_c_work():
    def body(_, store):
        prefixed = dist.PrefixStore("p", store)
        prefixed.set("k", "v")
        assert store.get("p/k") == b"v"
        assert prefixed.add("n", 2) == 2
        assert prefixed.compare_set("c", "", "d") == b"d"
        assert prefixed.multi_get(["k", "c"]) == [b"v", b"d"]
        assert prefixed.check(["k"])
        prefixed.wait(["k"], timedelta(seconds=1))
        assert prefixed.delete_key("k")
        assert not prefixed.check(["k"])

    stores(1, body)


def test_a_site_waits_for_a_key_of_another_and_not_for_ever():
    def body(rank, store):
        if rank == 0:
            time.sleep(0.3)
            store.set("late", "here")
        assert store.get("late") == b"here"
        began = time.monotonic()
        with pytest.raises(dist.DistStoreError, match=r"no site set never within 0.5 s"):
            store.wait(["never"], timedelta(seconds=0.5))
        assert 0.4 < time.monotonic() - began < 3.0

    stores(2, body)


def test_a_value_that_is_too_long_is_refused_in_one_line():
    def body(_, store):
        with pytest.raises(ValueError, match="send them by a collective"):
            store.set("a", bytes(MOST_VALUE))
        assert store.num_keys() == 0

    stores(1, body)


def ask(values, ask, *parts, asker=0, number=1, share=1 << 20):
    payload = bytes([ask]) + packed([p if isinstance(p, bytes) else p.encode() for p in parts])
    return values.answers(Frame(Kind.STORE, payload, number=number), asker, share)


def test_a_site_writes_no_more_than_its_share():
    """What it deletes, or others overwrite, is given back."""
    values = Values()
    for k in range(3):
        ask(values, Ask.SET, f"k{k}", bytes(300 * KB))
        ask(values, Ask.DELETE, f"k{k}")
    ask(values, Ask.SET, "a", bytes(400 * KB))
    ask(values, Ask.SET, "b", bytes(400 * KB))
    ask(values, Ask.SET, "a", bytes(400 * KB), asker=1)
    ask(values, Ask.SET, "c", bytes(400 * KB))
    with pytest.raises(MalformedError, match="more than its share of the store"):
        ask(values, Ask.SET, "d", bytes(400 * KB))


def test_a_site_asks_no_more_than_it_has_threads():
    """What it waited for too long does not count."""
    now = [0.0]
    values = Values(lambda: now[0])
    for _ in range(32):
        assert ask(values, Ask.GET, "1000", "k") == []
    with pytest.raises(MalformedError, match="more questions to the store"):
        ask(values, Ask.GET, "1000", "k")
    now[0] = 1.1
    assert ask(values, Ask.GET, "1000", "k", number=7) == []
    answers = ask(values, Ask.SET, "k", "v", asker=1, number=9)
    assert answers == [(1, 9, b""), (0, 7, packed([b"v"]))]


WRONG = {
    "no question": b"",
    "an unknown one": b"\x63",
    "that ends too early": bytes([Ask.SET]) + b"\x00\x00",
    "that is shorter than it says": bytes([Ask.SET]) + b"\x00\x00\x00\x09abc",
    "without a value": bytes([Ask.SET]) + packed([b"k"]),
    "with too many": bytes([Ask.SET]) + packed([b"k", b"v", b"w"]),
    "a sum of letters": bytes([Ask.ADD]) + packed([b"k", b"one"]),
    "a sum of a number without end": bytes([Ask.ADD]) + packed([b"k", b"9" * 5000]),
    "to wait for letters": bytes([Ask.GET]) + packed([b"soon", b"k"]),
    "longer than an answer": bytes([Ask.SET]) + packed([b"k", bytes(MOST_VALUE)]),
}


@pytest.mark.parametrize("payload", WRONG.values(), ids=WRONG)
def test_a_question_that_cannot_be_read_is_refused(payload):
    with pytest.raises(MalformedError):
        Values().answers(Frame(Kind.STORE, payload, number=1), 0, 1 << 30)
