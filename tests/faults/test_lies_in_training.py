"""Sites that train around a hub, one of which lies on the board and goes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_own_transport import build, train

import outergrad as og
from covering import covering
from outergrad.comm.failure_report import FailureReport
from outergrad.commit.agreement import NOWHERE, THERE, digest_of, word_slot
from outergrad.commit.membership_record import GOING_ON, MembershipRecord
from outergrad.commit.step_result import StepResult
from outergrad.core.errors import BoardGoneError
from stars import hub, star

LIAR, LIES_IN = 2, 1


def forged(model):
    """What a step brought, made up."""
    means = {name: torch.full_like(p, 9.0) for name, p in model.named_parameters()}
    return StepResult(True, means).packed()


def claims(board, made, model):
    content = forged(model)
    board.first(word_slot(LIAR), FailureReport(made, made=made, sent=True, gone=(0,)).text())
    board.first(f"brought {made} {LIAR}", digest_of(content))
    board.put(f"step {made} {LIAR}", content)
    board.first(f"way to {made}", THERE)
    board.first(f"made {LIAR}", str(made))


LIES = {
    "the step that it has made": lambda board, made, model: claims(board, made, model),
    "a step more": lambda board, made, model: claims(board, made + 1, model),
    "many steps more": lambda board, made, model: claims(board, made + 7, model),
    "nowhere": lambda board, made, model: board.first(f"way to {made}", NOWHERE),
    "another's word": lambda board, made, model: board.first(word_slot(0), FailureReport(9).text()),
    "who goes on": lambda board, made, model: board.first(
        GOING_ON, MembershipRecord.proposed(made, [1, LIAR])
    ),
}


def trained(rank, transport, lie):
    """Gradients of a site and what it raised; the last site lies, and goes."""
    model, found = build(), []
    session = None
    try:
        session = og.distribute(model, og.DAD(always=True), transport=transport, timeout=4)
        for step, gradients in enumerate(train(model, rank)):
            found.append(gradients)
            if (rank, step) == (LIAR, LIES_IN):
                _lie(session, model, lie, step + 1)
                return found, None
        session.detach()
    except (og.SiteLostError, og.SitesChangedError) as error:
        return found, error
    return found, None


def _lie(session, model, lie, made):
    board = session._at.comm.board
    board._limit_s = 1.0
    try:
        lie(board, made, model)
    except BoardGoneError:
        pass  # the hub does not take it
    finally:
        session._at.comm.close()


@pytest.mark.parametrize(("name", "when_lost"), covering(list(LIES), ["raise", "go on"], quick=2))
def test_the_others_end_alike_or_say_that_they_may_not(name, when_lost):
    with hub(3, grace_s=0.4) as server:
        stars = [star(server, rank, when_lost=when_lost) for rank in range(3)]
        try:
            with ThreadPoolExecutor(3) as threads:
                body = lambda rank: trained(rank, stars[rank], LIES[name])  # noqa: E731
                ended = list(threads.map(body, range(3)))
        finally:
            for one in stars:
                one.close()
    (first, error), (second, other), _ = ended
    both = zip(first, second, strict=False)
    assert all(all(map(torch.equal, mine, its)) for mine, its in both)
    if when_lost == "raise":
        assert all(isinstance(one, og.SiteLostError) for one in (error, other))
    if len(first) != len(second):
        for one, site in ((error, 1), (other, 0)):
            assert isinstance(one, og.SiteLostError)
            assert site in one.may_differ or not one.certain
