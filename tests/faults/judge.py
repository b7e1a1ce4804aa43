"""Whether a trial went as it must: who raised, when, and in which state the sites are."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from faulty_site import NEWCOMER_S
from trials import GOING, LETHAL, Fault, Trial

_FIRST_STEPS = 1
_NEAR = 1e-3
_STORE_S = 2.0
"""For a store that does not answer."""
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
        in_doubt: whether sites that are left differ, and all of them said that they may.
        needless: whether sites said so that do not differ.
        outcome: how the other sites ended, in a word.
        took_s: from the fault until a site raised, for each that did.
        complaints: what should not be.
    """

    trial: Trial
    injected: bool
    slow: bool
    in_doubt: bool
    needless: bool
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
    ended = found.in_doubt, found.needless, found.outcome, took, wrong
    return Verdict(trial, injected and not slow, slow, *ended)


class _Judgement:
    def __init__(self, trial: Trial, sites: Sequence[Seen], reference: Seen) -> None:
        self.trial, self.fault, self.sites = trial, trial.fault, sites
        self.reference, self.marks = reference.states, reference.marks
        self.wrong: list[str] = []
        self.late: list[str] = []
        self.in_doubt = self.needless = False
        self.took_s: list[float] = []
        times = [self._at(sites[f.victim], "injected") for f in trial.faults if self._hit(f)]
        self.injected_at = min(times, default=None)
        self.outcome = self._outcome()

    @property
    def _victims(self) -> set[int]:
        """Sites to which something happened, or that computed for longer than others wait."""
        at = {fault.victim for fault in self.trial.faults if self._hit(fault)}
        return {self.fault.victim} | at | ({self.trial.busy} - {None})

    def _hit(self, fault: Fault) -> bool:
        return bool(self.sites[fault.victim].told("injected"))

    @property
    def _others(self) -> dict[int, Seen]:
        return {r: seen for r, seen in enumerate(self.sites) if r != self.fault.victim}

    @property
    def _bound(self) -> dict[int, Seen]:
        """Those that must be equal in the end: who was killed or left is not asked."""
        gone = {f.victim for f in self.trial.faults if f.kind in GOING}
        gone -= {f.victim for f in self.trial.faults[1:] if not self._hit(f)}
        return {r: seen for r, seen in enumerate(self.sites) if r not in gone}

    def _outcome(self) -> str:
        ends = {_end(seen) for r, seen in self._bound.items() if r != self.fault.victim}
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
        if self._drifted:
            self._all_drifted()
            return
        self._states()
        self._effects()
        if self._is_lethal():
            self._all_raised()
        elif self.injected_at is not None or self.trial.busy is None:
            self._all_done()
        if newcomer is not None:
            self._turned_away(newcomer)

    @property
    def _drifted(self) -> bool:
        """Whether a sum was damaged that sites applied, which they find out a step later."""
        found = any(seen.told("drifted") for seen in self.sites)
        last = self.fault.step == self.trial.steps - 1 and not self.trial.detaches
        damaged = self.injected_at is not None and self.fault.kind == "corrupt"
        lost = any(seen.told(what) for seen in self.sites for what in ("asked", "discarded"))
        return found or (damaged and last and not lost and not self._lost_any)

    @property
    def _lost_any(self) -> bool:
        return any(seen.told("lost") or seen.told("noted") for seen in self.sites)

    def _all_drifted(self) -> None:
        """All sites raise the same, behind steps that were as undisturbed."""
        told = [[line["why"] for line in seen.told("drifted")] for seen in self.sites]
        if self.fault.kind != "corrupt" or any(why != told[0] for why in told):
            self.complain(f"sites say of a drift {told}")
        for rank, seen in enumerate(self.sites):
            expected = self.reference[: self.fault.step + 1]
            if seen.states[: len(expected)] != expected:
                self.complain(f"site {rank} is not as undisturbed before the fault")

    def _is_lethal(self) -> bool:
        if self.injected_at is None:
            return False
        hit = [f for f in self.trial.faults if self._hit(f) and not self._is_too_late(f)]
        return any(f.kind in LETHAL for f in hit) or (
            self.fault.kind == "corrupt" and any(seen.told("lost") for seen in self.sites)
        )

    def _is_too_late(self, fault: Fault) -> bool:
        """To matter: the site had done all."""
        seen = self.sites[fault.victim]
        return bool(seen.told("done")) and self._at(seen, "done") <= self._at(seen, "injected")

    def _exits(self) -> None:
        """No process was ended by a signal that nobody sent."""
        for rank, seen in enumerate(self.sites):
            if seen.status not in self._allowed(rank):
                self.complain(f"site {rank} ended with {seen.status}: {seen.last('ended')}")

    def _allowed(self, rank: int) -> set[int]:
        kinds = {f.kind for f in self.trial.faults if f.victim == rank and self._hit(f)}
        if kinds & {"kill", "restart"}:
            return {-signal.SIGKILL}
        return {-signal.SIGINT, 0} if "interrupt" in kinds else {0}

    def _effects(self) -> None:
        """A fault of which nothing is seen has not been tried."""
        for fault in self.trial.faults:
            seen = self.sites[fault.victim]
            ended = bool(seen.told("ended")) and self._at(seen, "ended") < self._at(
                seen, "injected"
            )
            ended = ended or (fault.moment == "vote" and self._is_too_late(fault))
            if self._hit(fault) and not ended and not self._has_effect(fault, seen):
                self.complain(f"{fault.kind} had no effect on site {fault.victim}: {seen.lines}")

    def _has_effect(self, fault: Fault, seen: Seen) -> bool:
        ended, at = seen.last("ended") or {"error": ""}, self._at(seen, "injected")
        went_on = self._at(seen, "went on")
        late_s = fault.delay_s * self.trial.timeout_s
        checks = {
            "kill": seen.status == -signal.SIGKILL,
            "restart": seen.status == -signal.SIGKILL,
            "interrupt": ended["error"] == "KeyboardInterrupt",
            "leave": ended["error"] == "left",
            "stop": seen.resumed_at is not None and not self._does(seen, at, seen.resumed_at),
            "brief delay": went_on - at >= late_s,
            "twin": went_on - at >= late_s,
            "long delay": went_on - at >= late_s,
            "raise": any(one["error"] == "InjectedError" for one in seen.told("discarded")),
            "nan": bool(seen.told("skipped")),
            "reset": bool(seen.told("reset")),
            "cut": bool(went_on),
            "slow store": bool(went_on),
            "store away": bool(seen.told("warned")),
            "corrupt": any(
                one.told(what)
                for one in self.sites
                for what in ("asked", "began again", "discarded", "lost", "noted")
            ),
        }
        return checks[fault.kind]

    def _does(self, seen: Seen, since: float, until: float) -> bool:
        """Whether a site did something meanwhile; a signal may reach it a little later."""
        return any(since + 0.5 < line["at"] < until for line in seen.lines)

    def _at(self, seen: Seen, event: str) -> float:
        line = seen.last(event)
        return 0.0 if line is None else line["at"]

    def _states(self) -> None:
        """Sites that are left have made the same steps, or say of each other that they may not."""
        finals = {r: seen.applied for r, seen in self._bound.items()}
        pairs = [(r, o) for r, n in finals.items() for o, m in finals.items() if n < m]
        unsaid = [pair for pair in pairs if not self._is_said(*pair, finals)]
        self.in_doubt = bool(pairs) and not unsaid
        self.needless = not pairs and any(self._doubts(seen) for seen in self._bound.values())
        for behind, ahead in unsaid:
            self.complain(f"site {behind} is behind site {ahead}, which was not said: {finals}")
        for rank, seen in enumerate(self.sites):
            expected = list(self.reference[: len(seen.states)])
            if self._comparable and seen.states != expected:
                first = next(i for i, s in enumerate(seen.states) if [s] != expected[i : i + 1])
                self.complain(f"site {rank} is not as undisturbed after step {first}")
            if not self._close(seen):
                self.complain(f"site {rank} is not near to undisturbed: {seen.marks}")
        ends = {seen.states[-1] for seen in self._bound.values() if seen.states}
        if len(ends) > 1 and not self.in_doubt:
            self.complain(f"states differ: {ends}")

    def _is_said(self, behind: int, ahead: int, finals: Mapping[int, int]) -> bool:
        """By both; who came to its end before it heard of a loss need not."""
        lost, other = self.sites[behind].last("lost"), self.sites[ahead].last("lost")
        if lost is None or finals[ahead] - finals[behind] > 1:
            return False
        said = not lost["certain"] and ahead in lost["may_differ"]
        return said and (other is None or behind in other["may_differ"])

    def _doubts(self, seen: Seen) -> bool:
        lost = seen.last("lost")
        return lost is not None and not lost["certain"]

    @property
    def was_slow(self) -> bool:
        """Whether a site waited in vain for one that nothing had happened to."""
        if self.injected_at is None and self.trial.busy is not None:
            return False
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
        turn = self.fault.step // self.trial.sessions
        return not again or (turn > _FIRST_STEPS and self.trial.method != "local steps")

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
        if self.injected_at is not None and self.fault.moment == "settling":
            self._settled_in_time(self.injected_at)

    def _settled_in_time(self, injected_at: float) -> None:
        """Whoever is left: 2 T until all are there, T for those that read, and for a dead store."""
        limit_s = 3 * self.trial.timeout_s + 2 * _STORE_S + MARGIN_S
        for rank, seen in self._bound.items():
            took_s = self._at(seen, "ended") - (seen.resumed_at or injected_at)
            if took_s > limit_s:
                self.wonder(f"site {rank} settled after {took_s:.1f} s")

    def _told_of(self, fault: Fault) -> None:
        """All heard of the step that came to nothing."""
        expected = {"raise": "discarded", "nan": "skipped", "corrupt": "discarded"}
        noted = any(seen.told("noted") for seen in self.sites)  # a vote on the last step
        noted = noted or self._is_too_late(fault)
        noted = noted or any(seen.told("asked") or seen.told("began again") for seen in self.sites)
        if fault.kind in expected and not noted:
            counts = {r: len(seen.told(expected[fault.kind])) for r, seen in enumerate(self.sites)}
            if set(counts.values()) != {1}:
                self.wonder(f"{expected[fault.kind]} steps: {counts}")

    def _all_raised(self) -> None:
        for rank, seen in self._bound.items():
            lost = seen.last("lost")
            if lost is None:
                # Else the fault came behind the votes of the last step.
                if not seen.told("done"):
                    self.wonder(f"site {rank} did not raise SiteLostError: {seen.last('ended')}")
                continue
            self._in_time(rank, seen, lost)
            self._names(rank, lost)
            between = seen.told("done")  # the last step is over: its gradients stay, as DDP's do
            if lost["grads"] and not between and self.trial.method != "local steps":
                self.complain(f"site {rank} has gradients left")
            alone = self.trial.method != "local steps" and self.trial.sessions == 1
            if alone and lost["step"] != seen.steps:
                self.wonder(f"site {rank} says step {lost['step']}, has made {seen.steps}")

    def _names(self, rank: int, lost: dict[str, Any]) -> None:
        """Nobody but sites to which something happened, or with which the store went in the end.

        A connection that is reset has two ends.
        """
        if rank in self._victims or self.fault.kind in ("corrupt", "reset"):
            return
        done = {r for r, seen in enumerate(self.sites) if seen.told("done")}
        named, victims = set(lost["sites"]), self._victims | done
        if not named & victims:
            self.wonder(f"site {rank} names {lost['sites']}: {lost['why']}")
        elif not named <= victims:
            self.wonder(f"site {rank} names others, too: {lost['sites']}: {lost['why']}")

    def _in_time(self, rank: int, seen: Seen, lost: dict[str, Any]) -> None:
        assert self.injected_at is not None
        began = max(self._at(self.sites[f.victim], "injected") for f in self.trial.faults)
        limit_s = (2 + self.trial.busy_s) * self.trial.timeout_s + MARGIN_S
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
    lines = ["| fault | injected | raised | went on | median s | longest s |"]
    lines.append("|---|---|---|---|---|---|")
    for kind in sorted({v.trial.fault.kind for v in verdicts} - {"none"}):
        own = [v for v in verdicts if v.trial.fault.kind == kind and v.injected]
        ends = Counter("done" if v.outcome == "done" else "raised" for v in own)
        took = [s for v in own for s in v.took_s]
        times = f"{median(took):.2f} | {max(took):.2f}" if took else "- | -"
        lines.append(f"| {kind} | {len(own)} | {ends['raised']} | {ends['done']} | {times} |")
    total = sum(v.injected for v in verdicts)
    bad = sum(bool(v.complaints) for v in verdicts)
    doubts, needless = (sum(getattr(v, k) for v in verdicts) for k in ("in_doubt", "needless"))
    lines += ["", f"{total} faults in {len(verdicts)} trials, {bad} of which went wrong"]
    lines.append(f"{doubts} times sites that are left differ by a step, and say that they may")
    return [*lines, f"{needless} times a site says so that does not differ"]
