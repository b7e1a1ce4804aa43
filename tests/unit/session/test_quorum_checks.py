"""Where an exchange cannot go ahead with a quorum, that is said before the first step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import outergrad as og
from outergrad.session.quorum_checks import refuse_quorum
from ranks import try_ranks
from sites_apart import Site

METHOD = og.LocalSteps(2, quorum=2, grace=1)
COMM = SimpleNamespace(world_size=3, mesh=None, board=object())
REFUSED = {
    "more than there are": (og.LocalSteps(2, quorum=4, grace=1), {}, {}, "than there are: 3; use"),
    "a mesh": (METHOD, {"mesh": object()}, {}, "with mesh=: the ranks of a site"),
    "no board": (METHOD, {"board": None}, {}, "needs a board, .* use gloo or og.Star"),
    "steps that are skipped": (METHOD, {}, {"max_bad_steps": 0}, "with max_bad_steps=0"),
    "a transform": (METHOD, {}, {"transform": "noise"}, "with transform='noise'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_possible_is_refused_with_a_remedy(name):
    method, comm, settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        refuse_quorum(method, SimpleNamespace(**{**vars(COMM), **comm}), **settings)
    assert str(caught.value).startswith(f"LocalSteps(quorum={method.quorum}) ")


@pytest.mark.parametrize("method", [METHOD, og.LocalSteps(2), og.DAD()])
def test_what_is_possible_is_not_refused(method):
    refuse_quorum(method, COMM, max_bad_steps=None, transform=None)


def test_a_single_site_needs_no_board():
    alone = SimpleNamespace(world_size=1, mesh=None, board=None)
    refuse_quorum(og.LocalSteps(2, quorum=1.0, grace=0), alone)


def test_all_sites_hear_of_it():
    def body(rank, group):
        Site(og.LocalSteps(2, quorum=3, grace=1), rank, group)

    for error in try_ranks(2, body):
        assert isinstance(error, ValueError)
        assert "asks for more sites than there are: 2" in str(error)


def test_all_sites_have_the_same_quorum_and_grace():
    def body(rank, group):
        Site(og.LocalSteps(2, quorum=2, grace=1 + rank), rank, group)

    for error in try_ranks(2, body):
        assert isinstance(error, ValueError)
        assert "quorum=2, grace=1" in str(error)
        assert "quorum=2, grace=2" in str(error)
