"""outergrad: distributed auto-differentiation for PyTorch.

Sites that train replicas of one model exchange the factors of its weight gradients, activations
and deltas, instead of the gradients: the same gradients at a fraction of the bytes.
"""

from outergrad import events, report, transforms, wire
from outergrad._version import __version__
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
from outergrad.core.transform import GradientTransform, SampleRows, SiteGradient
from outergrad.core.types import Call, Factors, Part, Slot
from outergrad.layers import RULES
from outergrad.methods import (
    DAD,
    EDAD,
    Auto,
    Dense,
    Local,
    LocalSteps,
    PerLayer,
    PowerSGD,
    RankDAD,
    Schedule,
    Sparse,
)
from outergrad.record.jsonl import JSONL
from outergrad.record.tensorboard import TensorBoard
from outergrad.record.wandb import WandB
from outergrad.session.attach import distribute
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
    "DriftError",
    "Factors",
    "GradientTransform",
    "Local",
    "LocalSteps",
    "Part",
    "PerLayer",
    "PowerSGD",
    "RankDAD",
    "Restored",
    "Rule",
    "SampleRows",
    "Schedule",
    "Session",
    "SiteGradient",
    "SiteLostError",
    "SitesChangedError",
    "Slot",
    "Sparse",
    "Star",
    "StepDiscardedError",
    "TensorBoard",
    "TorchDistributed",
    "WandB",
    "__version__",
    "distribute",
    "events",
    "report",
    "transforms",
    "wire",
]
