"""A start of torchrun takes nothing from an earlier one, whose store it shares."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from ipv6 import needs_ipv6
from outergrad.core.addresses import Address, listen_at
from outergrad.launch.errors import RecipeError
from outergrad.launch.start import fresh_store, shared_store

SPAN = timedelta(seconds=20)


def meet(store: dist.Store, sites: int, ranks: list[int]) -> list[dist.Store]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: fresh_store(store, rank, sites, SPAN), ranks))


def test_sites_of_one_start_meet_and_find_nothing_of_an_earlier_one():
    store = dist.HashStore()
    for start in range(4):
        ours = meet(store, 3, [2, 0, 1] if start % 2 else [0, 1, 2])
        assert not any(one.check(["address"]) for one in ours)
        ours[start % 3].set("address", str(start))
        assert [one.get("address") for one in ours] == [str(start).encode()] * 3


def test_a_start_that_was_cut_short_is_forgotten():
    store = dist.HashStore()
    for lone in (0, 1):
        with pytest.raises(TimeoutError, match=f"site {lone} has waited"):
            fresh_store(store, lone, 2, timedelta(seconds=0.1))
    first, second = meet(store, 2, [0, 1])
    first.set("address", "new")
    assert second.get("address") == b"new"


def test_where_to_meet_must_be_known():
    with pytest.raises(RecipeError, match="MASTER_ADDR"):
        shared_store({"RANK": "0", "WORLD_SIZE": "2"}, SPAN)


def test_an_ipv6_address_in_brackets_is_told_in_one_line():
    where = {"MASTER_ADDR": "[fd00::1]", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}
    with pytest.raises(RecipeError, match=r"^MASTER_ADDR=\[fd00::1\] has brackets.*fd00::1$"):
        shared_store(where, SPAN)


def test_a_taken_port_is_told_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(RecipeError, match=r"port \d+ is taken by another program") as raised:
            shared_store({"RANK": "0", "WORLD_SIZE": "2"} | where, SPAN)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_site_0_that_is_not_there_is_told_in_one_line(host):
    with listen_at(host) as free:
        there = Address(*free.getsockname()[:2])
    where = {"MASTER_ADDR": host, "MASTER_PORT": str(there.port)}
    with pytest.raises(
        RecipeError, match=f"site 1 does not reach site 0 at {re.escape(str(there))}"
    ) as raised:
        shared_store({"RANK": "1", "WORLD_SIZE": "2"} | where, timedelta(seconds=0.3))
    assert "\n" not in str(raised.value)
