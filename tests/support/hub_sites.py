"""Sites of a hub without a network: what they send is heard at once, and by the hub itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outergrad.star import slots
from outergrad.star.frames import Frame, Hello, Kind, MalformedError
from outergrad.star.hub import Hub
from outergrad.star.window import Window

NAMES = "abcd"


class HubSite:
    """One that sends what it likes.

    Args:
        hub: with that it has a line.
        name: of its certificate.
        hello: what it says first.
    """

    def __init__(self, hub: Hub, name: str, hello: Hello | None = None) -> None:
        self.hub, self.name = hub, name
        self.run, self.member, self.stream = hub.enter(name, hello or Hello(f"of {name}"))
        self.rank, self._sent, self.heard = self.member.rank, 0, list[Frame]()
        self._welcome = next(hub.messages(self.run, self.member, self.stream))

    def send(self, kind: Kind, payload: bytes = b"", **settings: Any) -> None:
        """A frame, as the next in order.

        Raises:
            MalformedError: the hub does not take it.
        """
        self._sent += 1
        about = {"run": self.run.number, "sequence": self._sent, "sender": self.rank, **settings}
        frame = Frame(kind, payload, **about)
        self.hub.take(self.run, self.member, self.stream, frame.packed())

    def hear(self) -> list[Frame]:
        """All that has come since, of which the hub is told."""
        frames = self.member.pipe.batch(1 << 40)
        self.heard += frames
        if frames:
            ack = Window().ack(frames[-1].sequence)
            self.hub.take(self.run, self.member, self.stream, ack.packed())
        return frames

    def ask(self, kind: Kind, key: str, content: bytes = b"") -> bytes:
        """What the hub answers to a question about a slot."""
        self.send(kind, slots.asked(key, content), number=self._sent + 1)
        answers = [frame for frame in self.hear() if frame.kind == Kind.ANSWER]
        return bytes(answers[-1].payload)

    def first(self, key: str, text: str) -> str:
        """As a board's."""
        return self.ask(Kind.FIRST, key, text.encode()).decode()

    def slot(self, key: str) -> str | None:
        """As a board's."""
        return self.ask(Kind.GET, key).decode() or None

    def drop(self, key: str) -> None:
        """As a board's."""
        self.send(Kind.DROP, key.encode(), number=self._sent + 1)

    def put(self, key: str, content: bytes, *, as_rank: int | None = None) -> None:
        """As a board's, in two parts, of this site or another."""
        rank = self.rank if as_rank is None else as_rank
        number, half = self._sent + 1, len(content) // 2
        for k, piece in enumerate((content[:half] or b"-", content[half:])):
            self.ask(Kind.PUT, f"{key}/{rank}/{number}/{k}", piece)
        self.ask(Kind.PUT, key, f"{rank} {number} 2".encode())

    def get(self, key: str) -> bytes | None:
        """As a board's."""
        if not (head := self.ask(Kind.GET, key)):
            return None
        rank, number, count = map(int, head.split())
        pieces = [self.ask(Kind.GET, f"{key}/{rank}/{number}/{k}") for k in range(count)]
        return b"".join(pieces) if all(pieces) else None

    def text(self, name: str, text: str) -> None:
        """Left for all others."""
        self.send(Kind.TEXT, f"{name}\n{text}".encode())

    @property
    def texts(self) -> dict[tuple[int, str], str]:
        """Those of others that have come."""
        self.hear()
        found = {}
        for frame in self.heard:
            if frame.kind == Kind.TEXT:
                name, _, text = bytes(frame.payload).decode(errors="replace").partition("\n")
                found[frame.sender, name] = text
        return found


class Told(list[tuple[str, dict[str, Any]]]):
    """What a hub tells its log."""

    def __call__(self, what: str, **facts: Any) -> None:
        """Notes it."""
        self.append((what, facts))

    def of(self, what: str) -> list[dict[str, Any]]:
        """The facts of all of a kind."""
        return [facts for one, facts in self if one == what]


def sites_of_a_hub(count: int, **settings: Any) -> tuple[list[HubSite], Told]:
    """All there, in one run."""
    told = Told()
    hub = Hub(NAMES[:count], told, **settings)
    sites = [HubSite(hub, name) for name in NAMES[:count]]
    for site in sites:
        site.hear()
    return sites, told


@contextmanager
def refused(site: HubSite, told: str = ".") -> Iterator[None]:
    """What is sent inside is refused in such words, as by the hub's server."""
    with pytest.raises(MalformedError, match=told) as caught:
        yield
    site.hub.leave(site.run, site.member, site.stream, f"{site.name!r} sent {caught.value}")
