"""Lightning: a DDP strategy whose processes are sites."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from outergrad._whole_files import told_of_pickle
from outergrad.core.packages import how_to_install
from outergrad.core.protocols import Method, Policy, Rules
from outergrad.core.types import StateDict
from outergrad.integrations._sites import SiteReader, agree_on, end_training, resume, site_state
from outergrad.methods.local_steps import LocalSteps
from outergrad.record.recorders import Recorders
from outergrad.session.attach import distribute
from outergrad.session.session import Session

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    _needs = "outergrad.integrations.lightning needs lightning: "
    raise ImportError(_needs + how_to_install("lightning")) from error


class OutergradStrategy(DDPStrategy):
    """Lightning's DDP strategy without DDP: `Trainer(strategy=OutergradStrategy(og.DAD()))`.

    Processes are started, data is divided and metrics are reduced as with DDP. Each `fit()` has a
    session of its own, `trainer.strategy.session`, that ends with it, however it ends. The state of
    each site is saved beside a checkpoint, in the folder `outergrad`, in one file per site.

    Args:
        method: as for `og.distribute`.
        recorder: as for `og.distribute`.
        rules: as for `og.distribute`.
        **settings: settings of `DDPStrategy`, such as `timeout` or `process_group_backend`; none of
            DDP itself.

    Raises:
        TypeError: a setting is one of DDP.
    """

    def __init__(
        self,
        method: Method | Policy | LocalSteps | None = None,
        *,
        recorder: Recorders = None,
        rules: Rules | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        of_ddp = [*self._ddp_kwargs, *(k for k in settings if k.startswith(("ddp_", "model_av")))]
        if of_ddp:
            raise TypeError(f"there is no DDP to be told {', '.join(of_ddp)}: leave them out")
        self._method, self._recorder, self._rules = method, recorder, rules
        self._saved: SiteReader | None = None
        self.session: Session | None = None

    # -- training ---------------------------------------------------------------------------------

    def configure_ddp(self) -> None:
        """Attaches a session where DDPStrategy would wrap the model; it is on its device by now."""
        options = {"recorder": self._recorder, "rules": self._rules}
        self.session = distribute(self._own_module(), self._method, **options)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skips sharing in all but the last backward of `accumulate_grad_batches`."""
        assert self.session is not None
        with self.session.no_sync():
            yield

    def on_train_start(self) -> None:
        """Checks that all sites make equal steps, and resumes the session after all else."""
        module, trainer = self._own_module(), self._own_module().trainer
        lines = [f"batches per epoch: {trainer.num_training_batches}"]
        lines += [f"max_epochs: {trainer.max_epochs}", f"max_steps: {trainer.max_steps}"]
        agree_on(module, lines, "set limit_train_batches, max_epochs and max_steps alike")
        if self._saved is not None and self.session is not None:
            resume(self._saved, self.session, module, self.optimizers)
        self._saved = None

    def on_train_end(self) -> None:
        """Shares what `og.LocalSteps` has not shared yet, and what its sites owe."""
        if self.session is not None:
            end_training(self.session, self._method)

    def teardown(self) -> None:
        """Detaches the session at the end of a run, also after an error."""
        self._saved = None
        if self.session is not None:
            self.session.detach()
        super().teardown()

    def _own_module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Saves each site's state beside what rank 0 saves; not where only weights are saved."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.session is not None and "optimizer_states" in checkpoint:
            saved = site_state(self.session, self._own_module(), self.optimizers)
            path = _site_path(filepath, self.global_rank)
            self.checkpoint_io.save_checkpoint(saved, path, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint, and notes its path: training resumes from the states beside it."""
        linked = os.path.islink(checkpoint_path)
        path = os.path.realpath(checkpoint_path) if linked else checkpoint_path
        self._saved = partial(self._read, path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint; each site removes its own file."""
        super().remove_checkpoint(filepath)
        self.checkpoint_io.remove_checkpoint(_site_path(filepath, self.global_rank))

    def _read(self, filepath: Any, rank: int) -> StateDict | None:
        try:
            return self.checkpoint_io.load_checkpoint(_site_path(filepath, rank), weights_only=True)
        except FileNotFoundError:
            return None
        except pickle.UnpicklingError as error:
            path = _site_path(filepath, rank)
            raise ValueError(f"{path} cannot be read: {told_of_pickle(str(error))}") from None


def _site_path(filepath: Any, rank: int) -> str:
    """Returns a site's file, in a folder where Lightning does not look for checkpoints."""
    folder, name = os.path.split(str(filepath))
    return os.path.join(folder, "outergrad", f"{name}.{rank}")
