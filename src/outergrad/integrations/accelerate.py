"""Hugging Face Accelerate: shares a model's gradients in a loop around an `Accelerator`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from outergrad._whole_files import load_plain, save_whole
from outergrad.core.packages import how_to_install
from outergrad.core.protocols import Method, Policy, Rules
from outergrad.core.types import StateDict
from outergrad.integrations._sites import SiteReader, resume, site_state
from outergrad.methods.local_steps import LocalSteps
from outergrad.record.recorders import Recorders
from outergrad.session.attach import distribute as distribute_model
from outergrad.session.session import Session

try:
    import accelerate
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import DistributedType, DynamoBackend
except ImportError as error:
    _needs = "outergrad.integrations.accelerate needs accelerate: "
    raise ImportError(_needs + how_to_install("accelerate")) from error

_SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


class Accelerator(accelerate.Accelerator):
    """Accelerate's class, whose `prepare` distributes models in place of wrapping them in DDP.

    A model stays what it is. `end_training()` ends the sessions. With one process it does what
    Accelerate does.

    Args:
        *args: as for Accelerate's class.
        method: as for `og.distribute`.
        recorder: as for `og.distribute`.
        rules: as for `og.distribute`.
        **settings: as for Accelerate's class.
    """

    def __init__(
        self,
        *args: Any,
        method: Method | Policy | LocalSteps | None = None,
        recorder: Recorders = None,
        rules: Rules | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self._method: Any = method
        self._about: dict[str, Any] = {"recorder": recorder, "rules": rules}

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Moves a model to its device, and distributes it unless it is for evaluation."""
        known = getattr(model, "_is_accelerate_prepared", False)
        if known or evaluation_mode or self.num_processes == 1:
            return super().prepare_model(model, device_placement, evaluation_mode)
        _refuse(self)
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        distribute(self, prepared, self._method, **self._about)
        return prepared

    @property
    def sessions(self) -> list[Session]:
        """The sessions of the prepared models, in their order."""
        return [session for _, session in _link(self).sessions]

    def end_training(self) -> None:
        """Ends the sessions, on all sites, and what Accelerate ends."""
        for session in self.sessions:
            session.detach()
        super().end_training()


def distribute(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    method: Method | Policy | LocalSteps | None = None,
    *,
    recorder: Recorders = None,
    rules: Rules | None = None,
) -> Session:
    """Shares the gradients of a model in place of the DDP that Accelerate would wrap it in.

    Call it before `accelerator.prepare`, which then leaves the model as it is and prepares the
    rest as always. `accumulate`, `no_sync`, `backward` and `clip_grad_norm_` do what they do with
    DDP. `save_state` and `load_state` include the session, in one file per site. Call
    `session.detach()` at the end.

    Args:
        accelerator: accelerator of this process; its processes are the sites.
        model: model that is not prepared yet; it is moved to the accelerator's device.
        method: as for `og.distribute`.
        recorder: as for `og.distribute`.
        rules: as for `og.distribute`.

    Raises:
        ValueError: as `og.distribute`, or Accelerate is to shard or compile the model.
        RuntimeError: there is one process, and no process group.
    """
    _refuse(accelerator)
    prepared = accelerator.prepare_model(model, evaluation_mode=True)  # all but the wrapping in DDP
    session = distribute_model(prepared, method, recorder=recorder, rules=rules)
    _link(accelerator).add(prepared, session)
    return session


def own_loader(accelerator: accelerate.Accelerator, loader: DataLoader) -> DataLoader:
    """Prepares a loader of this site's own data: it is not divided between the processes.

    Args:
        accelerator: accelerator of this process.
        loader: loader that is not prepared yet; with equally many batches per epoch on all sites.
    """
    config = accelerator.dataloader_config
    prepared: Any = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        dispatch_batches=False,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
    )
    prepared._is_accelerate_prepared = True
    return accelerate.Accelerator.prepare_data_loader(accelerator, prepared)


@contextmanager
def own_loaders(accelerator: accelerate.Accelerator) -> Iterator[None]:
    """Prepares every loader inside the block as this site's own, as with `own_loader`."""
    accelerator.prepare_data_loader = lambda loader, *_, **__: own_loader(accelerator, loader)
    try:
        yield
    finally:
        del accelerator.prepare_data_loader


def _refuse(accelerator: accelerate.Accelerator) -> None:
    parallel = accelerator.parallelism_config
    if accelerator.distributed_type in _SHARDED or (parallel and parallel.total_size > 1):
        raise ValueError(
            f"Accelerate is to shard the model ({accelerator.distributed_type}): outergrad shares "
            f"replicas; leave out FSDP, DeepSpeed, Megatron-LM and parallelism_config"
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError("a compiled model has no layers to tap: leave out torch.compile (dynamo)")


def _link(accelerator: accelerate.Accelerator) -> _Link:
    """Returns the link of an accelerator, found through its replaced `no_sync`, or a new one."""
    known = getattr(accelerator.no_sync, "__self__", None)
    return known if isinstance(known, _Link) else _Link(accelerator)


class _Link:
    """Connects an accelerator with the sessions of its models.

    Attributes:
        sessions: each model with its session.
    """

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator = accelerator
        self._no_sync = accelerator.no_sync
        self.sessions: list[tuple[nn.Module, Session]] = []
        self._folder = Path()
        accelerator.no_sync = self.no_sync
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._note)
        accelerator.register_for_checkpointing(self)

    def add(self, model: nn.Module, session: Session) -> None:
        """Registers a model's session; drops models that Accelerate has dropped."""
        present = [(m, s) for m, s in self.sessions if m in self._accelerator._models]
        self.sessions = [*((m, s) for m, s in present if m is not model), (model, session)]

    def no_sync(self, model: nn.Module) -> Any:
        """Replaces `Accelerator.no_sync`, which `accumulate` calls."""
        mine = [session for known, session in self.sessions if known is model]
        return mine[0].no_sync() if mine else self._no_sync(model)

    # -- checkpoints ------------------------------------------------------------------------------

    def _save(self, models: list[nn.Module], weights: list[StateDict], folder: str) -> None:
        """Saves this process's state, before the main process saves the rest."""
        rank, optimizers = self._accelerator.process_index, self._accelerator._optimizers
        for index, (model, session) in enumerate(self.sessions):
            path = site_path(Path(folder), rank, index)
            save_whole(path, site_state(session, model, optimizers))

    def _note(self, models: list[nn.Module], folder: str) -> None:
        """Notes the folder, before Accelerate loads anything."""
        self._folder = Path(folder)

    def state_dict(self) -> StateDict:
        """Returns the state that the main process saves."""
        return {"sites": self._accelerator.num_processes}

    def load_state_dict(self, state: StateDict) -> None:
        """Resumes the sessions, after Accelerate has loaded everything else."""
        for index, (model, session) in enumerate(self.sessions):
            read = site_reader(self._folder, index)
            resume(read, session, model, self._accelerator._optimizers)


def site_path(folder: Path, rank: int, index: int = 0) -> Path:
    """Returns the file of a site within a checkpoint, one per model."""
    return folder / (f"outergrad_{rank}.pt" if index == 0 else f"outergrad_{index}_{rank}.pt")


def site_reader(folder: Path, index: int = 0) -> SiteReader:
    """Returns a reader of the sites' files within a checkpoint."""

    def read(rank: int) -> StateDict | None:
        path = site_path(folder, rank, index)
        return load_plain(path) if path.exists() else None

    return read
