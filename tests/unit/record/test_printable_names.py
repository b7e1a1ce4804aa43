"""Names and texts that others gave do not steer a terminal."""

from __future__ import annotations

import grpc
import pytest

from outergrad._printable import printable
from outergrad.comm.agree import _first_refusal
from outergrad.record.coverage import Coverage, Travel
from outergrad.star.dial import _details
from outergrad.star.frames import Frame, Kind
from outergrad.star.line import Line

STEERING = {
    "colour": "\x1b[31m",
    "title": "\x1b]0;x\x07",
    "eight bits": "\x9b31m",
    "back": "\r",
    "turned": "\u202e",
    "a line": "\u2028",
    "delete": "\x7f",
}


def in_coverage(text):
    return str(Coverage((Travel(f"a{text}b", (2, 2), "dense", f"c{text}d", "nothing"),)))


def in_the_refusal_of_another_site(text):
    return _first_refusal([["fine"], [f"a{text}b"]], [[0, 1], [0, -1]], "site")


def in_why_a_site_is_gone(text):
    line = Line()
    line._hear(Frame(Kind.GONE, f"a{text}b".encode(), sender=1))
    return line.gone[1]


def in_the_fault_of_a_run(text):
    line = Line()
    line._hear(Frame(Kind.FAULT, f"a{text}b".encode()))
    return str(line.failure)


def in_what_a_hub_answers(text):
    class Told(grpc.RpcError, grpc.Call):
        def details(self):
            return f"a{text}b"

    Told.__abstractmethods__ = frozenset()
    return _details(Told())


PLACES = [
    in_coverage,
    in_the_refusal_of_another_site,
    in_why_a_site_is_gone,
    in_the_fault_of_a_run,
    in_what_a_hub_answers,
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("text", STEERING.values(), ids=STEERING)
def test_no_character_that_steers_is_shown(place, text):
    shown = place(text)
    assert shown == printable(shown, keep="\n")
    assert "a" in shown


def test_usual_names_stay_as_they_are():
    for name in ("layers.0.weight", "größe", "重み", "a b"):
        assert printable(name) == name
