"""outergrad: distributed auto-differentiation for PyTorch.

Sites that train replicas of one model exchange the factors of its weight gradients, activations
and deltas, instead of the gradients: the same gradients at a fraction of the bytes.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from outergrad._version import __version__

if TYPE_CHECKING:
    from outergrad import (
        drift,
        events,
        forward,
        gossip,
        nn,
        optim,
        private,
        report,
        spectra,
        transforms,
        wire,
    )
    from outergrad.checkpoint import Checkpoints, DCPState, Restored
    from outergrad.comm.process_group import TorchDistributed
    from outergrad.core.errors import (
        BadStepsError,
        DriftError,
        SiteLostError,
        SitesChangedError,
        StepDiscardedError,
    )
    from outergrad.core.protocols import Rule
    from outergrad.core.sent import Sent, Tap
    from outergrad.core.transform import GradientTransform, SampleRows, SiteGradient
    from outergrad.core.types import Call, Factors, Part, Slot
    from outergrad.drift.on_drift import OnDrift
    from outergrad.gossip.settings import Gossip
    from outergrad.layers import RULES
    from outergrad.methods.auto.chooser import Auto
    from outergrad.methods.dad import DAD
    from outergrad.methods.dense import Dense
    from outergrad.methods.edad import EDAD
    from outergrad.methods.local_steps import LocalSteps, nesterov
    from outergrad.methods.per_layer import Local, PerLayer
    from outergrad.methods.powersgd import PowerSGD
    from outergrad.methods.rank_dad import RankDAD
    from outergrad.methods.schedule import Schedule
    from outergrad.methods.sparse import Sparse
    from outergrad.private.private import Private
    from outergrad.record.file_tap import FileTap
    from outergrad.record.jsonl import JSONL
    from outergrad.record.tensorboard import TensorBoard
    from outergrad.record.wandb import WandB
    from outergrad.session.attach import distribute
    from outergrad.session.ddp import DistributedDataParallel
    from outergrad.session.session import Session
    from outergrad.star.transport import Star

__all__ = [
    "DAD",
    "EDAD",
    "JSONL",
    "RULES",
    "Auto",
    "BadStepsError",
    "Call",
    "Checkpoints",
    "DCPState",
    "Dense",
    "DistributedDataParallel",
    "DriftError",
    "Factors",
    "FileTap",
    "Gossip",
    "GradientTransform",
    "Local",
    "LocalSteps",
    "OnDrift",
    "Part",
    "PerLayer",
    "PowerSGD",
    "Private",
    "RankDAD",
    "Restored",
    "Rule",
    "SampleRows",
    "Schedule",
    "Sent",
    "Session",
    "SiteGradient",
    "SiteLostError",
    "SitesChangedError",
    "Slot",
    "Sparse",
    "Star",
    "StepDiscardedError",
    "Tap",
    "TensorBoard",
    "TorchDistributed",
    "WandB",
    "__version__",
    "distribute",
    "drift",
    "events",
    "forward",
    "gossip",
    "nesterov",
    "nn",
    "optim",
    "private",
    "report",
    "spectra",
    "transforms",
    "wire",
]

_HOMES = {
    "checkpoint": ("Checkpoints", "DCPState", "Restored"),
    "comm.process_group": ("TorchDistributed",),
    "core.errors": (
        "BadStepsError",
        "DriftError",
        "SiteLostError",
        "SitesChangedError",
        "StepDiscardedError",
    ),
    "core.protocols": ("Rule",),
    "core.sent": ("Sent", "Tap"),
    "core.transform": ("GradientTransform", "SampleRows", "SiteGradient"),
    "core.types": ("Call", "Factors", "Part", "Slot"),
    "drift.on_drift": ("OnDrift",),
    "gossip.settings": ("Gossip",),
    "layers": ("RULES",),
    "methods.auto.chooser": ("Auto",),
    "methods.dad": ("DAD",),
    "methods.dense": ("Dense",),
    "methods.edad": ("EDAD",),
    "methods.local_steps": ("LocalSteps", "nesterov"),
    "methods.per_layer": ("Local", "PerLayer"),
    "methods.powersgd": ("PowerSGD",),
    "methods.rank_dad": ("RankDAD",),
    "methods.schedule": ("Schedule",),
    "methods.sparse": ("Sparse",),
    "private.private": ("Private",),
    "record.file_tap": ("FileTap",),
    "record.jsonl": ("JSONL",),
    "record.tensorboard": ("TensorBoard",),
    "record.wandb": ("WandB",),
    "session.attach": ("distribute",),
    "session.ddp": ("DistributedDataParallel",),
    "session.session": ("Session",),
    "star.transport": ("Star",),
}
_MODULES = (
    "drift",
    "events",
    "forward",
    "gossip",
    "nn",
    "optim",
    "private",
    "report",
    "spectra",
    "transforms",
    "wire",
)


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use: all of them are 300 files, and PyTorch."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is not None:
        value = getattr(import_module(f"outergrad.{home}"), name)
    elif name in _MODULES:
        value = import_module(f"outergrad.{name}")
    else:
        problem = f"module 'outergrad' has no attribute {name!r}"
        raise AttributeError(problem, name=name, obj=sys.modules[__name__])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *(name for name in __all__ if name not in globals())]
