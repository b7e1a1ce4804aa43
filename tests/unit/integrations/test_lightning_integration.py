"""Lightning's Trainer, in two processes: with its DDP strategy, and with outergrad's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import outergrad as og
from spawned import run_two
from tiny_gpt import gpt, texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EPOCHS, SAVED = 4, 2
METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "rank-dad": og.RankDAD(rank=2),
    "sparse": og.Sparse(density=0.1, always=True),
    "local-steps": og.LocalSteps(3),
    "error-reset": og.LocalSteps(
        2, method=og.Sparse(density=0.1, select="random", always=True), error_reset=True
    ),
}


# -- what each of the two processes does ----------------------------------------------------------


class Texts(Dataset):
    """Of random tokens; `seen` notes which a process used."""

    def __init__(self, count: int = 16, seed: int = 0) -> None:
        self.rows, self.seen = texts(count, seed), set()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.seen.add(index)
        return self.rows[index]


def module(seed: int = 0, raise_at: int = -1) -> Any:
    """GPT-2 as a LightningModule; its dropout goes by the number of the step and the site.

    Lightning saves no random numbers.
    """
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt, self.losses, self.norms, self.sent = gpt(seed), [], [], []

        def training_step(self, batch: Any, index: int) -> Any:
            if self.global_step == raise_at:
                raise ZeroDivisionError(f"in step {raise_at}")
            torch.manual_seed(100 * self.trainer.current_epoch + 10 * index + self.global_rank)
            loss = self.gpt(**batch).loss
            self.losses.append(loss.item())
            session = getattr(self.trainer.strategy, "session", None)
            self.sent.append(session.stats().total_sent_bytes if session else 0)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.gpt(**batch).loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


def trainer(folder: Path, strategy: Any, **options: Any) -> Any:
    """Accumulation and clipping on, checkpoints and validation after every epoch."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    kept = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last="link")
    settings = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "callbacks": [kept],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, **{**settings, **options})


def outergrad(method: Any, **options: Any) -> Any:
    from outergrad.integrations.lightning import OutergradStrategy

    return OutergradStrategy(method, process_group_backend="gloo", **options)


def fit(made: Any, learner: Any, data: Dataset | None = None, **options: Any) -> dict[str, Any]:
    loader = DataLoader(data or Texts(), batch_size=2, shuffle=True)
    made.fit(learner, loader, DataLoader(Texts(4, seed=1), batch_size=2), **options)
    return {
        "losses": learner.losses,
        "norms": learner.norms,
        "sent": learner.sent,
        "val_loss": float(made.callback_metrics["val_loss"]),
        "weights": {n: p.detach().clone() for n, p in learner.named_parameters()},
    }


def kinds(model: torch.nn.Module) -> list[type]:
    return [type(m) for m in model.modules()]


def everything(folder: Path) -> dict[str, Any]:
    from lightning.pytorch.strategies import DDPStrategy

    ddp = DDPStrategy(process_group_backend="gloo")
    found: dict[str, Any] = {"ddp": fit(trainer(folder / "ddp", ddp), module())}
    for name, method in METHODS.items():
        place = folder / name
        found[name] = fit(trainer(place, outergrad(method)), module())
        again, path = trainer(place, outergrad(method)), place / f"epoch={SAVED - 1}.ckpt"
        found[f"{name} resumed"] = fit(again, module(seed=5), ckpt_path=str(path))
    return found | {scene.__name__: scene(folder / scene.__name__) for scene in SCENES}


