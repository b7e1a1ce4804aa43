"""Whether two versions of the library compute and send the same: a line per run, to be compared.

    python benchmarks/fingerprints.py > before.txt     # in a checkout of before
    python benchmarks/fingerprints.py > after.txt      # in one of after
    diff before.txt after.txt

Sites are threads of one process and train on made-up rows; `--sites` says how many there are. Some
batches are shorter at one site than at others, and now and then two passes are added up. A run is

- a workload of `outergrad bench` by a method, over gloo (`--workloads`, `--methods`), or
- a small network by a method in another loop or over another way (`--situations`): sites that have
  unequal numbers of batches (`join`), a transform of gradients, a replica check at every step,
  `weighting="samples"`, a hub (`star`), and sites of two ranks each (`mesh`).

A line holds what each site sent in bytes, and hashes of all gradients, of the weights in the end,
of the session's state, and of the messages: of each its kind, lane, turn, dtype and lengths, in
order. Equal lines mean equal to the bit. `--messages FILE` writes the messages themselves, so that
`diff` shows where two versions part. Run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.comm.torch import TorchComm
from outergrad.launch.simulate import Stop, gloo_group, simulate
from outergrad.star.comm import StarComm
from outergrad.star.folder import HubFolder
from outergrad.star.server import HubServer
from outergrad_lab.data import synthetic
from outergrad_lab.workloads import WORKLOADS

LARGE = ("vgg", "wide-mlp")  # what takes minutes
RANKS = 2  # of a site of a mesh
METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "dense": lambda _: og.Dense(),
    "dad": lambda _: og.DAD(),
    "dad-always": lambda _: og.DAD(always=True),
    "dad-activations": lambda _: og.DAD(reveal="activations"),
    "edad": lambda _: og.EDAD(),
    "edad-always": lambda _: og.EDAD(always=True),
    "rank-dad": lambda _: og.RankDAD(rank=4),
    "tolerance": lambda _: og.RankDAD(rank=8, tolerance=0.1),
    "remembers": lambda _: og.RankDAD(rank=4, error_feedback="auto"),
    "budget": lambda _: og.RankDAD(budget=1 / 20),
    "owners": lambda _: og.RankDAD(budget=1 / 20, reduce="two_way"),
    "two-way": lambda _: og.RankDAD(rank=4, reduce="two_way"),
    "all-reduce": lambda _: og.RankDAD(rank=4, reduce="all_reduce"),
    "alternate": lambda _: og.RankDAD(rank=4, reduce="alternate"),
    "bf16": lambda _: og.RankDAD(rank=4, wire=og.wire.BF16()),
    "powersgd": lambda _: og.PowerSGD(rank=4),
    "sparse": lambda _: og.Sparse(density=0.05),
    "sparse-random": lambda _: og.Sparse(density=0.05, select="random"),
    "every-2": lambda _: og.RankDAD(rank=4, every=2),
    "per-layer": lambda model: _in_turn(model),
    "auto-frozen": lambda model: og.Auto(frozen=_in_turn(model).methods),
    "local-steps": lambda _: og.LocalSteps(2, method=og.RankDAD(rank=4)),
    "local-steps-stream": lambda _: og.LocalSteps(
        6, stream=3, overlap=1, method=og.RankDAD(rank=4)
    ),
    "local-steps-reset": lambda _: og.LocalSteps(
        3, method=og.RankDAD(budget=1 / 20), error_reset=True
    ),
}


@dataclass(frozen=True)
class Clip:
    """Clips the gradient of a site by its norm."""

    limit: float = 0.5
    needs_samples = False
    needs_all_layers = True

    def __call__(self, gradient: og.SiteGradient) -> og.SiteGradient:
        """The same, scaled."""
        length = float(og.transforms.norm(gradient))
        return og.transforms.scaled(gradient, min(1.0, self.limit / length))


@dataclass(frozen=True)
class Situation:
    """What is around a training, beside its method.

    Attributes:
        way: how the sites reach each other: "group", "star" or "mesh".
        settings: of `og.distribute`.
        joins: the sites have unequal numbers of batches.
    """

    way: str = "group"
    settings: tuple[tuple[str, Any], ...] = ()
    joins: bool = False


SITUATIONS = {
    "join": Situation(joins=True),
    "clip": Situation(settings=(("transform", Clip()),)),
    "verify": Situation(settings=(("verify_every", 1),)),
    "samples": Situation(settings=(("weighting", "samples"),)),
    "star": Situation("star"),
    "mesh": Situation("mesh"),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        workload: of `outergrad bench`.
        method: a key of `METHODS`.
        situation: a key of `SITUATIONS`, or "" for a usual loop over gloo.
        sites: how many.
        steps: of each site.
    """

    workload: str
    method: str
    situation: str
    sites: int
    steps: int

    @property
    def around(self) -> Situation:
        """What is around it."""
        return SITUATIONS[self.situation] if self.situation else Situation()

    @property
    def name(self) -> str:
        """At the head of its line."""
        return f"{self.workload} {self.method} {self.situation or 'usual'} {self.sites}"


