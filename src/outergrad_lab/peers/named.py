"""Methods by their names at the lab's command lines: outergrad's, PyTorch's and peers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import nn

from outergrad.tools.named_methods import attach as library
from outergrad.tools.named_methods.attach import METHODS, Attach, Family, Peer, Replica
from outergrad_lab.peers.acp_sgd import ACPSGD
from outergrad_lab.peers.decoupled_momentum import DeMo
from outergrad_lab.peers.dion2 import Dion2
from outergrad_lab.peers.ef21_muon import EF21Muon
from outergrad_lab.peers.lordo import LoRDO
from outergrad_lab.peers.muloco import MuLoCo
from outergrad_lab.peers.orthonormal_updates import Dion
from outergrad_lab.peers.sparse_loco import SparseLoCo
from outergrad_lab.peers.sparta import SPARTA


class PeerSettings(Protocol):
    """Settings of a peer."""

    def peer(self, model: nn.Module, group: dist.ProcessGroup | None) -> Peer:
        """Attaches the method to a model; every site of the group must call it."""
        ...


def _attach(settings: PeerSettings, model: nn.Module, group: dist.ProcessGroup | None) -> Replica:
    return Replica(model=model, peer=settings.peer(model, group))


def _family(kind: type[PeerSettings]) -> Family:
    return Family(lambda **settings: partial(_attach, kind(**settings)), kind)


PEERS: dict[str, Family] = {
    "demo": _family(DeMo),
    "sparseloco": _family(SparseLoCo),
    "muloco": _family(MuLoCo),
    "lordo": _family(LoRDO),
    "dion": _family(Dion),
    "dion2": _family(Dion2),
    "ef21-muon": _family(EF21Muon),
    "acp-sgd": _family(ACPSGD),
    "sparta": _family(SPARTA),
}
"""Peers by name; settings may follow: ``demo:entries=8:bucket=True``. DiLoCo is
``local-steps:lr=0.7:momentum=0.9``."""

SITES_DIFFER = ("alone", "local-steps", "fedavg", "sparseloco", "muloco", "lordo", "sparta")
"""Families of methods whose sites have weights of their own."""

METHOD_HELP = f"{', '.join([*METHODS, *PEERS])}, or with settings, as rank-dad:rank=16"


def attach_of(
    name: str, option: str = "--method", local: Sequence[str] = (), *, joint: bool = False
) -> Attach:
    """Extends `outergrad.tools.named_methods.attach.attach_of` by the peers.

    Raises:
        RecipeError: There is no such method or setting, or it cannot leave out parameters.
    """
    return library.attach_of(name, option, local, joint=joint, others=PEERS)


def is_peer(name: str) -> bool:
    """True if a method is one of `PEERS`."""
    return family(name) in PEERS


def sites_differ(name: str) -> bool:
    """True if the sites have weights of their own, at least between two exchanges."""
    return family(name) in SITES_DIFFER


def family(name: str) -> str:
    """Returns the part of a name before the settings."""
    return name.partition(":")[0]
