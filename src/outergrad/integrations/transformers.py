"""Hugging Face transformers: a `Trainer` whose processes are sites."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from outergrad._whole_files import save_whole
from outergrad.core.packages import how_to_install
from outergrad.core.protocols import Method, Policy, Rule, Rules, TapFn
from outergrad.core.transform import SampleRows, Samples
from outergrad.core.types import Call, Factors, Slot
from outergrad.integrations._sites import agree_on, end_training, resume, site_state
from outergrad.layers import RULES as TORCH_RULES
from outergrad.layers._common import join, rows_of
from outergrad.linalg.site_gradient import sampled
from outergrad.methods.local_steps import LocalSteps
from outergrad.record.recorders import Recorders
from outergrad.session.session import Session

try:
    import transformers
    from transformers.pytorch_utils import Conv1D
    from transformers.trainer_utils import get_last_checkpoint

    from outergrad.integrations.accelerate import distribute, own_loaders, site_path, site_reader
except ImportError as error:
    _needs = "outergrad.integrations.transformers needs transformers and accelerate: "
    raise ImportError(_needs + how_to_install("transformers", "accelerate")) from error

_Base = transformers.Trainer if TYPE_CHECKING else object


class Conv1DRule:
    """GPT-2's linear layer, `y = x W + b` with W of shape (I, O): `dW = xᵀ delta`."""

    owns: tuple[str, ...] = ()

    def objection(self, module: Conv1D) -> str | None:
        """Returns None: there is no objection to any Conv1D."""
        return None

    def slots(self, module: Conv1D, name: str) -> list[Slot]:
        """Returns the weight's slot. Its rows are inputs: activations and deltas change places."""
        inputs, outputs = module.weight.shape
        return [Slot(name, join(name, "weight"), inputs, outputs)]

    def forward(self, module: Conv1D, tap: TapFn, x: Tensor) -> Tensor:
        """Computes as `Conv1D`; the bias, added behind the tap, travels by itself."""
        flat_NI, samples = x.reshape(-1, x.shape[-1]), x.shape[0] if x.dim() > 1 else 1
        y_NO = flat_NI @ module.weight.detach()
        tapped = tap(y_NO, flat_NI, rows=len(flat_NI), samples=samples)
        return tapped.view(*x.shape[:-1], module.nf) + module.bias

    def rows(self, module: Conv1D, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Returns the number of positions of the input."""
        return [(args[0] if args else kwargs["x"]).numel() // max(module.nx, 1)]

    def factors(self, module: Conv1D, slot: int, call: Call) -> Factors:
        """Returns the factors, with input and delta in each other's place."""
        a_1NI = rows_of(call.a, call.a.shape[-1]).to(call.d.dtype)
        return Factors(d_GRO=a_1NI, a_GRI=rows_of(call.d, call.d.shape[-1]))

    def by_sample(self, module: Conv1D, slot: int, call: Call, samples: Samples) -> SampleRows:
        """Returns the rows of `factors` with the index of each row's sample."""
        return sampled(self.factors(module, slot, call), samples)


_RULES: dict[type[nn.Module], Rule] = {**TORCH_RULES, Conv1D: Conv1DRule()}
RULES: Rules = _RULES
"""Rules of outergrad, and of transformers' own layers."""


class TrainerMixin(_Base):
    """Makes any Trainer share gradients by outergrad: `class Mine(TrainerMixin, SFTTrainer)`.

    Each `train()` has a session of its own, `trainer.session`, that ends with it, however it ends.
    Checkpoints include the session, in one file per site.

    Args:
        *args: arguments of the Trainer.
        method: as for `og.distribute`.
        recorder: as for `og.distribute`; it receives what the Trainer logs, too.
        rules: as for `og.distribute`.
        own_data: whether `train_dataset` is this site's own. By default all sites give the same
            one, which the Trainer divides between them. With data of their own the sites need the
            same `max_steps`.
        **kwargs: keyword arguments of the Trainer.
    """

    session: Session | None = None

    def __init__(
        self,
        *args: Any,
        method: Method | Policy | LocalSteps | None = None,
        recorder: Recorders = None,
        rules: Rules | None = None,
        own_data: bool = False,
        **kwargs: Any,
    ) -> None:
        self._method, self._recorder = method, recorder
        self._rules = RULES if rules is None else rules
        self._own_data, self._resumed = own_data, None
        super().__init__(*args, **kwargs)
        self.add_callback(_Events(self))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as the Trainer does, with a session that ends with the call.

        Raises:
            ValueError: as `og.distribute`; or the sites would not make the same steps.
        """
        if resume_from_checkpoint is True:  # else the Trainer itself looks, and does not tell
            resume_from_checkpoint = get_last_checkpoint(str(self.args.output_dir)) or True
        self._resumed = resume_from_checkpoint or None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._detach()

    def get_train_dataloader(self) -> Any:
        """Returns the Trainer's loader; a site's own data is not divided between the processes."""
        if not self._own_data:
            return super().get_train_dataloader()
        with own_loaders(self.accelerator):
            return super().get_train_dataloader()

    def _wrap_model(self, model: Any, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Attaches a session before Accelerate prepares the model, which it then leaves as is."""
        model = super()._wrap_model(model, training, *args, **kwargs)
        if training:
            self._detach()  # auto_find_batch_size may have left one of a larger batch
            options = {"recorder": self._recorder, "rules": self._rules}
            self.session = distribute(self.accelerator, model, self._method, **options)
        return model

    def _detach(self) -> None:
        if self.session is not None:
            self.session.detach()


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer`, sharing gradients by outergrad: `Trainer(..., method=og.DAD())`."""


class _Events(transformers.TrainerCallback):
    """Callbacks by which a session follows the Trainer."""

    def __init__(self, trainer: TrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Resumes the session: model, optimizer and scheduler are loaded by now."""
        trainer = self._trainer
        lines = list(_course(args, state, kwargs.get("train_dataloader")))
        agree_on(kwargs["model"], lines, "set max_steps, and strategies 'steps', alike everywhere")
        if trainer._resumed is not None and trainer.session is not None:
            read = site_reader(Path(trainer._resumed))
            resume(read, trainer.session, kwargs["model"], [kwargs["optimizer"]])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves this site's state, after the Trainer has written its part of a checkpoint."""
        if args.save_only_model or self._trainer.session is None:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)  # the machine may have none of rank 0's files
        saved = site_state(self._trainer.session, kwargs["model"], [kwargs["optimizer"]])
        save_whole(site_path(folder, args.process_index), saved)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Shares what `og.LocalSteps` has not shared and its sites owe, after the last step."""
        if control.should_training_stop and self._trainer.session is not None:
            end_training(self._trainer.session, self._trainer._method)

    on_epoch_end = on_step_end
    """An evaluation at the end of an epoch may have stopped the training."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Passes what the Trainer logs to the recorders of the session, too."""
        trainer, logs = self._trainer, kwargs.get("logs") or {}
        if trainer.is_in_train and trainer.session is not None:
            trainer.session.log(**{k: v for k, v in logs.items() if isinstance(v, int | float)})


def _course(args: Any, state: Any, loader: Any) -> Iterator[str]:
    """Yields settings that must be equal on all sites, or one would wait for others in vain."""
    yield f"max_steps: {state.max_steps}"
    strategies = [args.logging_strategy, args.eval_strategy, args.save_strategy]
    if any(strategy == "epoch" for strategy in strategies) and hasattr(loader, "__len__"):
        yield f"batches per epoch: {len(loader)}"
