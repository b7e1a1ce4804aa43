"""Event simulation: a clock that jumps from event to event, and processes that wait for events.

A program is a generator. It yields the time until which it waits, in seconds of the clock. It is
resumed then, or earlier when something happens at its process, and checks again whether it has
what it waits for. All randomness comes from one seed, so that an execution can be repeated.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from heapq import heappop, heappush
from typing import Any, TypeVar

FOREVER = math.inf


T = TypeVar("T")
Waiting = Generator[float | tuple[float, Callable[[], object]], None, T]
"""Program that yields the times until which it waits, and returns a result.

With a time it may yield a function: then it is resumed earlier only where that returns something
true. To ask is cheaper than to resume.
"""


class World:
    """Clock, random numbers and pending events.

    Args:
        seed: seed of all randomness.
        traced: whether to write down what happens.

    Attributes:
        now: seconds since the beginning.
        dice: source of all randomness.
        lines: trace of what has happened, one line per event.
        due: events that happen now, one after the other.
    """

    def __init__(self, seed: object, *, traced: bool = False) -> None:
        self.now, self.dice = 0.0, random.Random(repr(seed))
        self._traced, self.lines = traced, list[str]()
        self._later: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self.due = deque[tuple[Callable[..., object], tuple[Any, ...]]]()
        self._count = 0

    def at(self, when: float, do: Callable[..., object], *args: Any) -> None:
        """Schedules an event; events due at the same time happen in the order of calls."""
        if when <= self.now:
            self.due.append((do, args))
        else:
            self._count += 1
            heappush(self._later, (when, self._count, do, args))

    def run(self, until: float) -> None:
        """Runs events until none is left, or the clock reaches `until`."""
        later, due = self._later, self.due
        while True:
            while due:
                do, args = due.popleft()
                do(*args)
            if not later or later[0][0] > until:
                return
            self.now, _, do, args = heappop(later)
            while later and later[0][0] == self.now:
                due.append(heappop(later)[2:])
            do(*args)

    def note(self, site: int | str, what: str) -> None:
        """Traces an event at a site."""
        if self._traced:
            who = f"site {site}" if isinstance(site, int) else site
            self.lines.append(f"{self.now:8.3f} s  {who:>6}  {what}")


class Process:
    """Process of one site, whose programs are paused and end together.

    Args:
        world: clock, random numbers and events.
        rank: rank of the site.

    Attributes:
        alive: whether it runs, or is paused.
        paused: whether it is paused.
        paused_s: seconds for which it has been paused so far.
        wakes: number of times that something has happened at it.
        turns: number of times that its first program has looked, while `at_turn` has events left.
        at_turn: events at some of these times.
        on_end: functions that are called when it ends.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.alive, self.paused, self.paused_s, self._since = True, False, 0.0, 0.0
        self._programs: list[_Program] = []
        self._held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.wakes, self.turns, self.at_turn = 0, 0, dict[int, Callable[[], object]]()
        self.on_end: list[Callable[[], object]] = []

    def start(self, program: Waiting[None]) -> None:
        """Starts a program beside the others of the process."""
        self._programs.append(_Program(self, program))
        self._wake(self._programs[-1:])

    def wake(self) -> None:
        """Lets all programs check again what they wait for."""
        self._wake(self._programs)

    def _wake(self, programs: Sequence[_Program]) -> None:
        self.wakes += 1
        self.world.due.append((self.look, (programs, self.wakes)))

    def look(self, programs: Sequence[_Program], wake: int) -> None:
        """Resumes those programs that find something, and have not looked since that wake."""
        for program in programs:
            if wake <= program.looked:
                continue
            if not self.alive or self.paused:
                return
            if self.at_turn and program is self._programs[0]:
                self.turns += 1
                if (happens := self.at_turn.pop(self.turns, None)) is not None:
                    happens()
                    self._wake((program,))
                    continue
            program.looked = self.wakes
            if program.until <= self.world.now or program.is_there():
                program.resume()

    def reached_by(self, do: Callable[..., object], *args: Any) -> None:
        """Delivers an event from outside: after a pause, and never once the process has ended."""
        if self.paused:
            self._held.append((do, args))
        elif self.alive:
            do(*args)
            self.wake()

    def pause(self, for_s: float) -> None:
        """Pauses all programs for some time."""
        if self.alive and not self.paused:
            self.world.note(self.rank, f"is paused for {for_s:.2f} s")
            self.paused, self._since = True, self.world.now
            self.world.at(self.world.now + for_s, self._go_on)

    def _go_on(self) -> None:
        """Resumes after a pause; chance decides between seeing events or the time first."""
        self.paused = False
        self.paused_s += self.world.now - self._since
        if not self.alive:
            return
        self.world.note(self.rank, "goes on")
        held, self._held = self._held, []
        looks_first = self.world.dice.random() < 0.5
        if looks_first:
            self.wake()
        for do, args in held:
            self.world.at(self.world.now, self.reached_by, do, *args)
        if not looks_first:
            self.world.at(self.world.now, self.wake)

    def end(self) -> None:
        """Ends the process: it was killed, or is done."""
        if self.alive:
            self.alive = False
            for do in self.on_end:
                do()

    def sleep(self, for_s: float) -> Waiting[None]:
        """Waits for some time, whatever happens."""
        yield self.world.now + for_s, _never


def _always() -> bool:
    return True


def _never() -> bool:
    return False


_ENDED = FOREVER, _never


class _Program:
    """A program of a process.

    Attributes:
        until: time until which it waits.
        is_there: returns something true if it need not wait any longer.
        looked: number of wakes of its process when it was last asked.
    """

    def __init__(self, process: Process, program: Waiting[None]) -> None:
        self._process, self._program, self._rings = process, program, FOREVER
        self.until, self.is_there, self.looked = 0.0, _always, process.wakes

    def resume(self) -> None:
        """Resumes the program until it waits again, or ends."""
        waits = next(self._program, _ENDED)
        self.until, self.is_there = waits if isinstance(waits, tuple) else (waits, _always)
        self._set_clock()

    def _set_clock(self) -> None:
        """Has it looked after at its time; one event serves many waits."""
        if self.until < self._rings:
            self._rings, world = self.until, self._process.world
            world.at(max(self._rings, world.now), self._ring, self._rings)

    def _ring(self, time: float) -> None:
        if time != self._rings:
            return
        self._rings, process = FOREVER, self._process
        if self.until <= process.world.now:
            process.look((self,), process.wakes + 1)
        else:
            self._set_clock()
