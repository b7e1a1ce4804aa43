"""State that each site saves beside the checkpoint of a library, and resumes from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from outergrad.comm.agree import agree
from outergrad.comm.process_group import TorchDistributed
from outergrad.core.types import StateDict, Stateful
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.session import Session

SiteReader = Callable[[int], StateDict | None]
"""Returns the state that the site of a rank has saved, or None."""


def site_state(session: Session, model: nn.Module, optimizers: Sequence[Stateful]) -> StateDict:
    """Returns the state of this site that the checkpoint of rank 0 lacks.

    That is the session and the buffers; where parameters are local to the site (`og.Local()`,
    `og.LocalSteps`), the whole model and the optimizers, too.
    """
    state, tensors = session.state_dict(), model.state_dict()
    own_weights = bool(state["local"]) or "local_steps" in state
    buffers = {name for name, _ in model.named_buffers()}
    own = {n: t.detach().clone() for n, t in tensors.items() if own_weights or n in buffers}
    steps = [optimizer.state_dict() for optimizer in optimizers] if own_weights else []
    return {"session": state, "model": own, "optimizers": steps}


def end_training(session: Session, method: object) -> None:
    """Shares what `og.LocalSteps` has not shared, with `error_reset` all that the sites owe.

    Where exchanges are rare the shared weights lack much of that, and it takes one message.
    """
    session.flush(whole=isinstance(method, LocalSteps) and method.error_reset)


def needed(read: SiteReader, rank: int, sites: int) -> list[StateDict]:
    """Reads this site's own state, or those of all sites if their number has changed.

    Args:
        read: reads the state of a rank.
        rank: rank of this site.
        sites: number of sites now.

    Returns:
        The states; none if nothing was saved.

    Raises:
        FileNotFoundError: states of some sites are missing.
    """
    own = read(rank) or read(0)
    if own is None or own["session"]["sites"] == sites:
        return [] if own is None else [own]
    states = {k: read(k) for k in range(own["session"]["sites"])}
    missing = [k for k, state in states.items() if state is None]
    if missing:
        raise FileNotFoundError(
            f"the checkpoint is one of {len(states)} sites, now there are {sites}, and the states "
            f"of sites {missing} are not in it: copy the files of all sites into it, on every site"
        )
    return [state for state in states.values() if state is not None]


def resume(
    read: SiteReader, session: Session, model: nn.Module, optimizers: Sequence[Stateful]
) -> None:
    """Resumes from the saved states. Call it on all sites, once model and optimizers are loaded.

    Raises:
        ValueError: on all sites: they do not have states of the same checkpoint.
        Exception: this site cannot read its states; the other sites raise a ValueError.
    """
    states, error = list[StateDict](), None
    try:
        states = needed(read, dist.get_rank(), dist.get_world_size())
    except Exception as raised:  # all sites must hear of it
        error = raised
    number = f"states of outergrad in the checkpoint: {len(states)}"
    remedy = "copy into the checkpoint what each site saved there, and resume from it everywhere"
    agree_on(model, [number], remedy, error)
    if not states:
        _warn_of_nothing()
        return
    sessions = [state["session"] for state in states]
    session.load_state_dict(sessions[0] if len(sessions) == 1 else sessions)
    own = states[dist.get_rank() % len(states)]
    model.load_state_dict(own["model"], strict=False)
    for optimizer, state in zip(optimizers, own["optimizers"], strict=False):
        optimizer.load_state_dict(state)


def _warn_of_nothing() -> None:
    warnings.warn(
        "the checkpoint has no state of outergrad on any site: what methods remember starts anew",
        stacklevel=3,
    )


def agree_on(
    model: nn.Module, lines: Sequence[str], remedy: str, error: Exception | None = None
) -> None:
    """Raises the same ValueError on all sites of the default group if their lines differ."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    agree(TorchDistributed().open(device), lines, error, remedy)