def early_stop(folder: Path) -> tuple[int, int, list[str]]:
    """By a callback; the old checkpoints go with what sites have saved beside them."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    stop = EarlyStopping("val_loss", min_delta=100.0, patience=1)
    best = ModelCheckpoint(folder, monitor="val_loss", filename="best-{epoch}")
    made = trainer(folder, outergrad(og.DAD()), callbacks=[stop, best])
    fit(made, module())
    torch.distributed.barrier()
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return made.current_epoch, made.global_step, sorted(names)


def saved_model(folder: Path) -> dict[str, Any]:
    """After the training, and weights alone."""
    made, learner = trainer(folder, outergrad(og.DAD())), module()
    fit(made, learner)
    made.save_checkpoint(folder / "final.ckpt")
    made.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    names = sorted(path.name for path in (folder / "outergrad").glob("*.ckpt.0"))
    loaded = torch.load(folder / "weights.ckpt", weights_only=True)["state_dict"]
    plain = kinds(gpt()) == kinds(learner.gpt)
    return {"names": names, "keys": sorted(loaded) == sorted(learner.state_dict()), "plain": plain}


def raising(folder: Path) -> tuple[str, bool, int, Any]:
    """The same Trainer goes on from the epoch in which it stopped, with another session."""
    made, learner, said = trainer(folder, outergrad(METHODS["dad"])), module(raise_at=3), ""
    try:
        fit(made, learner)
    except ZeroDivisionError as error:
        said = str(error)
    plain = kinds(gpt()) == kinds(learner.gpt)
    session, again = made.strategy.session, fit(made, module())
    assert made.strategy.session is not session
    return said, plain, made.current_epoch, again["weights"]


def owed_at_the_end(folder: Path) -> list[bool]:
    """Whether this site owes anything: while it trains, and at the end."""
    from lightning.pytorch.callbacks import Callback

    class Owed(Callback):
        def __init__(self) -> None:
            self.found: list[bool] = []

        def note(self, trainer: Any, *_: Any) -> None:
            self.found.append(trainer.strategy.session._exchange.compressors.owe)

        on_train_epoch_end = on_fit_end = note

    owed = Owed()
    options = {"callbacks": [owed], "max_epochs": 1, "enable_checkpointing": False}
    fit(trainer(folder, outergrad(METHODS["error-reset"]), **options), module())
    return owed.found


def own_data(folder: Path) -> tuple[set[int], int]:
    """Each site has texts of its own, and another number of them."""
    mine = Texts(8 + 6 * torch.distributed.get_rank(), seed=torch.distributed.get_rank())
    options = {"use_distributed_sampler": False, "limit_train_batches": 4, "max_epochs": 5}
    fit(trainer(folder, outergrad(og.RankDAD(rank=2)), **options), module(), mine)
    return mine.seen, len(mine)


def unlike_courses(folder: Path) -> str:
    mine = Texts(8 + 8 * torch.distributed.get_rank())
    made = trainer(folder, outergrad(og.DAD()), use_distributed_sampler=False)
    try:
        fit(made, module(), mine)
    except ValueError as error:
        return str(error)
    return ""


def without_files(folder: Path) -> list[str]:
    """A checkpoint of DDP goes on with outergrad; one that lacks a site does not."""
    import warnings

    path, said = folder.parent / "ddp" / "epoch=1.ckpt", []
    with warnings.catch_warnings(record=True) as caught:
        fit(trainer(folder, outergrad(og.DAD())), module(), ckpt_path=str(path))
    said += [str(w.message) for w in caught if "outergrad" in str(w.message)]
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 1:
        (folder / "outergrad" / f"epoch={EPOCHS - 1}.ckpt.1").unlink()
    torch.distributed.barrier()
    try:
        fit(trainer(folder, outergrad(og.DAD()), max_epochs=9), module(), ckpt_path="last")
    except ValueError as error:
        said.append(str(error))
    return said


SCENES = [
    early_stop,
    saved_model,
    raising,
    owed_at_the_end,
    own_data,
    unlike_courses,
    without_files,
]


@pytest.fixture(scope="module")
def sites(tmp_path_factory) -> list[dict[str, Any]]:
    return run_two(everything, tmp_path_factory.mktemp("lightning"))


# -- what must be true of it ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "dad"])
def test_exact_methods_follow_ddp(sites, name):
    for found in sites:
        assert len(found["ddp"]["norms"]) == 2 * EPOCHS
        assert found[name]["norms"][0] == pytest.approx(found["ddp"]["norms"][0], rel=5e-6)
        for key in ("losses", "norms", "val_loss"):
            assert found[name][key] == pytest.approx(found["ddp"][key], rel=1e-4), key


@pytest.mark.parametrize("name", METHODS)
def test_training_resumed_is_training_to_the_bit(sites, name):
    for found in sites:
        whole, resumed = found[name], found[f"{name} resumed"]
        assert len(resumed["losses"]) == 4 * (EPOCHS - SAVED)
        for key in ("losses", "norms"):
            assert resumed[key] == whole[key][-len(resumed[key]) :]
        for parameter, weight in whole["weights"].items():
            assert torch.equal(resumed["weights"][parameter], weight), parameter


@pytest.mark.parametrize("name", METHODS)
def test_sites_end_with_the_same_weights(sites, name):
    for parameter, weight in sites[0][name]["weights"].items():
        assert torch.equal(sites[1][name]["weights"][parameter], weight)


def test_a_training_ends_with_all_that_the_sites_owe(sites):
    assert [found["owed_at_the_end"] for found in sites] == [[True, False]] * 2


def test_nothing_is_sent_while_gradients_accumulate(sites):
    for found in sites:
        before, after_one, after_two = found["dad"]["sent"][:3]
        assert before == after_one < after_two


def test_a_callback_stops_training_and_old_checkpoints_go_entirely(sites):
    for found in sites:
        epochs, steps, names = found["early_stop"]
        assert (epochs, steps) == (2, 4)
        (best,) = (name for name in names if name.endswith(".ckpt"))
        assert names == [best, f"outergrad/{best}.0", f"outergrad/{best}.1"]


def test_what_is_saved_is_plain(sites):
    for found in sites:
        saved = found["saved_model"]
        assert saved["keys"]
        assert saved["plain"]
        assert "final.ckpt.0" in saved["names"]
        assert "weights.ckpt.0" not in saved["names"]


def test_a_training_that_raised_leaves_a_plain_model_and_the_strategy_trains_again(sites):
    for found in sites:
        said, plain, epochs, _ = found["raising"]
        assert (said, plain, epochs) == ("in step 3", True, EPOCHS)
    first, second = (found["raising"][-1] for found in sites)
    assert all(torch.equal(second[name], weight) for name, weight in first.items())


def test_each_site_may_keep_its_own_data(sites):
    for found in sites:
        seen, count = found["own_data"]
        assert seen == set(range(count))


def test_sites_that_would_make_other_steps_say_so(sites):
    first, second = (found["unlike_courses"] for found in sites)
    assert "site 1 has 'batches per epoch: 8' where site 0 has 'batches per epoch: 4'" in first
    assert "set limit_train_batches" in first
    assert first == second


def test_a_checkpoint_of_ddp_goes_on_and_one_that_lacks_a_site_says_so(sites):
    for found in sites:
        warned, _ = found["without_files"]
        assert "no state of outergrad on any site: what methods remember starts anew" in warned
    first, second = (found["without_files"][-1] for found in sites)
    assert "the state is of rank 0, and site 1 has rank 1: load what this site saved" in second
    assert second in first


def test_settings_of_ddp_are_refused():
    pytest.importorskip("lightning")
    from outergrad.integrations.lightning import OutergradStrategy

    with pytest.raises(TypeError, match="no DDP to be told find_unused_parameters: leave"):
        OutergradStrategy(og.DAD(), find_unused_parameters=True)
    with pytest.raises(TypeError, match="no DDP to be told ddp_comm_hook: leave"):
        OutergradStrategy(og.DAD(), ddp_comm_hook=print)
