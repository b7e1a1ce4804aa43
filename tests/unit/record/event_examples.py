"""An event of every kind."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

from made_up_run import events, layer
from outergrad.events import (
    Change,
    Disclosure,
    Drift,
    End,
    Evaluation,
    Event,
    Exchange,
    Layer,
    Mishap,
    Privacy,
    Run,
    Scalars,
    Step,
    Trial,
)

BEGUN = events(rank=1, sites=2, steps=1, every=1, start=1.7e9)
RUN = next(e for e in BEGUN if isinstance(e, Run))
LAYER = layer(rank=1, sites=2, step=10, name="encoder.0.weight")
BARE = Layer(**{f.name: getattr(LAYER, f.name) for f in fields(Layer) if f.default is MISSING})
DENSE = layer(rank=1, sites=2, step=10, name="head.weight")
STEP = replace(next(e for e in BEGUN if isinstance(e, Step)), step=10, seconds=0.1)
FIRST_STEP = replace(STEP, step=0, seconds=None)
SCALARS = Scalars(rank=1, step=11, time=1.7e9, values={"loss": 0.5, "lr": 1e-3})
MISHAP = Mishap(rank=1, step=11, time=1.7e9, what="skipped", sites=(0,), layer="head.weight")
TRIAL = Trial(
    rank=1,
    step=11,
    time=1.7e9,
    methods=("DAD()", "Dense()"),
    seconds=0.2,
    kept_seconds=0.1,
    outcome="twice as long",
)
EVALUATION = Evaluation(
    rank=1,
    step=11,
    time=1.7e9,
    rows=40,
    shares={"well": 0.5, "ill": 0.5},
    figures={"accuracy": (0.75, 0.6, 0.86), "auc": (0.8, 0.7, 0.9), "calibration error": (0.1,)},
    alone={"accuracy": (0.7, 0.55, 0.82)},
    gains={"accuracy": (0.05, -0.1, 0.2)},
    calibration=((40.0, 0.5, 0.5, 0.35, 0.65),),
)
DISCLOSURE = Disclosure(
    rank=1, step=0, time=1.7e9, learn={"head.weight": ("dense", "this site's gradient")}
)
CHANGE = Change(
    rank=1,
    step=11,
    time=1.7e9,
    epoch=1,
    sites=("hospital-a", "hospital-b"),
    lost=("hospital-c",),
    back=(),
    why={"hospital-c": "it was revoked"},
)
EXCHANGE = Exchange(
    rank=1,
    step=11,
    time=1.7e9,
    number=12,
    took_part=("hospital-a", "hospital-b"),
    late=("hospital-c",),
)
DRIFT = Drift(rank=1, step=11, time=1.7e9, checks=12, sites=("hospital-a",))
PRIVACY = Privacy(
    rank=1,
    step=11,
    time=1.7e9,
    steps=12,
    delta=1e-5,
    epsilon={"model": 0.5, "site": 0.7, "hub": 0.5},
    stop_at=3.0,
)
END = End(rank=1, step=11, time=1.7e9, error="ValueError")

EVENTS: dict[str, Event] = {
    "run": RUN,
    "layer": LAYER,
    "bare layer": BARE,
    "dense layer": DENSE,
    "step": STEP,
    "first step": FIRST_STEP,
    "scalars": SCALARS,
    "evaluation": EVALUATION,
    "disclosure": DISCLOSURE,
    "change": CHANGE,
    "exchange": EXCHANGE,
    "drift": DRIFT,
    "privacy": PRIVACY,
    "mishap": MISHAP,
    "trial": TRIAL,
    "end": END,
}