@dataclass(frozen=True)
class Seen:
    """What a site has computed and sent."""

    sent: int
    gradients: str
    weights: str
    state: str
    messages: Sequence[str]

    def __str__(self) -> str:
        """As it stands in a line."""
        hashes = self.gradients, self.weights, self.state, _hash_of(self.messages)
        return f"{self.sent} {' '.join(hashes)}"


# -- the messages ---------------------------------------------------------------------------------

_HERE = threading.local()  # of each site, that is a thread: what it has sent


@contextmanager
def recorded() -> Iterator[None]:
    """All that a site does by the methods of its transport is noted with its thread."""
    calls = ("all_reduce", "all_gather", "all_to_all", "broadcast", "take_turn")
    kept = [(kind, call, getattr(kind, call)) for kind in (TorchComm, StarComm) for call in calls]
    for kind, call, plain in kept:
        setattr(kind, call, _noted(call, plain))
    try:
        yield
    finally:
        for kind, call, plain in kept:
            setattr(kind, call, plain)


def _noted(call: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        messages = getattr(_HERE, "messages", None)
        if messages is not None:
            told = [*args, *(f"{name}={value}" for name, value in sorted(kwargs.items()))]
            messages.append(" ".join([call, f"of {self.world_size}:", *map(_told, told)]))
        return plain(self, *args, **kwargs)

    return noting


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}".removeprefix("torch.") + f"[{value.numel()}]"
    if isinstance(value, (list, tuple)):
        return "(" + " ".join(map(_told, value)) + ")"
    return str(value)


# -- one run --------------------------------------------------------------------------------------


def seen(run: Run) -> list[Seen]:
    """What all sites, or all ranks of them, have computed and sent."""
    recipe = WORKLOADS[run.workload]
    ranks = RANKS if run.around.way == "mesh" else 1
    torch.manual_seed(0)
    models = [recipe.build() for _ in range(run.sites * ranks)]
    rows = [
        synthetic(recipe.format, rows=(run.steps + run.sites) * recipe.batch_size, seed=site)
        for site in range(len(models))
    ]
    with _way(run, ranks) as way:

        def work(group: dist.ProcessGroup, stop: Stop) -> Seen:
            site = group.rank()
            batches = _batches(run, rows[site], site, recipe.batch_size)
            return _trained(run, models[site], batches, way(group), stop)

        return simulate(work, len(models))


@contextmanager
def _way(run: Run, ranks: int) -> Iterator[Callable[[dist.ProcessGroup], dict[str, Any]]]:
    """The argument of `og.distribute` that says how sites reach each other, by their group."""
    if run.around.way == "group":
        yield lambda group: {"group": group}
    elif run.around.way == "mesh":
        store = dist.HashStore()
        yield lambda group: {"mesh": Mesh.of(store, group.rank(), run.sites, ranks)}
    else:
        with TemporaryDirectory() as folder:
            made, names = HubFolder(Path(folder) / "hub"), [f"site-{k}" for k in range(run.sites)]
            made.create("localhost:8443", ["127.0.0.1"])
            for name in names:
                made.invite(name).write(Path(folder) / f"{name}.kit")
            server = HubServer(made, "127.0.0.1:0", names)
            server.start()
            kits = [Path(folder) / f"{name}.kit" for name in names]
            stars = [og.Star(f"127.0.0.1:{server.port}", kit=kit) for kit in kits]
            try:
                yield lambda group: {"transport": stars[group.rank()]}
            finally:
                for star in stars:
                    star.close()
                server.stop()


