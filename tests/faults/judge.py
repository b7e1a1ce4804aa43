"""Whether a trial went as it must: who raised, when, and in which state the sites are."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from faulty_site import NEWCOMER_S
from trials import LETHAL, Fault, Trial

_FIRST_STEPS = 1
_NEAR = 1e-3
MARGIN_S = 3.0
"""Beyond what a site may take: other programs want the processors, too."""


@dataclass
class Seen:
    """What a process has told, and how it ended.

    Attributes:
        lines: events, each with its time `at` on the monotonic clock that all processes share.
        status: as of `os.waitstatus_to_exitcode`; None while it lives.
        resumed_at: when it was let go on.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None
    ended_at: float = 0.0
    resumed_at: float | None = None

    def told(self, event: str) -> list[dict[str, Any]]:
        """All lines of a kind."""
        return [line for line in self.lines if line["event"] == event]

    def last(self, event: str) -> dict[str, Any] | None:
        """The last one of a kind."""
        return next(iter(reversed(self.told(event))), None)

    @property
    def states(self) -> list[str]:
        """After 0, 1, 2, ... applied steps."""
        return [line["state"] for line in self.told("applied")]

    @property
    def marks(self) -> list[float]:
        """A number that follows from each of them."""
        return [line["mark"] for line in self.told("applied")]

    @property
    def applied(self) -> int:
        """Steps that count."""
        return max(len(self.states) - 1, 0)

    @property
    def steps(self) -> int:
        """Synchronised steps that came to their end, discarded ones too."""
        return self.applied + len(self.told("discarded")) + len(self.told("skipped"))


@dataclass(frozen=True)
class Verdict:
    """What came of a trial.

    Attributes:
        injected: whether the fault came to pass: some come too late.
        slow: whether the machine may be to blame: sites gave up that nothing had happened to, or
            what they did was right but for its time.
        in_doubt: whether a site is a step behind the others and said that it may be.
        outcome: how the other sites ended, in a word.
        took_s: from the fault until a site raised, for each that did.
        complaints: what should not be.
    """

    trial: Trial
    injected: bool
    slow: bool
    in_doubt: bool
    outcome: str
    took_s: tuple[float, ...]
    complaints: tuple[str, ...]


def judge(
    trial: Trial, sites: Sequence[Seen], newcomer: Seen | None, reference: Seen | None
) -> Verdict:
    """Compares what was seen with what must be.

    Args:
        trial: what was done.
        sites: what each site told.
        newcomer: the same of a site that started while the others were at work.
        reference: a site of an undisturbed run; None for that run itself.
    """
    found = _Judgement(trial, sites, reference or sites[0])
    found.run(newcomer)
    took = tuple(found.took_s)
    injected, slow = found.injected_at is not None, not found.wrong and found.was_slow
    wrong = (*found.wrong, *found.late)
    ended = found.in_doubt, found.outcome, took, wrong
    return Verdict(trial, injected and not slow, slow, *ended)


