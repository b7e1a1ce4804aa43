"""Results are kept whole, in a file that every JSON reader can read."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from math import inf, nan
from pathlib import Path

import pytest
from made_up import RATES, arrival, arrived_links, link, results, timed_links, timing

from full_disk import longest_file
from outergrad_lab.bench.results import Arrival, LinkResult, Results, Timing
from outergrad_lab.bench.until import Mark


def saved(found: Results, path: Path):
    """What a strict reader finds in the file."""
    found.save(path)

    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("links", [timed_links(*RATES), arrived_links(*RATES)])
def test_everything_is_in_the_file(tmp_path, links):
    found = results(*links, notes=["slow"])
    read = saved(found, tmp_path / "found.json")
    assert read == json.loads(json.dumps(asdict(found), default=str))
    assert set(read) == {field.name for field in fields(Results)}
    for one in read["links"]:
        assert set(one) == {field.name for field in fields(LinkResult)}
        assert all(set(t) == {field.name for field in fields(Timing)} for t in one["timings"])
        assert all(set(a) == {field.name for field in fields(Arrival)} for a in one["arrivals"])
        assert all(
            set(m) == {f.name for f in fields(Mark)} for a in one["arrivals"] for m in a["way"]
        )


@pytest.mark.parametrize("loss", [nan, inf, -inf])
def test_a_loss_that_is_no_number_is_null(tmp_path, loss):
    found = results(link(arrivals=[arrival("dad", [2.5, loss], reached=False)]))
    (one,) = saved(found, tmp_path / "found.json")["links"][0]["arrivals"]
    assert one["loss"] is None
    assert [mark["loss"] for mark in one["way"]] == [2.5, None]


def test_numbers_are_kept_to_the_last_bit(tmp_path):
    found = results(link(timings=[timing("dad", median_s=0.1 + 0.2, sent_bytes=2**53 - 1)]))
    (one,) = saved(found, tmp_path / "found.json")["links"][0]["timings"]
    assert one["median_s"] == 0.1 + 0.2
    assert one["sent_bytes"] == 2**53 - 1


def test_the_folder_is_made_and_nothing_else_is_left_in_it(tmp_path):
    path = tmp_path / "new" / "folder" / "found.json"
    results(link()).save(path)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "found.json"
    results(link()).save(path)
    before = path.read_text()

    with longest_file(16), pytest.raises(OSError, match="too large"):
        results(link(), link("none")).save(path)
    assert path.read_text() == before
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("links", [timed_links("none", "10mbit"), arrived_links("loopback")])
def test_what_was_saved_can_be_read_again(tmp_path, links):
    found = results(*links)
    found.save(tmp_path / "found.json")
    loaded = Results.load(tmp_path / "found.json")
    loaded.save(tmp_path / "again.json")
    assert type(loaded.links[0]) is type(links[0])
    assert (tmp_path / "again.json").read_text() == (tmp_path / "found.json").read_text()