@dataclass(frozen=True)
class Mesh:
    """The two groups of a rank."""

    site: dist.ProcessGroup
    local: dist.ProcessGroup
    mesh_dim_names: tuple[str, ...] = ("site", "local")

    @staticmethod
    def of(store: dist.Store, rank: int, sites: int, ranks: int) -> Mesh:
        """Of a rank among all."""
        site, local = divmod(rank, ranks)
        between = gloo_group(dist.PrefixStore(f"between {local}", store), site, sites)
        return Mesh(between, gloo_group(dist.PrefixStore(f"inside {site}", store), local, ranks))

    def get_group(self, mesh_dim: str) -> dist.ProcessGroup:
        """One of them."""
        return getattr(self, mesh_dim)


def _batches(run: Run, rows: Any, site: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Of a site: every fifth is shorter at the second; where sites join, the later have more."""
    steps = run.steps + (site if run.around.joins else 0)
    ends = [
        k * size + size // (2 if site == 1 and k % 5 == 3 else 1)  # the plan is made anew
        for k in range(steps)
    ]
    return [
        (rows.x_train[k * size : end], rows.y_train[k * size : end]) for k, end in enumerate(ends)
    ]


def _trained(
    run: Run,
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    way: dict[str, Any],
    stop: Stop,
) -> Seen:
    messages: list[str] = []
    _HERE.messages = messages
    gradients = hashlib.sha256()
    method = METHODS[run.method](model)
    session = og.distribute(model, method, **way, **dict(run.around.settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with session.join() if run.around.joins else nullcontext():
        for step, (x, y) in enumerate(batches):
            adds_up = step % 8 == 2 and not run.around.joins and "local" not in run.method
            with session.no_sync() if adds_up else nullcontext():
                cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                _add(gradients, parameter.grad)
            if not adds_up:
                optimizer.step()
                optimizer.zero_grad()
            stop.check()
    session.flush()
    sent = session.stats().total_sent_bytes
    state = _hash_of(session.state_dict())
    session.detach()
    _HERE.messages = None
    weights = _hash_of(model.state_dict())
    return Seen(sent, gradients.hexdigest()[:12], weights, state, messages)


def _in_turn(model: nn.Module) -> og.PerLayer:
    """The parameters of each module by one of three methods, in turn."""
    methods = [og.DAD(), og.RankDAD(rank=4), og.Dense()]
    modules = dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters())
    of = {module: methods[k % 3] for k, module in enumerate(modules)}
    return og.PerLayer({name: of[name.rpartition(".")[0]] for name, _ in model.named_parameters()})


# -- hashes ---------------------------------------------------------------------------------------


def _hash_of(value: Any) -> str:
    known = hashlib.sha256()
    _add(known, value)
    return known.hexdigest()[:12]


def _add(known: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        dense = value.to_dense() if value.is_sparse else value
        known.update(dense.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            known.update(str(key).encode())
            _add(known, value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            _add(known, one)
    else:
        known.update(repr(value).encode())


# -- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Prints a line per run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    small = [name for name in WORKLOADS if name not in LARGE]
    parser.add_argument("--workloads", type=_listed, default=small)
    parser.add_argument("--methods", type=_listed, default=list(METHODS))
    parser.add_argument("--situations", type=_listed, default=list(SITUATIONS))
    parser.add_argument("--in-situations", default="deep-mlp", help="the workload of situations")
    parser.add_argument("--sites", type=_listed, default=["2", "3"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--messages", type=argparse.FileType("w"), help="a file, to be written")
    options = parser.parse_args()
    places = [(workload, "") for workload in options.workloads]
    places += [(options.in_situations, situation) for situation in options.situations if situation]
    with recorded():
        for workload, situation in places:
            for method in options.methods:
                for sites in map(int, options.sites):
                    run = Run(workload, method, situation, sites, options.steps)
                    print(_line(run, options.messages), flush=True)


def _line(run: Run, messages: TextIO | None) -> str:
    try:
        found = seen(run)
    except Exception as error:
        return f"{run.name}: {type(error).__name__}: {error}"
    if messages is not None:
        for site, one in enumerate(found):
            messages.writelines(f"{run.name} at {site}: {message}\n" for message in one.messages)
    return f"{run.name}: {'  '.join(map(str, found))}"


def _listed(text: str) -> list[str]:
    return [one for one in text.split(",") if one]


if __name__ == "__main__":
    main()
