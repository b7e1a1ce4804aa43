"""The Trainer of transformers itself, in two processes: with its DDP, and with outergrad."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outergrad as og
from cases import METHODS as EXACT
from cases import Events, pooled, relative_error
from ranks import run_on_lasting_groups
from spawned import run_two
from tiny_gpt import gpt, texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 6
METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "rank-dad": og.RankDAD(rank=2),
    "sparse": og.Sparse(density=0.1, always=True),
    "local-steps": og.LocalSteps(2),
    "error-reset": og.LocalSteps(
        2, method=og.Sparse(density=0.1, select="random", always=True), error_reset=True
    ),
}


# -- what each of the two processes does ----------------------------------------------------------


def trainer(folder: Path, method: Any, seed: int = 0, **given: Any) -> Any:
    """A Trainer with everything on: accumulation, clipping, a schedule, evaluation, checkpoints."""
    import transformers

    from outergrad.integrations.transformers import Trainer

    own = {k: given.pop(k) for k in ("own_data", "recorder", "callbacks") if k in given}
    data = {"train_dataset": given.pop("data", texts(40)), "eval_dataset": texts(6, seed=1)}
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "ddp_backend": "gloo"}
    quiet["ddp_find_unused_parameters"] = False
    args = transformers.TrainingArguments(str(folder), **{**quiet, **settings, **given})
    kind, method = (Trainer, {"method": method}) if method else (transformers.Trainer, {})
    return kind(gpt(seed), args, **data, **own, **method)


def run(made: Any, **kwargs: Any) -> SimpleNamespace:
    """Trains; tells what the Trainer logged and what came out."""
    made.train(**kwargs)
    log = made.state.log_history
    return SimpleNamespace(
        losses=[line["loss"] for line in log if "loss" in line],
        norms=[line["grad_norm"] for line in log if "loss" in line],
        eval_losses=[line["eval_loss"] for line in log if "eval_loss" in line],
        weights={n: p.detach().clone() for n, p in made.model.named_parameters()},
    )


def first_gradient(folder: Path, method: Any) -> dict[str, torch.Tensor]:
    """What the optimizer sees in the first step: accumulated, averaged over tokens, clipped."""
    from transformers import TrainerCallback

    found: dict[str, torch.Tensor] = {}

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            found.update({n: p.grad.clone() for n, p in model.named_parameters()})

    trainer(folder, method, callbacks=[Note()], max_steps=1, save_strategy="no").train()
    return found


def everything(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"ddp": run(trainer(folder / "ddp", None))}
    for name, method in METHODS.items():
        found[name] = run(trainer(folder / name, method))
        resumed = trainer(folder / name, method, seed=5)
        found[f"{name} resumed"] = run(
            resumed, resume_from_checkpoint=f"{folder / name}/checkpoint-3"
        )
    for name in ("ddp", "dense", "dad"):
        found[f"{name} gradient"] = first_gradient(folder, METHODS.get(name))
    for name, method in {"bf16 ddp": None, "bf16": og.Dense()}.items():
        found[name] = run(trainer(folder / name, method, bf16=True, save_strategy="no"))
    return found | {scene.__name__: scene(folder / scene.__name__) for scene in SCENES}


def last_checkpoint(folder: Path) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Resumed by `True`, from a training that a callback stopped."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            control.should_save = True
            control.should_training_stop = state.global_step == 4

    stopped = run(trainer(folder, og.RankDAD(rank=2), callbacks=[Stop()]))
    return stopped, run(trainer(folder, og.RankDAD(rank=2)), resume_from_checkpoint=True)


def saved_model(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file
    from transformers import GPT2LMHeadModel

    made = trainer(folder, og.DAD(), load_best_model_at_end=True, save_steps=2)
    made.train()
    made.save_model(folder / "final")
    if made.args.process_index:
        return {}
    places = (folder / "final", folder / "checkpoint-2")
    files = [load_file(path / "model.safetensors") for path in places]
    loaded = GPT2LMHeadModel.from_pretrained(folder / "final")
    best = GPT2LMHeadModel.from_pretrained(made.state.best_model_checkpoint)
    same = [torch.equal(p, q) for p, q in zip(loaded.parameters(), best.parameters(), strict=True)]
    return {
        "keys": [sorted(f) for f in files],
        "same": same,
        "plain": [type(m) for m in gpt().modules()],
        "now": [type(m) for m in made.model.modules()],
    }


def raising(folder: Path) -> tuple[str, bool, SimpleNamespace]:
    """A callback raises in the third step; the same Trainer trains again from the start."""
    import transformers
    from transformers import TrainerCallback

    class Raise(TrainerCallback):
        armed = True

        def on_step_begin(self, args, state, control, **kwargs):
            if self.armed and state.global_step == 2:
                raise ZeroDivisionError("in the third step")

    made, said = trainer(folder, og.DAD(always=True), callbacks=[Raise()], save_strategy="no"), ""
    try:
        made.train()
    except ZeroDivisionError as error:
        said = str(error)
    plain = {type(m) for m in made.model.modules()} == {type(m) for m in gpt().modules()}
    Raise.armed = False
    made.model.load_state_dict(gpt().state_dict())
    transformers.set_seed(made.args.seed)
    made.optimizer = made.lr_scheduler = None
    return said, plain, run(made)


def owed_at_the_end(folder: Path) -> list[bool]:
    """Whether this site owes anything: while it trains, and at the end."""
    from transformers import TrainerCallback

    class Owed(TrainerCallback):
        def __init__(self) -> None:
            self.found: list[bool] = []

        def note(self, *_: Any, **__: Any) -> None:
            self.found.append(made.session._exchange.compressors.owe)

        on_evaluate = on_train_end = note

    owed = Owed()
    options = {"callbacks": [owed], "max_steps": 3, "save_strategy": "no"}
    made = trainer(folder, METHODS["error-reset"], **options)
    made.train()
    return owed.found


def own_data(folder: Path) -> dict[str, Any]:
    """Each site has texts that the other one has not, and another number of them."""
    rank = torch.distributed.get_rank()
    mine, seen = texts(10 + 4 * rank, seed=10 + rank), []
    options = {"data": mine, "own_data": True, "eval_strategy": "no"}
    made = trainer(folder, og.RankDAD(rank=2), **options)
    made.data_collator = noting(made.data_collator, seen)
    whole = run(made)
    again = trainer(folder, og.RankDAD(rank=2), seed=5, **options)
    resumed = run(again, resume_from_checkpoint=str(folder / "checkpoint-3"))
    known = {tuple(row["input_ids"].tolist()) for row in mine}
    return {"seen": seen, "known": known, "whole": whole, "resumed": resumed}


def noting(collate: Any, seen: list[Any]) -> Any:
    def collated(rows: list[Any]) -> Any:
        seen.extend(tuple(row["input_ids"].tolist()) for row in rows)
        return collate(rows)

    return collated


def unlike_courses(folder: Path) -> str:
    rank = torch.distributed.get_rank()
    made = trainer(folder, og.DAD(), data=texts(8 + 8 * rank), own_data=True, max_steps=-1)
    try:
        made.train()
    except ValueError as error:
        return str(error)
    return ""


def without_a_file(folder: Path) -> str:
    """The machine of site 1 has only rank 0's files of the checkpoint."""
    run(trainer(folder, og.DAD(), save_steps=5))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (folder / "checkpoint-5" / "outergrad_1.pt").unlink()
    torch.distributed.barrier()
    try:
        trainer(folder, og.DAD()).train(str(folder / "checkpoint-5"))
    except ValueError as error:
        return str(error)
    return ""


