"""Methods: how gradients travel. A method is a frozen dataclass; its exchange does the work."""

from outergrad.exchange.dad import DAD
from outergrad.exchange.dense import Dense
from outergrad.exchange.edad import EDAD
from outergrad.exchange.local_steps import LocalSteps
from outergrad.exchange.per_layer import Local, PerLayer
from outergrad.exchange.powersgd import PowerSGD
from outergrad.exchange.rank_dad import RankDAD

__all__ = ["DAD", "EDAD", "Dense", "Local", "LocalSteps", "PerLayer", "PowerSGD", "RankDAD"]
