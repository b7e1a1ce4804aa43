"""What others wrote trains over the star as over gloo: only the name and the address differ."""

from __future__ import annotations

import copy
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("grpc", reason="a hub needs grpcio")

from torch.multiprocessing import start_processes

import outergrad as og
from group_losses import losses_of
from outergrad.launch.links import Place, parse_link, places, what_is_missing
from outergrad.launch.processes import run_processes
from outergrad_lab.bench import hub as hub_of_bench
from stars import NAMES, hub, kit_of

SITES, STEPS = 2, 4
BLIND = "a hub that must not read"


def network() -> torch.nn.Module:
    torch.manual_seed(7)
    layers = torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh()
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 3))


def ddp(_: Path) -> list[float]:
    return losses_of(torch.nn.parallel.DistributedDataParallel(network()), STEPS)


def gradients(_: Path) -> list[float]:
    """DDP's means of one step, behind the largest number of all sites' own."""
    own = network()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    own(x).square().mean().backward()
    found = torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])
    largest = found.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    model = torch.nn.parallel.DistributedDataParallel(network())
    model(x).square().mean().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [largest.item(), *torch.cat(grads).tolist()]


def ddp_with_a_hook(_: Path) -> list[float]:
    """PowerSGD, whose later sums begin where earlier futures end."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = torch.nn.parallel.DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return losses_of(model, STEPS)


def fully_shard(_: Path) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (SITES,))
    for one in (model[0], model):
        fully_shard(one, mesh=mesh)
    return losses_of(model, STEPS)


def replicas_of_shards(_: Path) -> list[float]:
    """HSDP: replicated between sites, sharded within."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    mesh = init_device_mesh("cpu", (SITES, 1), mesh_dim_names=("sites", "local"))
    fully_shard(model, mesh=mesh)
    return losses_of(model, STEPS)


def checkpoint(folder: Path) -> list[float]:
    """`torch.distributed.checkpoint` saves shards of all sites, and loads them into new ones."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SITES,))
    whole = torch.arange(12.0).view(6, 2)
    place = str(folder / "saved")
    dcp.save({"t": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=place)
    into = {"t": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])}
    dcp.load(into, checkpoint_id=place)
    return into["t"].full_tensor().flatten().tolist()


def uneven_inputs(_: Path) -> list[float]:
    """DDP's `join`: one site has more batches than the other."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
    for divided in (True, False):
        with model.join(divide_by_initial_world_size=divided):
            for _ in range(2 + dist.get_rank()):
                model(torch.ones(2, 6)).sum().backward()
    assert model.module.weight.grad is not None
    return model.module.weight.grad.flatten().tolist()


def hugging_face(folder: Path) -> list[float]:
    transformers = pytest.importorskip("transformers")

    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    torch.manual_seed(7)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    rows = [
        {"input_ids": torch.arange(k, k + 8), "labels": torch.arange(k, k + 8)} for k in range(16)
    ]
    given = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    args = transformers.TrainingArguments(
        str(folder / "trainer"), max_steps=STEPS, logging_steps=1, **given
    )
    trainer = transformers.Trainer(model, args, train_dataset=rows)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def lightning(_: Path) -> list[float]:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = network(), []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(4 * STEPS, 6, generator=generator)
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    about = {"accelerator": "cpu", "devices": SITES, "strategy": "ddp", "max_epochs": 1}
    trainer = pl.Trainer(**about, **dict.fromkeys(quiet, False))
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
    return module.losses


def profiled(_: Path) -> list[float]:
    """How often collectives show in a profile of steps of DDP."""
    with torch.profiler.profile() as found:
        ddp(_)
    names = [event.name for event in found.events() if event.is_async]
    of = ("all_reduce", "broadcast", "all_gather", "barrier")
    counts = [float(names.count(f"{dist.get_backend()}:{name}")) for name in of]
    assert counts[0] >= STEPS
    return counts


def methods(_: Path) -> list[float]:
    """Sessions of the library, over all sites and over a group of them."""
    found = []
    some = dist.new_group(list(range(SITES)))
    for method in (og.Dense(), og.DAD(), og.RankDAD(rank=2), og.LocalSteps(2)):
        for group in (None, some):
            model = copy.deepcopy(network())
            session = og.distribute(model, method, group=group)
            found += losses_of(model, STEPS)
            session.detach()
    return found


