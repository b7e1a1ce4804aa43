"""A session in the checkpoints of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outergrad.checkpoint.messaging import packed, unpacked
from outergrad.checkpoint.parts import Parts, Saveable, for_a_new_site, set_random_state
from outergrad.comm.agree import agree
from outergrad.core.types import StateDict
from outergrad.messages.raw import as_tensor
from outergrad.session.session import Session

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader


class DCPState:
    """A session as an entry of the dict that DCP saves or loads, beside the model.

        dcp.save({"model": model, "session": og.DCPState(session)}, checkpoint_id=path)
        dcp.load({"model": model, "session": og.DCPState(session, path)}, checkpoint_id=path)

    DCP keeps one copy of values that have the same name on several sites. A session differs between
    sites, so that each has a name of its own here. The loaded state may have been saved by more or
    fewer sites. It includes the random streams (torch, NumPy, Python).

    Args:
        session: session that `og.distribute` returned.
        saved: to load: location of the checkpoint, as the `checkpoint_id` of `dcp.load` or as its
            storage reader.
        name: name of the session, where a checkpoint holds several.
        **own: objects that differ between the sites and must not be in the dict itself: with
            `og.Local` parameters or `og.LocalSteps` the model and the optimizer, as `model=` and
            `optimizer=`; else, if wanted, samplers, a `torch.Generator`.

    Raises:
        ValueError: DCP would keep the model of one site, though each site has its own.
    """

    def __init__(
        self,
        session: Session,
        saved: str | Path | StorageReader | None = None,
        *,
        name: str = "session",
        **own: Saveable,
    ) -> None:
        differs = session.own_names or session.has_own_weights
        if differs and "model" not in own:
            raise ValueError(
                "DCPState: every site has a model of its own, and DCP would keep one of them: "
                "pass model= and optimizer= to og.DCPState, and leave them out of the dict"
            )
        self._session, self._name = session, name
        self._saved, self._parts = saved, Parts(own, session.own_names)

    # -- what DCP calls -------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Returns this site's state under its name; to load, empty tensors for the saved states."""
        comm = self._session.transport()
        rank, sites = comm.rank, comm.world_size
        if self._saved is None:
            state = {"session": self._session.state_dict(), **self._parts.state()}
            return {self._key(rank, sites): as_tensor(packed(state))}
        sizes = self._sizes(self._saved)
        wanted = [rank] if len(sizes) == sites else range(len(sizes))
        return {
            self._key(site, len(sizes)): torch.empty(sizes[site], dtype=torch.uint8)
            for site in wanted
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Resumes from the loaded states; all sites check them together.

        Raises:
            ValueError: on all sites: the state does not fit one of them.
        """
        comm = self._session.transport()
        found = [unpacked(blob.numpy().tobytes()) for blob in _in_order(state_dict)]
        sites = len(found) if len(found) > 1 else found[0]["session"]["sites"]
        same, rank = sites == comm.world_size, comm.rank
        mine = found[0] if same else found[min(rank, sites - 1)]
        self._load_parts(mine if rank < sites else found[0], new=rank >= sites)
        sessions = [one["session"] for one in found]
        self._session.load_state_dict(sessions[0] if same else sessions)
        if rank < sites:
            set_random_state(mine["random"])

    def _load_parts(self, state: StateDict, *, new: bool) -> None:
        error = None
        try:
            parts = for_a_new_site(state["parts"], state["own"]) if new else state["parts"]
            self._parts.load(parts, new=new)
        except ValueError as raised:
            error = raised
        agree(self._session.transport(), ["parts: loaded"], error, "build what was saved")

    # -- names and sizes ------------------------------------------------------------------------

    def _key(self, rank: int, sites: int) -> str:
        return f"outergrad-{self._name}-site-{rank}-of-{sites}"

    def _sizes(self, saved: str | Path | StorageReader) -> list[int]:
        """Returns the sizes in bytes of the saved states, by rank of the sites that saved them.

        Raises:
            ValueError: there is no session of this name.
        """
        # DCP's imports take half a second, so that only users of DCP pay for them.
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        reader = FileSystemReader(saved) if isinstance(saved, str | Path) else saved
        pattern = re.compile(rf"(?:.*\.)?outergrad-{re.escape(self._name)}-site-(\d+)-of-(\d+)")
        sizes: dict[int, int] = {}
        metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
        for key, kept in metadata.items():
            if match := pattern.fullmatch(key):
                sizes[int(match[1])] = kept.size.numel()
        if not sizes:
            raise ValueError(
                f"DCPState: the checkpoint holds no session of the name {self._name!r}: save "
                f"og.DCPState(session) in it, and name it alike"
            )
        return [sizes[site] for site in sorted(sizes)]


def _in_order(state_dict: StateDict) -> list[Tensor]:
    """Returns the saved states in the order of the ranks that saved them."""
    rank_of = {key: int(re.findall(r"\d+", key)[-2]) for key in state_dict}
    return [state_dict[key] for key in sorted(state_dict, key=rank_of.__getitem__)]
