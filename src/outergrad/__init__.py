"""outergrad: distributed auto-differentiation for PyTorch.

Sites that train replicas of one model exchange the factors of its weight gradients, activations
and deltas, instead of the gradients: the same gradients at a fraction of the bytes.
"""

from outergrad import report, wire
from outergrad._attach import distribute
from outergrad._protocols import Rule
from outergrad._session import Session
from outergrad._step import StepDiscardedError
from outergrad._types import Call, Event, Factors, Part, Slot
from outergrad._version import __version__
from outergrad.exchange import DAD, EDAD, Dense, Local, LocalSteps, PerLayer, PowerSGD, RankDAD
from outergrad.layers import RULES

__all__ = [
    "DAD",
    "EDAD",
    "RULES",
    "Call",
    "Dense",
    "Event",
    "Factors",
    "Local",
    "LocalSteps",
    "Part",
    "PerLayer",
    "PowerSGD",
    "RankDAD",
    "Rule",
    "Session",
    "Slot",
    "StepDiscardedError",
    "__version__",
    "distribute",
    "report",
    "wire",
]
