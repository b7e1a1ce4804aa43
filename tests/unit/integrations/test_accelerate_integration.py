"""A loop around an Accelerator, in two processes: with its DDP, and with outergrad."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import outergrad as og
from cases import Events, mlp
from places import REPOSITORY
from spawned import run_two

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = REPOSITORY / "docs" / "integrations.md"
STEPS, SAVED = 6, 3
METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "rank-dad": og.RankDAD(rank=2),
    "sparse": og.Sparse(density=0.1, always=True),
    "local-steps": og.LocalSteps(2),
    "local": og.PerLayer({"0.*": og.Local(), "*": og.RankDAD(rank=2)}),
}


# -- what each of the two processes does ----------------------------------------------------------


class Loop:
    """A model with dropout and batch statistics, and the loop of Accelerate's documentation."""

    def __init__(
        self, method: Any, seed: int = 0, own: bool = False, imported: bool = False
    ) -> None:
        import accelerate
        from accelerate.utils import DataLoaderConfiguration

        from outergrad.integrations.accelerate import Accelerator, distribute, own_loader

        seeded = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
        options = {"gradient_accumulation_steps": 2, "dataloader_config": seeded}
        kind = accelerate.Accelerator
        if imported:
            kind, options["method"] = Accelerator, method
        self.accelerator = kind(cpu=True, **options)
        torch.manual_seed(seed)
        middle = [torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.2)]
        self.model: Any = torch.nn.Sequential(*mlp(6, 12), *middle, *mlp(12, 12, 3))
        self.session = None
        if method is not None and not imported:
            self.session = distribute(self.accelerator, self.model, method, recorder=Events())
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = DataLoader(rows(own), batch_size=4, shuffle=True)
        if own:
            loader = own_loader(self.accelerator, loader)
        prepared = self.accelerator.prepare(self.model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seen: list[Any] = []
        torch.manual_seed(9 + self.accelerator.process_index)

    def train(self, folder: Path | None = None, first: int = 0) -> Loop:
        """Epochs until there are enough steps; saves in the middle, at the end of an epoch."""
        for epoch in range(first, STEPS):
            self.loader.set_epoch(epoch)
            for x, y in self.loader:
                self.step(x, y)
            if folder is not None and epoch + 1 == SAVED:
                self.accelerator.save_state(str(folder))
        return self

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
            self.accelerator.backward(loss)
            self.losses.append(loss.item())
            self.seen += x[:, 0].tolist()
            if self.accelerator.sync_gradients:
                shared = list(self.model.parameters())[2:]  # also where the first layer is local
                norm = self.accelerator.clip_grad_norm_(shared, 0.05)
                self.norms.append(float(norm))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    @property
    def told(self) -> dict[str, Any]:
        state = self.accelerator.unwrap_model(self.model).state_dict()
        state = {name: t.clone() for name, t in state.items()}
        return {"losses": self.losses, "norms": self.norms, "state": state, "seen": self.seen}


def rows(own: bool = False) -> TensorDataset:
    """The same on all sites, or another number of others on each."""
    rank = torch.distributed.get_rank() if own else 0
    source = torch.Generator().manual_seed(4 + rank)
    x = torch.randn(16, 6, generator=source)
    return TensorDataset(x, torch.randint(0, 3, (16,), generator=source))


def everything(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"ddp": Loop(None).train().told}
    for name, method in METHODS.items():
        whole = Loop(method).train(folder / name)
        whole.session.detach()
        found[name] = whole.told
        again = Loop(method, seed=5)
        again.accelerator.load_state(str(folder / name))
        found[f"{name} resumed"] = again.train(first=SAVED).told
        again.session.detach()
    return found | {scene.__name__: scene(folder / scene.__name__) for scene in SCENES}


def one_import(folder: Path) -> dict[str, Any]:
    """By the class whose `prepare` distributes the model; saved, and resumed in another."""
    whole = Loop(og.RankDAD(rank=2), imported=True).train(folder)
    again = Loop(og.RankDAD(rank=2), seed=5, imported=True)
    again.accelerator.load_state(str(folder))
    resumed = again.train(first=SAVED).told
    prepared = again.accelerator.prepare(again.model) is again.model
    kinds = [type(session).__name__ for session in again.accelerator.sessions]
    for loop in (whole, again):
        (session,) = loop.accelerator.sessions
        session.detach()
    return {"whole": whole.told, "resumed": resumed, "once": prepared and kinds == ["Session"]}


def own_data(folder: Path) -> dict[str, Any]:
    loop = Loop(og.DAD(), own=True).train()
    loop.session.detach()
    return {"known": rows(own=True).tensors[0][:, 0].tolist(), **loop.told}


def bytes_while_accumulating(folder: Path) -> list[int]:
    loop = Loop(og.DAD())
    sent = [loop.session.stats().total_sent_bytes]
    for x, y in loop.loader:
        loop.step(x, y)
        sent.append(loop.session.stats().total_sent_bytes)
    loop.session.detach()
    return sent


def a_second_model(folder: Path) -> tuple[list[str], list[int], bool]:
    """Both of one accelerator: each has its session and its file."""
    from outergrad.integrations.accelerate import distribute

    loop = Loop(og.DAD(always=True))
    other = torch.nn.Linear(6, 2)
    session = distribute(loop.accelerator, other, og.RankDAD(rank=1))
    loop.step(*next(iter(loop.loader)))
    with loop.accelerator.accumulate(other):
        loop.accelerator.backward(other(torch.ones(3, 6)).square().sum())
    loop.accelerator.save_state(str(folder))
    loop.accelerator.wait_for_everyone()
    loop.accelerator.load_state(str(folder))
    counts = [loop.session.stats().step, session.stats().step]
    for s in (loop.session, session):
        s.detach()
    return sorted(path.name for path in folder.glob("outergrad*")), counts, type(other).__name__


def refusals(folder: Path) -> dict[str, str]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, TorchDynamoPlugin

    from outergrad.integrations.accelerate import distribute

    said = {}
    sharding, compiling = Accelerator(cpu=True), Accelerator(cpu=True)
    sharding.state.distributed_type = DistributedType.FSDP
    for what, accelerator in {"shard": sharding, "compile": compiling}.items():
        try:
            distribute(accelerator, torch.nn.Linear(2, 2), og.DAD())
        except ValueError as error:
            said[what] = str(error)
        accelerator.state.distributed_type = DistributedType.MULTI_CPU
        accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="eager")
    accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="no")
    return said


