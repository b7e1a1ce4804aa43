"""Trials of sites of a star, one of which lies on the board while the others agree on a step.

The sites that do not lie go through the agreement's own lines (`outergrad.commit.agreement`), the
hub is the real one, without a network; time and the order in which all act follow from a seed. So a
trial takes milliseconds, and the same seed is the same trial.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hub_sites import HubSite, Told, sites_of_a_hub
from outergrad.comm.failure_report import FailureReport
from outergrad.commit.agreement import (
    GIVEN_UP,
    NOWHERE,
    THERE,
    TROUBLE,
    Agreement,
    Outcome,
    digest_of,
    word_slot,
)
from outergrad.commit.board_requests import Farewell, First, Get, Gone, Put, Rest, Slot
from outergrad.commit.membership_record import GOING_ON, MembershipRecord
from outergrad.core.errors import BoardGoneError
from outergrad.star.frames import Kind, MalformedError
from outergrad.star.slots import asked

MADE = 5
"""Steps that some sites have made, and others one less."""
TRUE, FALSE, OTHER = b"what the step brought", b"what it did not bring", b"nor this at all"
PATIENCE_S, LIMIT_S = 4.0, 60.0
_TICK_S = 0.2


@dataclass
class Honest:
    """A site that goes by the protocol.

    Attributes:
        site: at the hub.
        made: steps that it has made when it gives up.
        outcome: once it has one.
    """

    site: HubSite
    made: int
    agreement: Agreement
    outcome: Outcome | None = None
    _asking: Any = None
    _request: Any = None
    _since: float | None = None

    def begin(self) -> None:
        """Asks for the first time."""
        self._asking = self.agreement.reach()
        self._request = next(self._asking)

    def act(self) -> bool:
        """One call; returns whether it was more than to wait."""
        is_rest = isinstance(self._request, Rest)
        answer = None if is_rest else self._answer(self._request)
        is_over = False
        if answer == "" and isinstance(self._request, First):  # not yet, says the hub
            self._since = self._since or self.agreement._clock()
            is_over = self.agreement._clock() - self._since > PATIENCE_S
            if not is_over:
                return False
        self._since = None
        try:
            gone = BoardGoneError("the hub does not take a text")
            self._request = self._asking.throw(gone) if is_over else self._asking.send(answer)
        except StopIteration as end:
            self.outcome = end.value
        return not is_rest

    def _answer(self, request: Any) -> Any:
        match request:
            case First(key, text):
                return self.site.first(key, text)
            case Slot(key):
                return self.site.slot(key)
            case Put(key, content):
                return self.site.put(key, content)
            case Get(key):
                return self.site.get(key)
            case Farewell(rank):
                texts = self.site.texts
                return texts.get((rank, "exit")) or texts.get((rank, "end/0"))
            case Gone(rank):
                self.site.hear()
                return any(f.kind == Kind.GONE and f.sender == rank for f in self.site.heard)
        raise AssertionError(request)

    @property
    def state(self) -> tuple[int, bytes | None]:
        """Steps in the end, and what the last one brought."""
        assert self.outcome is not None
        if self.outcome.content is not None:
            return self.made + 1, self.outcome.content
        return self.made, TRUE if self.made == MADE else None

    @property
    def is_loud(self) -> Callable[[int], bool]:
        """Whether it does not take it for granted that a site is where it is."""
        assert self.outcome is not None
        found = self.outcome.findings
        return lambda rank: rank in found.may_differ or not found.certain


@dataclass
class Trial:
    """See `draw`.

    Attributes:
        lies: their names, in the order in which they are told.
        liar: rank of the site that lies.
        lost: rank of a site that is gone, if one is.
        refused: what the hub did not take.
    """

    seed: int
    lies: list[str] = field(default_factory=list)
    liar: int = 0
    lost: int | None = None
    honest: list[Honest] = field(default_factory=list)
    told: Told = field(default_factory=Told)
    refused: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def complaints(self) -> list[str]:
        """What must not be."""
        found = [f"site {h.site.rank} waits for ever" for h in self.honest if h.outcome is None]
        if found:
            return found
        for one in self.honest:
            for other in self.honest:
                if one.state != other.state:
                    found += self._of_apart(one, other)
            found += self._of_liars(one)
        goes_on = {h.outcome.goes_on for h in self.honest if h.outcome and h.outcome.goes_on}
        found += [f"they go on in different ways: {goes_on}"] * (len(goes_on) > 1)
        if self.refused and {line["site"] for line in self.told.of("refused")} != {self._name}:
            found.append("who was refused is not named")
        return found

    def _of_apart(self, one: Honest, other: Honest) -> list[str]:
        where, found = f"{one.site.rank} and {other.site.rank}: {one.state} {other.state}", []
        if not one.is_loud(other.site.rank):
            found.append(f"sites differ silently, {where}")
        goes_on = one.outcome and one.outcome.goes_on
        if goes_on and other.outcome and other.outcome.goes_on and other.site.rank in goes_on.sites:
            found.append(f"sites that differ go on together, {where}")
        return found

    def _of_liars(self, one: Honest) -> list[str]:
        assert one.outcome is not None
        findings = one.outcome.findings
        is_deceived = "what cannot be" in findings.doubt
        if is_deceived and self.liar not in findings.lost:
            return [f"site {one.site.rank} names {findings.lost}, and {self.liar} lies"]
        return []

    @property
    def _name(self) -> str:
        return "abcd"[self.liar]


def tell(trial: Trial, seed: int, lies: list[str], *, goes_on: bool) -> Trial:
    """Goes through a trial.

    Args:
        trial: to fill.
        seed: of everything.
        lies: names of those that are told.
        goes_on: whether sites go on without others.
    """
    dice, now = random.Random(f"liars {seed}"), [0.0]
    count = dice.choice([3, 4, 4])
    sites, trial.told = sites_of_a_hub(count)
    sites[0].run._slots._clock = lambda: now[0]
    trial.liar = dice.randrange(count)
    others = [rank for rank in range(count) if rank != trial.liar]
    if count == 4 and dice.random() < 0.7:
        trial.lost = dice.choice(others)
        others.remove(trial.lost)
        gone = sites[trial.lost]
        with gone.hub._lock:
            gone.hub._lose(gone.run, gone.member, "it is lost")
    missed = trial.liar if trial.lost is None else trial.lost
    for rank in others:
        trial.honest.append(_honest(sites[rank], count, missed, dice, now, goes_on=goes_on))
    liar = Liar(sites[trial.liar], trial, dice, count)
    trial.lies = lies
    steps = [step for name in lies for step in LIES[name](liar)]
    for one in trial.honest:
        one.begin()
    _go_through(trial, steps, dice, now)
    trial.seconds = now[0]
    return trial


def _go_through(trial: Trial, steps: list, dice: random.Random, now: list[float]) -> None:
    """All act in an order that is drawn, and the liar when it likes."""
    pace = dice.choice([0.0, 0.02, 0.1, 0.5])
    while any(one.outcome is None for one in trial.honest) and now[0] < LIMIT_S:
        active = [one for one in trial.honest if one.outcome is None]
        dice.shuffle(active)
        has_acted = False
        for one in active:
            if steps and dice.random() > pace:
                steps.pop(0)()
            for _ in range(dice.choice([1, 1, 2, 5])):
                if one.outcome is None and not one.act():
                    break
                has_acted = True
        if not has_acted:
            now[0] += _TICK_S


def _honest(
    site: HubSite, count: int, missed: int, dice: random.Random, now: list, *, goes_on: bool
) -> Honest:
    made = dice.choice([MADE, MADE - 1])
    word = FailureReport(made, made=made, sent=made < MADE or dice.random() < 0.5, gone=(missed,))
    if dice.random() < 0.3:
        word = replace(word, gone=(), silent=(missed,), timed_out=True, waited_s=PATIENCE_S)
    kept = lambda number: TRUE if made == number == MADE else None  # noqa: E731
    least = 2 if goes_on else None
    how = word, kept, lambda: now[0], lambda: None, least
    return Honest(site, made, Agreement(site.rank, count, None, PATIENCE_S, *how))


class Liar:
    """A site that says what it likes.

    Args:
        site: at the hub.
        trial: which notes what the hub refuses.
        dice: of the trial.
        count: of the sites.
    """

    def __init__(self, site: HubSite, trial: Trial, dice: random.Random, count: int) -> None:
        self.site, self._trial, self.dice, self.count = site, trial, dice, count
        self.rank = site.rank
        self.victims = [one.site.rank for one in trial.honest]
        self.victim = dice.choice(self.victims)

    def tries(self, what: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
        """Something for later, which the hub may refuse."""

        def later() -> None:
            try:
                what(*arguments)
            except MalformedError as error:
                site = self.site
                site.hub._tell("refused", run=site.run.number, site=site.name, why=str(error))
                self._trial.refused.append(str(error))

        return later

    def first(self, key: str, text: str) -> Callable[[], None]:
        """Writes a text."""
        return self.tries(self.site.first, key, text)

    def put(self, key: str, content: bytes) -> Callable[[], None]:
        """Puts a content."""
        return self.tries(self.site.put, key, content)

    def text(self, name: str, text: str) -> Callable[[], None]:
        """Leaves a text."""
        return self.tries(self.site.text, name, text)

    def word(self, made: int = MADE, **about: Any) -> Callable[[], None]:
        """Its own word."""
        told = FailureReport(made, made=made, **{"sent": True, **about})
        return self.first(word_slot(self.rank), told.text())

    def claims(self, made: int, content: bytes, digest: bytes | None = None) -> list:
        """That it has made a step, and what that brought."""
        said = digest_of(content if digest is None else digest)
        return [
            self.word(made),
            self.first(f"brought {made} {self.rank}", said),
            self.put(f"step {made} {self.rank}", content),
            self.first(f"way to {made}", THERE),
            self.first(f"made {self.rank}", str(made)),
        ]

    def two_faces(self, key: str, first: bytes, second: bytes) -> list:
        """Another content for who reads later: by its head, by its parts, or by a text."""
        return [
            self.put(key, first),
            self.put(key, second),
            *[
                self.tries(self.site.ask, Kind.PUT, f"{key}/{self.rank}/{number}/{k}", second)
                for number in range(1, 12)
                for k in range(2)
            ],
            self.tries(self.site.ask, Kind.FIRST, key, f"{self.rank} 3 2".encode()),
        ]

    def in_the_name_of(self, rank: int) -> list:
        """Whatever another site would say."""
        word = FailureReport(MADE + 3, made=MADE + 3).text()
        pointing = f"{self.rank} 1 2".encode()
        return [
            self.first(word_slot(rank), word),
            self.first(f"made {rank}", str(MADE)),
            self.first(f"brought {MADE} {rank}", digest_of(FALSE)),
            self.put(f"step {MADE} {rank}", FALSE),
            self.tries(self.site.put, f"step {MADE} {rank}", FALSE),
            self.tries(self.site.ask, Kind.PUT, f"step {MADE} {rank}", pointing),
            self.first(f"read by {rank}", "all"),
            self.tries(self.site.send, Kind.TEXT, b"exit\n" + word.encode()),
        ]

    def goes_on_with(self, ranks: list[int], made: int = MADE) -> Callable[[], None]:
        """As if all had agreed on it."""
        return self.first(GOING_ON, MembershipRecord.proposed(made, ranks))


def _subsets(liar: Liar) -> list[list[int]]:
    alone, pair = [liar.rank], sorted([liar.rank, liar.victim])
    return [alone, pair, list(range(liar.count)), [*pair, 99]]


LIES: dict[str, Callable[[Liar], list]] = {
    "the word: one step more": lambda it: [it.word(MADE + 1)],
    "the word: two steps more": lambda it: [it.word(MADE + 2)],
    "the word: many steps more": lambda it: [it.word(MADE + 1000)],
    "the word: as far": lambda it: [it.word(MADE)],
    "the word: one step less": lambda it: [it.word(MADE - 1)],
    "the word: many steps less": lambda it: [it.word(0)],
    "the word: its end": lambda it: [it.word(MADE, ended="session")],
    "the word: its end, further on": lambda it: [it.word(MADE + 1, ended="process", why="x")],
    "the word: that it was given up": lambda it: [it.first(word_slot(it.rank), GIVEN_UP)],
    "the word: what cannot be read": lambda it: [it.first(word_slot(it.rank), "{" * 99)],
    "the word: blames another": lambda it: [it.word(MADE, gone=(it.victim,))],
    "the word: waited for another": lambda it: [it.word(MADE, silent=(it.victim,), timed_out=True)],
    "the word: blames all": lambda it: [it.word(MADE - 1, gone=tuple(it.victims))],
    "two words": lambda it: [it.word(MADE), it.word(MADE - 1), it.word(MADE + 1)],
    "gives up another": lambda it: [it.first(word_slot(rank), GIVEN_UP) for rank in it.victims],
    "gives up another after trouble": lambda it: [
        it.first(TROUBLE, str(it.rank)),
        *[it.first(word_slot(it.victim), GIVEN_UP)] * 40,
    ],
    "the way: there": lambda it: [it.first(f"way to {MADE}", THERE)],
    "the way: nowhere": lambda it: [it.first(f"way to {MADE}", NOWHERE), it.word(MADE)],
    "the way: something else": lambda it: [it.first(f"way to {MADE}", "x"), it.word(MADE)],
    "the way: there, and nothing is": lambda it: [it.word(MADE), it.first(f"way to {MADE}", THERE)],
    "the step: as it was": lambda it: it.claims(MADE, TRUE),
    "the step: another one": lambda it: it.claims(MADE, FALSE),
    "the step: one more": lambda it: it.claims(MADE + 1, FALSE),
    "the step: the one before": lambda it: it.claims(MADE - 1, FALSE),
    "the step: not what it says": lambda it: it.claims(MADE, FALSE, TRUE),
    "the step: nothing": lambda it: it.claims(MADE, TRUE)[:2],
    "the step: late": lambda it: [*[lambda: None] * 60, *it.claims(MADE, FALSE)],
    "the step: word first, the rest late": lambda it: [
        it.word(MADE),
        *[lambda: None] * 60,
        *it.claims(MADE, FALSE)[1:],
    ],
    "the step: two faces": lambda it: [
        *it.claims(MADE, FALSE)[:2],
        *it.two_faces(f"step {MADE} {it.rank}", FALSE, OTHER),
        *it.claims(MADE, FALSE)[3:],
    ],
    "the step: two faces, the true one first": lambda it: [
        *it.claims(MADE, TRUE)[:2],
        *it.two_faces(f"step {MADE} {it.rank}", TRUE, FALSE),
        *it.claims(MADE, TRUE)[3:],
    ],
    "the digest: two faces": lambda it: [
        it.first(f"brought {MADE} {it.rank}", digest_of(TRUE)),
        *it.claims(MADE, FALSE),
    ],
    "how far it is: more": lambda it: [it.word(MADE), it.first(f"made {it.rank}", str(MADE + 9))],
    "how far it is: two faces": lambda it: [
        it.word(MADE - 1),
        it.first(f"made {it.rank}", str(MADE - 1)),
        it.first(f"made {it.rank}", str(MADE)),
    ],
    "how far it is: no number": lambda it: [it.word(MADE), it.first(f"made {it.rank}", "x")],
    "who goes on: some": lambda it: [it.word(MADE), *map(it.goes_on_with, _subsets(it))],
    "who goes on: from elsewhere": lambda it: [
        it.goes_on_with(sorted([it.rank, it.victim]), made) for made in (MADE - 1, MADE + 1, 0)
    ],
    "who goes on: without it": lambda it: [it.goes_on_with(it.victims)],
    "who goes on: what cannot be read": lambda it: [it.first(GOING_ON, "[[]]")],
    "who goes on: blames one first": lambda it: [
        it.word(MADE, gone=(it.victim,)),
        it.first(TROUBLE, str(it.rank)),
        it.first(f"made {it.rank}", str(MADE)),
        *[it.goes_on_with(sorted({*range(it.count)} - {it.victim}))] * 30,
    ],
    "in another's name": lambda it: it.in_the_name_of(it.victim),
    "in everybody's name": lambda it: [x for rank in it.victims for x in it.in_the_name_of(rank)],
    "farewells: two faces": lambda it: [
        it.text("exit", FailureReport(made, made=made, ended="process", why="x").text())
        for made in (MADE, MADE - 1, MADE + 1)
    ],
    "farewells: and a word": lambda it: [
        it.text("end/0", FailureReport(MADE - 1, made=MADE - 1, ended="session").text()),
        *it.claims(MADE, FALSE),
    ],
    "farewells: and a later word": lambda it: [
        it.text("end/0", FailureReport(MADE, made=MADE, ended="session").text()),
        *[lambda: None] * 10,
        *it.claims(MADE + 1, FALSE),
    ],
    "farewells: what cannot be read": lambda it: [
        it.text("exit", "x" * 9999),
        it.text("exit", "{"),
    ],
    "trouble": lambda it: [it.first(TROUBLE, str(it.rank)), it.first(TROUBLE, "0")],
    "questions and answers": lambda it: [
        it.first("asked 0", f'{{"by": {it.victim}, "of": 0, "made": 1, "place": 0}}'),
        it.put("answer 0", FALSE),
        it.tries(it.site.ask, Kind.GET, "answer 0"),
        it.tries(it.site.send, Kind.PUT, asked("answer 0", b"1 1 1")),
    ],
}
"""What a site can say on the board that is not so."""


def draw(number: int, seed: int = 0) -> Trial:
    """A trial that follows from its number: each lie in turn, and then with another one."""
    names, dice = list(LIES), random.Random(f"lies {seed} {number}")
    lies = [names[number % len(names)]]
    if number >= len(names):
        lies += dice.sample(names, dice.choice([0, 1, 1, 2]))
    goes_on = dice.random() < 0.5
    return tell(Trial(number), 1000 * seed + number, lies, goes_on=goes_on)
