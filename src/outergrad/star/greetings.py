"""The greetings of a site and of the hub, their first frames on a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from outergrad.star.frames import Frame, Kind, MalformedError

_LONGEST_INSTANCE, _LONGEST_NAME = 64, 63
_LONGEST_HELLO = 1 << 16


@dataclass(frozen=True)
class Hello:
    """The greeting of a site.

    Attributes:
        instance: random identifier of its process.
        run: number of the run that it is in; 0 if in none.
        heard: number of the last frame that it has received.
        after: number of the run from which it goes on with some of the sites; 0 to begin anew.
        sites: names of the sites that go on, in rank order.
    """

    instance: str
    run: int = 0
    heard: int = 0
    after: int = 0
    sites: Sequence[str] = ()

    def frame(self) -> Frame:
        """Returns the greeting as a frame."""
        return Frame(Kind.HELLO, json.dumps(vars(self)).encode())

    @staticmethod
    def of(frame: Frame) -> Hello:
        """Reads a greeting from a frame.

        Raises:
            MalformedError: it is no greeting.
        """
        if len(frame.payload) > _LONGEST_HELLO:
            raise MalformedError(f"a greeting of {len(frame.payload)} bytes")
        try:
            told = json.loads(bytes(frame.payload))
            hello = Hello(**told)
        except (ValueError, TypeError, RecursionError):
            raise MalformedError("a greeting that cannot be read") from None
        numbers = (hello.run, hello.heard, hello.after)
        is_known = isinstance(hello.instance, str) and 0 < len(hello.instance) <= _LONGEST_INSTANCE
        is_list = isinstance(hello.sites, list) and all(isinstance(s, str) for s in hello.sites)
        if frame.kind != Kind.HELLO or not (is_known and is_list):
            raise MalformedError("a stream that does not begin with a greeting")
        if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            raise MalformedError("a greeting with numbers out of range")
        if any(
            not 0 < len(name) <= _LONGEST_NAME or not name.isprintable() for name in hello.sites
        ):
            raise MalformedError("a greeting with names that no site has")
        if len(set(hello.sites)) < len(hello.sites):
            raise MalformedError("a greeting that names a site twice")
        return hello


@dataclass(frozen=True)
class Welcome:
    """The greeting of the hub, which answers that of a site.

    Attributes:
        run: number of the run that the site is in.
        rank: of the site.
        names: of all sites, in rank order.
        heard: number of the last frame that the hub has received from the site.
        grace_s: seconds that a site may be away.
        epoch: number of earlier runs that this one continues.
    """

    run: int
    rank: int
    names: Sequence[str]
    heard: int
    grace_s: float
    epoch: int = 0

    def frame(self) -> Frame:
        """Returns the greeting as a frame."""
        return Frame(Kind.WELCOME, json.dumps(vars(self)).encode())

    @staticmethod
    def of(frame: Frame) -> Welcome:
        """Reads a greeting from a frame."""
        return Welcome(**json.loads(bytes(frame.payload)))
