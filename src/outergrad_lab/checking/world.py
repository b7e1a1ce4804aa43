"""Event simulation: a clock that jumps from event to event, and processes that wait for events.

A program is a generator. It yields the time until which it waits, in seconds of the clock. It is
resumed then, or earlier when something happens at its process, and checks again whether it has
what it waits for. All randomness comes from one seed, so that an execution can be repeated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")
Waiting = Generator[float, None, T]
"""Program that yields the times until which it waits, and returns a result."""

FOREVER = math.inf


class World:
    """Clock, random numbers and pending events.

    Args:
        seed: seed of all randomness.
        traced: whether to write down what happens.

    Attributes:
        now: seconds since the beginning.
        dice: source of all randomness.
        lines: trace of what has happened, one line per event.
    """

    def __init__(self, seed: object, *, traced: bool = False) -> None:
        self.now, self.dice = 0.0, random.Random(repr(seed))
        self._traced, self.lines = traced, list[str]()
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, do: Callable[..., object], *args: Any) -> None:
        """Schedules an event; events due at the same time happen in the order of calls."""
        self._count += 1
        heappush(self._events, (when, self._count, do, args))

    def run(self, until: float) -> None:
        """Runs events until none is left, or the clock reaches `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, do, args = heappop(self._events)
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
        turns: number of resumptions of its first program.
        at_turn: events at some of these resumptions.
        on_end: functions that are called when it ends.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.alive, self.paused, self.paused_s, self._since = True, False, 0.0, 0.0
        self._programs: list[_Program] = []
        self._held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.turns, self.at_turn = 0, dict[int, Callable[[], object]]()
        self.on_end: list[Callable[[], object]] = []

    def start(self, program: Waiting[None]) -> None:
        """Starts a program beside the others of the process."""
        self._programs.append(_Program(self, program, is_first=not self._programs))
        self._programs[-1].wake()

    def wake(self) -> None:
        """Resumes all programs, so that they check again what they wait for."""
        for program in self._programs:
            program.wake()

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
        until = self.world.now + for_s
        while self.world.now < until:
            yield until


class _Program:
    def __init__(self, process: Process, program: Waiting[None], *, is_first: bool) -> None:
        self._process, self._program, self._is_first = process, program, is_first
        self._waits = 0

    def wake(self) -> None:
        world = self._process.world
        world.at(world.now, self._resume, self._waits)

    def _resume(self, wait: int) -> None:
        process = self._process
        if wait != self._waits or not process.alive or process.paused:
            return
        if self._is_first:
            process.turns += 1
            happens = process.at_turn.pop(process.turns, None)
            if happens is not None:
                happens()
                process.world.at(process.world.now, self._resume, wait)
                return
        self._waits += 1
        until = next(self._program, None)
        if until is not None and until < FOREVER:
            process.world.at(max(until, process.world.now), self._resume, self._waits)