def recorded(folder: Path) -> list[str]:
    recorder = og.JSONL(folder / "run", every=1)
    made = trainer(folder, og.DAD(), recorder=recorder, save_strategy="no", max_steps=2)
    made.train()
    rank = torch.distributed.get_rank()
    lines = (folder / "run" / f"site-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


SCENES = [
    last_checkpoint,
    saved_model,
    raising,
    owed_at_the_end,
    own_data,
    unlike_courses,
    without_a_file,
    recorded,
]


@pytest.fixture(scope="module")
def sites(tmp_path_factory) -> list[dict[str, Any]]:
    return run_two(everything, tmp_path_factory.mktemp("transformers"))


# -- what must be true of it ----------------------------------------------------------------------


def assert_same_course(found: SimpleNamespace, expected: SimpleNamespace, limit: float) -> None:
    for key in ("losses", "norms", "eval_losses"):
        assert getattr(found, key) == pytest.approx(getattr(expected, key), rel=limit), key


def assert_ends_alike(resumed: SimpleNamespace, whole: SimpleNamespace) -> None:
    """To the bit after the checkpoint; the log before it is rank 0's."""
    assert len(resumed.losses) == len(whole.losses) == STEPS
    assert (resumed.losses[3:], resumed.norms[3:]) == (whole.losses[3:], whole.norms[3:])
    assert resumed.eval_losses == whole.eval_losses
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


@pytest.mark.parametrize("name", ["dense", "dad"])
def test_exact_methods_have_the_gradient_of_ddp(sites, name):
    for found in sites:
        assert len(found["ddp gradient"]) == 28
        for parameter, expected in found["ddp gradient"].items():
            assert relative_error(found[f"{name} gradient"][parameter], expected) < 5e-6, parameter


@pytest.mark.parametrize("name", ["dense", "dad"])
def test_exact_methods_follow_ddp(sites, name):
    for found in sites:
        assert len(found["ddp"].losses) == STEPS
        assert len(found["ddp"].eval_losses) == STEPS // 2
        assert_same_course(found[name], found["ddp"], 1e-4)


def test_autocast_is_that_of_ddp(sites):
    for found in sites:
        assert_same_course(found["bf16"], found["bf16 ddp"], 2e-2)
        assert found["bf16"].losses != found["dense"].losses


@pytest.mark.parametrize("name", METHODS)
def test_training_resumed_is_training_to_the_bit(sites, name):
    for found in sites:
        assert_ends_alike(found[f"{name} resumed"], found[name])


@pytest.mark.parametrize("name", METHODS)
def test_sites_end_with_the_same_weights(sites, name):
    for parameter, weight in sites[0][name].weights.items():
        assert torch.equal(sites[1][name].weights[parameter], weight)


def test_a_callback_stops_training_and_the_last_checkpoint_goes_on(sites):
    for found in sites:
        stopped, resumed = found["last_checkpoint"]
        assert len(stopped.losses) == 4
        assert_ends_alike(resumed, found["rank-dad"])


def test_a_training_ends_with_all_that_the_sites_owe(sites):
    for found in sites:
        in_training, *_, at_the_end = found["owed_at_the_end"]
        assert in_training
        assert not at_the_end


def test_what_is_saved_is_plain(sites):
    found = sites[0]["saved_model"]
    plain = sorted(set(gpt().state_dict()) - {"lm_head.weight"})  # tied
    assert found["keys"] == [plain, plain]
    assert all(found["same"])
    assert found["now"] == found["plain"]


def test_a_training_that_raised_leaves_a_plain_model_that_trains_again(sites):
    for found in sites:
        said, plain, again = found["raising"]
        assert said == "in the third step"
        assert plain
        assert again.losses == found["dad"].losses


def test_each_site_may_keep_its_own_data(sites):
    for found in sites:
        own = found["own_data"]
        assert len(own["seen"]) >= STEPS * 3
        assert set(own["seen"]) == own["known"]
        assert_ends_alike(own["resumed"], own["whole"])
    first, second = (found["own_data"]["whole"] for found in sites)
    for name, weight in first.weights.items():
        assert torch.equal(second.weights[name], weight)


def test_sites_that_would_make_other_steps_say_so(sites):
    first, second = (found["unlike_courses"] for found in sites)
    assert "the sites do not agree: site 1 has 'max_steps: " in first
    assert "set max_steps" in first
    assert first == second


def test_a_checkpoint_that_lacks_a_site_says_so(sites):
    first, second = (found["without_a_file"] for found in sites)
    assert "the state is of rank 0, and site 1 has rank 1" in second
    assert "load what this site saved" in first


def test_recorders_hear_of_layers_and_of_what_the_trainer_logs(sites):
    for found in sites:
        kinds = {line["event"] for line in found["recorded"]}
        assert kinds >= {"run", "layer", "step", "scalars"}, kinds
        logged = [line["values"] for line in found["recorded"] if line["event"] == "scalars"]
        assert any("loss" in values and "grad_norm" in values for values in logged)


# -- GPT-2's own layer ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_conv1d_shares_the_exact_gradient(name):
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    from cases import Case, rows
    from outergrad.integrations.transformers import RULES

    case = Case(torch.nn.Sequential(Conv1D(5, 6), torch.nn.Tanh(), Conv1D(3, 5)), rows(4, 6))
    expected = pooled(case, 2)

    def body(rank, group):
        import copy

        model, events = copy.deepcopy(case.model), Events()
        session = og.distribute(model, EXACT[name], group=group, rules=RULES, recorder=events)
        for _ in range(2):
            model.zero_grad()
            case.loss(model(*case.batches[rank])).backward()
            for parameter, p in model.named_parameters():
                assert relative_error(p.grad, expected[parameter]) < 5e-6, parameter
        return {line.parameter: line.travels for line in session.coverage()}

    travels = run_on_lasting_groups(2, body)[0]
    if "forced" in name and "edad" not in name:
        assert travels["0.weight"] == "factors"
