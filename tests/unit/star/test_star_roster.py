"""Invitations and revocations while a hub serves."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest

import outergrad as og
from hub_sites import HubSite, Told
from outergrad.star.folder import HubFolder
from outergrad.star.frames import Hello, Kind
from outergrad.star.hub import Hub
from outergrad.star.roster import Roster
from outergrad.star.server import HubServer
from stars import CPU


@pytest.fixture
def folder(tmp_path):
    made = HubFolder(tmp_path / "hub")
    made.create("127.0.0.1:0")
    for name in "ab":
        made.invite(name).write(tmp_path / f"{name}.kit")
    return made


def test_a_new_run_waits_for_who_was_invited_at_the_start_or_has_called_since(folder):
    told = Told()
    roster = Roster(folder, None, told)
    folder.invite("c")
    folder.invite("d")
    assert roster.names() == ["a", "b"]
    roster.note_call("d")
    assert roster.names() == ["a", "b", "d"]
    folder.revoke("a")
    assert roster.names() == ["b", "d"]
    folder.invite("a")
    assert roster.names() == ["a", "b", "d"]
    assert [(what, facts["site"]) for what, facts in told] == [
        ("invited", "c"), ("invited", "d"), ("revoked", "a"), ("invited", "a"),
    ]  # fmt: skip


def test_chosen_sites_stay_the_only_ones(folder):
    roster = Roster(folder, ["b", "a"])
    folder.invite("c")
    roster.note_call("c")
    assert roster.names() == ["b", "a"]
    assert [roster.admits(name) for name in "abc"] == [True, True, False]
    with pytest.raises(ValueError, match="no site 'x' is invited: there are a, b"):
        Roster(folder, ["x"])


def test_a_run_that_waits_takes_another_list_and_its_members_call_again():
    told = Told()
    hub = Hub("ab", told)
    first = HubSite(hub, "b")
    assert first.rank == 1
    hub.expect("bc")
    assert first.member.stream is None  # so that it calls again, and is told
    again, third = HubSite(hub, "b"), HubSite(hub, "c")
    assert (again.member, again.rank, third.rank) == (first.member, 0, 1)
    assert [facts["sites"] for facts in told.of("began")] == [["b", "c"]]
    assert {Kind.READY} == {frame.kind for site in (again, third) for frame in site.hear()}


def test_a_run_that_trains_keeps_its_sites():
    hub = Hub("ab")
    sites = [HubSite(hub, name) for name in "ab"]
    hub.expect("abc")
    third = HubSite(hub, "c")
    assert sites[0].run.names == ("a", "b")
    assert third.run is not sites[0].run
    assert all(site.member.stream is not None for site in sites)


def test_a_hub_that_was_started_anew_says_so():
    hub = Hub("ab")
    with pytest.raises(Exception, match="the hub was started anew, and does not know run 3"):
        HubSite(hub, "a", Hello("of before", run=3))


def test_who_is_invited_while_the_hub_serves_joins_the_run_that_waits(folder, tmp_path):
    said: list[str] = []
    server = HubServer(folder, "127.0.0.1:0", say=said.append)
    server.start()

    def opened(name):
        if name == "c":
            folder.invite("c").write(tmp_path / "c.kit")
        one = og.Star(f"127.0.0.1:{server.port}", kit=tmp_path / f"{name}.kit", wait_s=30)
        try:
            return one.open(CPU, timeout=timedelta(seconds=20)).names
        finally:
            met.wait()
            one.close()

    met = Barrier(3)
    try:
        with ThreadPoolExecutor(3) as threads:
            waiting = [threads.submit(opened, "a"), threads.submit(opened, "c")]
            while not any("c joins" in line for line in said):
                time.sleep(0.01)
            waiting.append(threads.submit(opened, "b"))
            assert [one.result(40) for one in waiting] == [("a", "b", "c")] * 3
    finally:
        server.stop()
    assert "c is invited: it may call, and join the next run" in said