def documented(folder: Path) -> list[str]:
    """The program of docs/integrations.md, as it stands there."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "from accelerate import" in block)
    folder.mkdir(exist_ok=True)
    names: dict[str, Any] = {}
    exec(compile(code.replace('"checkpoint"', repr(str(folder))), str(PAGE), "exec"), names)
    names["accelerator"].wait_for_everyone()
    return sorted(path.name for path in folder.glob("outergrad*"))


SCENES = [own_data, one_import, documented, bytes_while_accumulating, a_second_model, refusals]


@pytest.fixture(scope="module")
def sites(tmp_path_factory) -> list[dict[str, Any]]:
    return run_two(everything, tmp_path_factory.mktemp("accelerate"))


# -- what must be true of it ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "dad"])
def test_exact_methods_follow_ddp(sites, name):
    for found in sites:
        assert len(found["ddp"]["norms"]) == STEPS
        assert found[name]["losses"][:2] == pytest.approx(found["ddp"]["losses"][:2], rel=1e-6)
        assert found[name]["norms"][0] == pytest.approx(found["ddp"]["norms"][0], rel=5e-6)
        for key in ("losses", "norms"):
            assert found[name][key] == pytest.approx(found["ddp"][key], rel=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_training_resumed_is_training_to_the_bit(sites, name):
    for found in sites:
        whole, resumed = found[name], found[f"{name} resumed"]
        assert len(resumed["losses"]) == 2 * (STEPS - SAVED)
        for key in ("losses", "norms"):
            assert resumed[key] == whole[key][-len(resumed[key]) :]
        for parameter, t in whole["state"].items():
            assert torch.equal(resumed["state"][parameter], t), parameter


@pytest.mark.parametrize("name", METHODS)
def test_sites_end_with_the_same_shared_weights(sites, name):
    first, second = (found[name]["state"] for found in sites)
    for parameter, t in first.items():
        if "running" in parameter and name == "local-steps":
            continue  # these are shared with an exchange, and each site's own until the next
        own = name == "local" and parameter.startswith("0.")
        assert torch.equal(second[parameter], t) != own, parameter


def test_one_import_is_the_same_training(sites):
    for found in sites:
        by_class = found["one_import"]
        assert by_class["once"]
        for part, name in (("whole", "rank-dad"), ("resumed", "rank-dad resumed")):
            assert by_class[part]["losses"] == found[name]["losses"]
            for parameter, t in found[name]["state"].items():
                assert torch.equal(by_class[part]["state"][parameter], t), parameter


def test_each_site_may_keep_its_own_data(sites):
    for found in sites:
        own = found["own_data"]
        assert set(own["seen"]) == set(own["known"])
    seen, others = (found["dense"]["seen"] for found in sites)
    assert not set(seen[:8]) & set(others[:8]), "of common data each process has its part"


def test_nothing_is_sent_while_gradients_accumulate(sites):
    for found in sites:
        before, after_one, after_two = found["bytes_while_accumulating"]
        assert before == after_one < after_two


def test_an_accelerator_may_have_several_models(sites):
    for found in sites:
        files, steps, kind = found["a_second_model"]
        names = ["outergrad_0.pt", "outergrad_1.pt", "outergrad_1_0.pt", "outergrad_1_1.pt"]
        assert (files, steps, kind) == (names, [0, 1], "Linear")


def test_what_cannot_be_shared_is_refused(sites):
    for found in sites:
        assert "leave out FSDP" in found["refusals"]["shard"]
        assert "leave out torch.compile" in found["refusals"]["compile"]


def test_the_documented_program_runs(sites):
    for found in sites:
        assert found["documented"] == ["outergrad_0.pt", "outergrad_1.pt"]