TASKS = {
    task.__name__: task
    for task in (
        *(
            ddp,
            gradients,
            ddp_with_a_hook,
            fully_shard,
            replicas_of_shards,
            checkpoint,
            uneven_inputs,
        ),
        *(hugging_face, lightning, methods),
    )
}


def member(
    folder: Path, address: str, place: Place | None, rank: int
) -> dict[str, dict[str, list[float]]]:
    """What all tasks find over gloo and the star, of which the hub may read or not."""
    if place is not None:
        place.enter()
        hub_of_bench.star_at(folder, rank)  # waits until the hub listens
    import outergrad.star.backend as star

    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SITES, "LOCAL_WORLD_SIZE": SITES}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    store = (folder / "store").as_uri()
    over_star = {"init_method": f"star://{folder}/{rank}.kit?hub={address}"}
    groups = {
        "gloo": {"init_method": store, "rank": rank, "world_size": SITES},
        star.NAME: over_star,
        BLIND: {"init_method": f"{over_star['init_method']}&blind=1"},
    }
    found: dict[str, dict[str, list[float]]] = {}
    for name, about in groups.items():
        dist.init_process_group("gloo" if name == "gloo" else star.NAME, **about)
        place_of_files = folder / name
        found[name] = {name: task(place_of_files) for name, task in TASKS.items()}
        dist.barrier()
        dist.destroy_process_group()
    hub_of_bench.say_done(folder, rank)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Each site and the hub have a network of their own, where this machine can have that."""
    folder, link = tmp_path_factory.mktemp("star"), parse_link("1gbit")
    if what_is_missing(link, SITES + 1):
        with hub(SITES) as server:
            for rank, name in enumerate(NAMES[:SITES]):
                shutil.copy(kit_of(name), folder / f"{rank}.kit")
            about = (folder, f"127.0.0.1:{server.port}", None)
            works = [partial(member, *about, rank) for rank in range(SITES)]
            return run_processes(works, verbose=True)
    with places(SITES + 1, link) as (*sites, middle):
        address = f"10.77.0.{SITES + 1}:{hub_of_bench.PORT}"
        works = [partial(member, folder, address, site, rank) for rank, site in enumerate(sites)]
        hub_work = partial(hub_of_bench.run_hub, folder, middle, SITES)
        return run_processes([*works, hub_work], verbose=True)[:SITES]


@pytest.mark.parametrize("task", TASKS)
def test_it_trains_over_the_star_as_over_gloo(found, task):
    """The hub adds up in 64 bits, so that sums are rounded once, and gloo's are not."""
    for site in found:
        over_gloo, over_star, over_blind_star = (site[backend][task] for backend in site)
        for others in (over_star, over_blind_star):
            assert others == pytest.approx(over_gloo, rel=2e-4, abs=1e-6)
        assert len(over_star) >= STEPS


def test_masked_gradients_are_as_near_as_their_unit(found):
    """Half a unit of docs/institutions.md, and the rounding of float32 in either way."""
    for site in found:
        (largest, *over_gloo), (_, *over_blind) = (site[at]["gradients"] for at in ("gloo", BLIND))
        unit = largest * 2.0**4 * SITES / 2**31
        limit = unit / 2 + 2 * torch.finfo(torch.float32).eps * largest
        assert over_blind == pytest.approx(over_gloo, rel=0.0, abs=limit)


def last_words(rank: int, folder: Path, port: int, ends: bool) -> None:
    """Ends as soon as it has sent, or receives later."""
    import outergrad.star.backend as star

    address = f"star://{folder}/{NAMES[rank]}.kit?hub=127.0.0.1:{port}"
    dist.init_process_group(star.NAME, init_method=address)
    t = torch.full((4 << 20,), float(rank))
    if rank:
        time.sleep(0.5)
    dist.broadcast(t, 0)
    assert t[-1] == 0.0
    if ends:
        dist.destroy_process_group()


@pytest.mark.parametrize("ends", [True, False])
def test_what_a_site_sent_last_arrives_though_it_has_ended(tmp_path, ends):
    with hub(SITES) as server:
        for name in NAMES[:SITES]:
            shutil.copy(kit_of(name), tmp_path)
        about = (tmp_path, server.port, ends)
        start_processes(last_words, about, nprocs=SITES, start_method="spawn")
