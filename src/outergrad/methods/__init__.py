"""Methods: how gradients travel. A method is a frozen dataclass; its compressor does the work."""

from outergrad.methods.auto import Auto
from outergrad.methods.dad import DAD
from outergrad.methods.dense import Dense
from outergrad.methods.edad import EDAD
from outergrad.methods.local_steps import LocalSteps
from outergrad.methods.per_layer import Local, PerLayer
from outergrad.methods.powersgd import PowerSGD
from outergrad.methods.rank_dad import RankDAD
from outergrad.methods.schedule import Schedule
from outergrad.methods.sparse import Sparse

__all__ = [
    "DAD",
    "EDAD",
    "Auto",
    "Dense",
    "Local",
    "LocalSteps",
    "PerLayer",
    "PowerSGD",
    "RankDAD",
    "Schedule",
    "Sparse",
]
