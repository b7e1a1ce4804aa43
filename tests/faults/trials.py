"""What a trial of the fault harness is: drawn at random, the same again from the same seed."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace

import torch
from torch import nn

import outergrad as og

SIGN = og.wire.Sign()
METHODS = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "rank-dad gather": og.RankDAD(rank=2, reduce="gather"),
    "rank-dad two_way": og.RankDAD(rank=2, reduce="two_way"),
    "signs two_way": og.Sparse(
        density=0.3, select="random", wire=SIGN, vectors=SIGN, reduce="two_way"
    ),
    "rank-dad all_reduce": og.RankDAD(rank=2, reduce="all_reduce"),
    "powersgd": og.PowerSGD(rank=2),
    "sparse": og.Sparse(density=0.05),
    "sparse random": og.Sparse(density=0.05, select="random"),
    "edad blocks": og.EDAD(blocks=["0"], inputs="raw", always=True),
    "per layer": og.PerLayer({"0.*": og.RankDAD(rank=2, reduce="gather"), "*": og.Dense()}),
    "local steps": og.LocalSteps(2, method=og.Dense()),
}

LATE = [
    name for name in METHODS if name in ("dense", "dad", "rank-dad gather", "sparse", "per layer")
]
"""Methods whose last step nobody has voted on, so that their sessions settle by the store."""

WAITING = ["rank-dad all_reduce", "powersgd", "sparse random", "edad blocks"]
"""Methods whose steps wait for votes."""

BENIGN = {"none", "brief delay", "raise", "nan", "corrupt", "twin", "slow store", "store away"}
"""After these all sites go on; after some corruptions they all give up, too."""
LETHAL = {"kill", "stop", "long delay", "interrupt", "leave", "restart", "cut", "reset"}
"""After these the sites that are left raise."""
GOING = {"kill", "restart", "interrupt", "leave"}
"""What is left of the victim is not asked after these."""
WEIGHTS = {
    "kill": 30,
    "corrupt": 20,
    "raise": 12,
    "stop": 10,
    "brief delay": 9,
    "nan": 8,
    "interrupt": 8,
    "long delay": 6,
    "leave": 5,
    "restart": 5,
    "settings": 6,
    "twin": 4,
    "cut": 5,
    "reset": 8,
}
SETTLING = ("kill", "kill", "stop", "slow store", "store away")
"""What happens while sites settle."""
_VOTED = 16
"""The step in which sites vote after the first, and a few before and behind it."""
MOMENTS = ("forward", "backward", "message", "voting", "optimizer", "any", "distribute")
_OF_KIND = {
    "corrupt": ("payload", "payload", "payload", "header", "vote"),
    "raise": ("backward",),
    "nan": ("forward",),
    "leave": ("forward",),
    "twin": ("forward",),
    "brief delay": MOMENTS[:-2],
    "long delay": MOMENTS[:-2],
    "settings": ("method", "width", "dtype", "parameter", "crash"),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to a site.

    Attributes:
        kind: see WEIGHTS.
        victim: the site.
        step: how many it has applied by then.
        moment: where in that step; "any" is some time after it began. What is corrupted, or what
            differs, where the kind is one of those.
        index: which message of the step, counted from 0.
        after_s: for "any".
        delay_s: how long a site sleeps, in parts of the timeout.
        heard_by: which sites get the vote, where it is interrupted.
        place: in a message whose bit is flipped, from 0 to 1.
    """

    kind: str
    victim: int = 0
    step: int = 0
    moment: str = "forward"
    index: int = 0
    after_s: float = 0.0
    delay_s: float = 0.0
    heard_by: tuple[int, ...] = ()
    place: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Sites that train, one or two of which meet with a fault.

    Attributes:
        number: of the trial in its run.
        method: key of METHODS.
        model: "mlp" or "tokens".
        sites: S.
        steps: that all sites are to apply.
        timeout_s: of `distribute`.
        store: "file", or "tcp": held by site 0.
        destroys: whether sites destroy the process group before they end.
        ends: whether they leave through Python's own end.
        detaches: whether sites detach their sessions before they end.
        drops: whether sites let go of them, models and all, in place of that.
        sessions: models that are trained in turns.
        busy: a site that computes for long after the step of the fault, if there is one.
        busy_s: for how long, in parts of the timeout.
        fault: what happens.
        second: what happens to another site about then, if anything: it is killed.
    """

    number: int
    method: str
    model: str
    sites: int
    steps: int = 6
    timeout_s: float = 1.0
    store: str = "file"
    destroys: bool = True
    ends: bool = False
    detaches: bool = True
    drops: bool = False
    sessions: int = 1
    busy: int | None = None
    busy_s: float = 0.0
    fault: Fault
    second: Fault | None = None

    @property
    def faults(self) -> list[Fault]:
        """All that happens."""
        return [self.fault, *([self.second] if self.second else [])]

    @property
    def gone(self) -> set[int]:
        """Sites of which nothing is left afterwards."""
        return {fault.victim for fault in self.faults if fault.kind in GOING}

    @property
    def reference(self) -> Trial:
        """The same, undisturbed."""
        kept = {"method": self.method, "model": self.model, "sites": self.sites}
        kept["sessions"], kept["steps"] = self.sessions, self.steps
        number = -1 - zlib.crc32(repr(kept).encode())  # names its files
        return Trial(**kept, number=number, timeout_s=60.0, fault=Fault(kind="none"))


def draw(number: int, seed: int, timeout_s: float, *, can_cut: bool) -> Trial:
    """A trial that follows from a seed and its number."""
    dice = random.Random(f"{seed} {number}")
    weights = dict(WEIGHTS) if can_cut else {k: w for k, w in WEIGHTS.items() if k != "cut"}
    kind = dice.choices(list(weights), list(weights.values()))[0]
    methods = [m for m in METHODS if m != "local steps" or kind not in ("raise", "nan")]
    method = dice.choice(methods)
    model = "mlp" if method == "edad blocks" else dice.choice(["mlp", "tokens"])
    sites = dice.choice([2, 2, 3, 3, 3, 4])
    # A cut site cannot see the others' files either.
    store = "tcp" if kind == "cut" else dice.choice(["file", "tcp"])
    base = Trial(number=number, method=method, model=model, sites=sites, fault=Fault(kind="none"))
    base = replace(base, timeout_s=timeout_s, store=store, destroys=dice.random() < 0.5)
    base = replace(base, ends=dice.random() < 0.1, detaches=dice.random() < 0.7)
    base = replace(base, sessions=dice.choice([1, 1, 1, 2]))
    trial = _with_company(dice, replace(base, fault=_fault(dice, kind, base)))
    trial = _around_votes(random.Random(f"votes {seed} {number}"), trial)
    return _later_kinds(random.Random(f"later {seed} {number}"), trial)


def _later_kinds(dice: random.Random, trial: Trial) -> Trial:
    """What the harness has learnt since: trials of older seeds stay what they were but for these.

    A raise may be in the loss, before anything that is shared; a site may die in the vote on the
    last step, where steps wait for votes; a session may lose its last reference.
    """
    chance, kind = dice.random(), trial.fault.kind
    if kind == "raise" and chance < 0.5:
        return replace(trial, fault=replace(trial.fault, moment="loss"))
    if kind in ("kill", "reset") and trial.fault.moment == "voting" and chance < 0.4:
        alone = replace(trial, second=None, busy=None, busy_s=0.0, method=dice.choice(WAITING))
        others = [site for site in range(trial.sites) if site != trial.fault.victim]
        heard_by = tuple(dice.sample(others, dice.randrange(1, len(others) + 1)))
        last = replace(trial.fault, step=trial.steps - 1, heard_by=heard_by)
        return replace(alone, model="mlp", fault=last)
    return replace(trial, drops=not trial.detaches and chance < 0.5)


def _around_votes(dice: random.Random, trial: Trial) -> Trial:
    """Now and then the fault comes about a vote that is not the first, or while sites settle."""
    chance, alone = dice.random(), replace(trial, second=None, busy=None, busy_s=0.0)
    if chance < 0.08 and trial.fault.kind in ("kill", "corrupt", "reset", "stop", "interrupt"):
        step = _VOTED + dice.choice([-1, 0, 0, 1])
        return replace(alone, steps=_VOTED + 2, fault=replace(trial.fault, step=step))
    if chance > 0.9:
        fault = Fault(
            kind=dice.choice(SETTLING),
            victim=dice.choice([0, dice.randrange(trial.sites)]),
            step=trial.steps,
            moment="settling",
            delay_s=dice.uniform(0.05, 0.15),
        )
        store, method = dice.choice(["tcp", "tcp", "file"]), dice.choice(LATE)
        return replace(alone, fault=fault, store=store, method=method, detaches=True)
    return trial


def _fault(dice: random.Random, kind: str, trial: Trial) -> Fault:
    victim = dice.randrange(trial.sites)
    others = [site for site in range(trial.sites) if site != victim]
    after_all = kind in LETHAL - {"cut", "stop", "long delay"} and dice.random() < 0.1
    return Fault(
        kind=kind,
        victim=victim,
        step=trial.steps if after_all else dice.randrange(trial.steps),
        moment="forward" if after_all else dice.choice(_OF_KIND.get(kind, MOMENTS)),
        index=dice.choice([0, 0, 1]) if kind == "corrupt" else dice.randrange(3),
        after_s=dice.uniform(0.0, 0.02),
        delay_s=dice.uniform(0.1, 0.4) if kind in BENIGN else dice.uniform(1.5, 2.5),
        heard_by=tuple(dice.sample(others, dice.randrange(len(others) + 1))),
        place=dice.random(),
    )


def _with_company(dice: random.Random, trial: Trial) -> Trial:
    """Now and then another site dies, too, or computes for longer than the others wait."""
    others = [site for site in range(trial.sites) if site != trial.fault.victim]
    kind, chance, other = trial.fault.kind, dice.random(), dice.choice(others)
    second = Fault(
        kind="kill",
        victim=other,
        step=min(trial.fault.step + dice.choice([0, 0, 0, 1]), trial.steps - 1),
        moment=dice.choice(["any", "forward", "message", "voting", trial.fault.moment]),
        index=dice.randrange(3),
        after_s=dice.uniform(0.0, 1.0),
        heard_by=tuple(dice.sample(others, dice.randrange(len(others) + 1))),
    )
    busy = replace(trial, busy=other, busy_s=dice.uniform(1.3, 2.6))
    moment = dice.choice(["message", "voting", "voting", "voting", "optimizer"])
    if trial.sites == 2 or trial.fault.step == trial.steps:
        return trial
    if kind in ("kill", "restart") and chance < 0.2:
        return replace(trial, second=second)
    if kind in ("kill", "interrupt", "leave", "reset", "restart") and chance < 0.5:
        return replace(busy, fault=replace(trial.fault, moment=moment))
    return trial


def build(name: str, width: int = 24) -> nn.Sequential:
    """Two halves, between which a fault may happen."""
    torch.manual_seed(3)
    if name == "tokens":
        lower = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, width))
        return nn.Sequential(lower, nn.Sequential(nn.ReLU(), nn.Linear(width, 4)))
    lower = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 24))
    return nn.Sequential(lower, nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 5)))


def batch(name: str, rank: int, step: int) -> torch.Tensor:
    """Of one site; the rows of "tokens" vary from step to step, so that plans change."""
    dice = torch.Generator().manual_seed(100 * rank + step)
    if name == "tokens":
        rows = int(torch.randint(1, 4, (), generator=dice))
        return torch.randint(0, 20, (rows, 5), generator=dice)
    return torch.randn(4, 6, generator=dice)