class _Judgement:
    def __init__(self, trial: Trial, sites: Sequence[Seen], reference: Seen) -> None:
        self.trial, self.fault, self.sites = trial, trial.fault, sites
        self.reference, self.marks = reference.states, reference.marks
        self.wrong: list[str] = []
        self.late: list[str] = []
        self.in_doubt = False
        self.took_s: list[float] = []
        at = sites[self.fault.victim].last("injected")
        self.injected_at = None if at is None else at["at"]
        self.outcome = self._outcome()

    @property
    def _others(self) -> dict[int, Seen]:
        return {r: seen for r, seen in enumerate(self.sites) if r != self.fault.victim}

    @property
    def _bound(self) -> dict[int, Seen]:
        """Those that must be equal in the end: who was killed or left is not asked."""
        gone = self.fault.kind in ("kill", "restart", "interrupt", "leave")
        return self._others if gone else dict(enumerate(self.sites))

    @property
    def _equal(self) -> dict[int, Seen]:
        """Those that must have applied as many steps: one that is cut off cannot be told."""
        return self._others if self.fault.kind == "cut" else self._bound

    def _outcome(self) -> str:
        ends = {_end(seen) for seen in self._others.values()}
        return ends.pop() if len(ends) == 1 else f"mixed: {sorted(ends)}"

    def complain(self, what: str) -> None:
        """Of what must never be."""
        self.wrong.append(what)

    def wonder(self, what: str) -> None:
        """Of what may be if the machine lets sites wait for longer than their timeout."""
        self.late.append(what)

    def run(self, newcomer: Seen | None) -> None:
        self._exits()
        if self.fault.kind == "settings":
            self._refused()
            return
        self._states()
        if self._is_lethal():
            self._all_raised()
        else:
            self._all_done()
        if newcomer is not None:
            self._turned_away(newcomer)

    def _is_lethal(self) -> bool:
        if self.injected_at is None:
            return False
        done = self.sites[self.fault.victim].last("done")
        if done is not None and done["at"] <= self.injected_at:
            return False  # too late to matter
        return self.fault.kind in LETHAL or (
            self.fault.kind == "corrupt" and self.outcome == "SiteLostError"
        )

    def _exits(self) -> None:
        """No process was ended by a signal that nobody sent."""
        for rank, seen in enumerate(self.sites):
            if seen.status not in self._allowed(rank):
                self.complain(f"site {rank} ended with {seen.status}: {seen.last('ended')}")

    def _allowed(self, rank: int) -> set[int]:
        if rank != self.fault.victim or self.injected_at is None:
            return {0}
        by_kind = {"kill": {-signal.SIGKILL}, "restart": {-signal.SIGKILL}}
        by_kind["interrupt"] = {-signal.SIGINT, 0}
        return by_kind.get(self.fault.kind, {0})

    def _states(self) -> None:
        """A step counts on all sites that are left or on none, and is the right one."""
        finals = {r: seen.applied for r, seen in self._equal.items()}
        behind = {r for r, n in finals.items() if n < max(finals.values())}
        self.in_doubt = bool(behind) and all(self._doubts(r, finals) for r in behind)
        if self.fault.kind == "cut":
            self._is_near(self.sites[self.fault.victim].applied, max(finals.values()))
        if behind and not self.in_doubt:
            self.complain(f"applied steps differ: {finals}")
        for rank, seen in enumerate(self.sites):
            expected = list(self.reference[: len(seen.states)])
            if self._comparable and seen.states != expected:
                first = next(i for i, s in enumerate(seen.states) if [s] != expected[i : i + 1])
                self.complain(f"site {rank} is not as undisturbed after step {first}")
            if not self._close(seen):
                self.complain(f"site {rank} is not near to undisturbed: {seen.marks}")
        ends = {seen.states[-1] for seen in self._equal.values() if seen.states}
        if len(ends) > 1 and not self.in_doubt:
            self.complain(f"states differ: {ends}")

    def _is_near(self, own: int, others: int) -> None:
        """A site that is cut off while it votes may be a step before or behind the others."""
        if abs(own - others) > 1:
            self.complain(f"cut off after {own} steps, the others after {others}")

    def _doubts(self, rank: int, finals: Mapping[int, int]) -> bool:
        """Whether a site that is one step behind says that it may be."""
        lost = self.sites[rank].last("lost") or {"why": ""}
        return finals[rank] == max(finals.values()) - 1 and "may have applied" in lost["why"]

    @property
    def was_slow(self) -> bool:
        """Whether a site waited in vain for one that nothing had happened to."""
        lost = [line for seen in self.sites if (line := seen.last("lost")) is not None]
        early = any(self.injected_at is None or one["at"] < self.injected_at for one in lost)
        return early or bool(self.late)

    @property
    def _comparable(self) -> bool:
        """Whether the states must be the same to the bit.

        When an exchange was discarded there are more local steps than else. The plan of the first
        steps changes from one to the next: one that is made again may round otherwise.
        """
        again = self.fault.kind in ("corrupt", "nan", "raise")
        return not again or (self.fault.step > _FIRST_STEPS and self.trial.method != "local steps")

    def _close(self, seen: Seen) -> bool:
        if self.trial.method == "local steps" and self.fault.kind == "corrupt":
            return True
        pairs = zip(seen.marks, self.marks, strict=False)
        return all(abs(found - expected) <= _NEAR * abs(expected) for found, expected in pairs)

    def _all_done(self) -> None:
        for rank, seen in enumerate(self.sites):
            if not seen.told("done"):
                self.wonder(f"site {rank} did not finish: {seen.last('ended')}")
        if self.injected_at is not None:
            self._told_of(self.fault)

    def _told_of(self, fault: Fault) -> None:
        """All heard of the step that came to nothing."""
        expected = {"raise": "discarded", "nan": "skipped", "corrupt": "discarded"}
        if fault.kind in expected:
            counts = {r: len(seen.told(expected[fault.kind])) for r, seen in enumerate(self.sites)}
            if set(counts.values()) != {1}:
                self.wonder(f"{expected[fault.kind]} steps: {counts}")

    def _all_raised(self) -> None:
        names = self.fault.kind not in ("corrupt",)
        for rank, seen in self._bound.items():
            lost = seen.last("lost")
            if lost is None:
                # Else the fault came behind the votes of the last step.
                if not seen.told("done"):
                    self.wonder(f"site {rank} did not raise SiteLostError: {seen.last('ended')}")
                continue
            self._in_time(rank, seen, lost)
            if rank != self.fault.victim and names and self.fault.victim not in lost["sites"]:
                self.wonder(f"site {rank} names {lost['sites']}: {lost['why']}")
            elif rank != self.fault.victim and names and len(lost["sites"]) > 1:
                self.wonder(f"site {rank} names others, too: {lost['sites']}: {lost['why']}")
            if lost["grads"] and self.trial.method != "local steps":
                self.complain(f"site {rank} has gradients left")
            if self.trial.method != "local steps" and lost["step"] != seen.steps:
                self.wonder(f"site {rank} says step {lost['step']}, has made {seen.steps}")

    def _in_time(self, rank: int, seen: Seen, lost: dict[str, Any]) -> None:
        assert self.injected_at is not None
        began, limit_s = self.injected_at, 2 * self.trial.timeout_s + MARGIN_S
        if rank == self.fault.victim:
            began = seen.resumed_at or began
            delays = self.fault.kind == "long delay"
            limit_s += self.fault.delay_s * self.trial.timeout_s if delays else 0.0
        else:
            self.took_s.append(lost["at"] - began)
        if lost["at"] - began > limit_s:
            self.wonder(f"site {rank} raised after {lost['at'] - began:.1f} s: {lost['why']}")

    def _refused(self) -> None:
        """All sites raise the same, or lost the one that was not there."""
        crash = self.fault.moment == "crash"
        for rank, seen in (self._others if crash else dict(enumerate(self.sites))).items():
            ended = seen.last("ended") or {"error": "nothing", "why": ""}
            wanted = "SiteLostError" if crash else "ValueError"
            if ended["error"] != wanted:
                self.wonder(f"site {rank} ended with {ended}, not {wanted}")
            elif f"site {self.fault.victim}" not in ended["why"]:
                self.wonder(f"site {rank} does not name the victim: {ended}")

    def _turned_away(self, newcomer: Seen) -> None:
        ended = newcomer.last("ended")
        if newcomer.status != 0 or ended is None or "Error" not in ended["error"]:
            self.wonder(f"the newcomer ended with {newcomer.status}, {ended}")
            return
        took_s, most_s = ended["at"] - newcomer.lines[0]["at"], 5 * NEWCOMER_S + 2 + MARGIN_S
        if took_s > most_s + self.trial.timeout_s:
            self.wonder(f"the newcomer raised after {took_s:.1f} s: {ended}")


def _end(seen: Seen) -> str:
    ended = seen.last("ended")
    return "was ended" if ended is None else ended["error"]


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """A table of what was done and how long it took until the others raised."""
    lines = ["| fault | injected | all raised | went on | median s | longest s |"]
    lines.append("|---|---|---|---|---|---|")
    for kind in sorted({v.trial.fault.kind for v in verdicts} - {"none"}):
        own = [v for v in verdicts if v.trial.fault.kind == kind and v.injected]
        ends = Counter("done" if v.outcome == "done" else "raised" for v in own)
        took = [s for v in own for s in v.took_s]
        times = f"{median(took):.2f} | {max(took):.2f}" if took else "- | -"
        lines.append(f"| {kind} | {len(own)} | {ends['raised']} | {ends['done']} | {times} |")
    total = sum(v.injected for v in verdicts)
    bad = sum(bool(v.complaints) for v in verdicts)
    doubts = sum(v.in_doubt for v in verdicts)
    lines += ["", f"{total} faults in {len(verdicts)} trials, {bad} of which went wrong"]
    return [*lines, f"{doubts} times a site could not know that its last step counts elsewhere"]
