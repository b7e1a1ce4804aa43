"""What a step costs with og.Private, beside one without, and beside Opacus with ghost clipping.

    python benchmarks/private.py [STEPS] [MODEL...]

Two sites are threads of this process. Each has the model several times, without a transform, with
each clipping, and in Opacus, and makes a step of each in turn, so that other programs slow all of
them alike. Opacus trains each site by itself, without messages, with its own noise and optimizer.
All figures are in units of a step without a transform:

- time: the median of ratios of steps in the same turn, of the processor time of the site's thread;
  "wall" is the same of the clock, in which noise of other programs is larger,
- memory: the most bytes that tensors have held at once in a step, as PyTorch's profiler counts
  allocations of the site's thread, with weights and the state of Adam. NumPy's numbers are not in
  it, which are 1 MB of noise at most.

The line before the last is the time in which a ledger writes a step into its file, in this folder.
The last line is the time of one normal number: by the default source, by `secure=True`, by PyTorch.
"""

import copy
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import outergrad as og
from outergrad.launch.simulate import simulate
from outergrad.private.noise import source
from outergrad_lab.workloads import WORKLOADS

WAYS = {
    "no noise": {"noise": 0.0},
    **{name: {"noise": 1.0, "clipping": name} for name in ("flat", "per_layer", "adaptive")},
}
NONE, OPACUS = "none", "Opacus"
BEFORE = 5
"""Steps that do not count."""
Step = Callable[[], None]


def workload(name: str, rows: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A model of the bench, with random inputs and labels, as many rows as the bench has or more.

    Batch norms are group norms of eight channels each: samples have to be apart.
    """
    about = WORKLOADS[name]
    format, rows = about.format, rows or about.batch_size
    ids = torch.randint(0, format.vocabulary or 1, (rows, *format.shape))
    x = ids if format.tokens else torch.randn(rows, *format.shape)
    return (
        _of_samples(about.build()),
        x,
        torch.randint(0, format.classes, (rows, *format.label_shape)),
    )


def _of_samples(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if isinstance(norm, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(norm.num_features // 8, norm.num_features))
    return model


def untied() -> tuple[nn.Module, Tensor, Tensor]:
    """The GPT as Opacus takes it: a head of its own, positions frozen."""
    model, x, y = workload("gpt")
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.position.requires_grad_(False)
    return model, x, y


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "mlp": partial(workload, "mlp"),
    "mlp-512": partial(workload, "mlp", 512),
    "cnn": partial(workload, "cnn"),
    "gpt": partial(workload, "gpt"),
    "gpt-untied": untied,
    "vit": partial(workload, "vit"),
}


def site(make, steps, group, stop):
    """Returns what each way's steps cost at this site: processor time, clock, and bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x, y = make()
    given = {NONE: None} | {n: og.Private(clip=1.0, batch=64, **s) for n, s in WAYS.items()}
    models = {name: copy.deepcopy(model) for name in given}
    sessions = [
        og.distribute(models[name], og.Dense(), transform=transform, group=group)
        for name, transform in given.items()
    ]
    made = {name: plain(own, x, y) for name, own in models.items()}
    refused = ""
    try:
        made[OPACUS] = opacus(copy.deepcopy(model), x, y)
        made[OPACUS][0]()
    except Exception as error:  # it says why, in classes of its own and others
        made.pop(OPACUS, None)
        refused = f"{type(error).__name__}: {error}"
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for _ in stop.checked(iter(range(steps))):
        for name, (step, _) in made.items():
            began = thread_time(), perf_counter()
            step()
            found[name].append((thread_time() - began[0], perf_counter() - began[1]))
    held = {name: own + peak(step, group.rank() == 0) for name, (step, own) in made.items()}
    for session in sessions:
        session.detach()
    return found, held, refused


def plain(model, x, y) -> tuple[Step, int]:
    """Returns a step with Adam, and the bytes of weights and moments."""
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, _own_bytes(model)


class _MeanOfSample(nn.CrossEntropyLoss):
    """Losses of samples, also where these have several labels."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        found = super().forward(input, target)
        return found.flatten(1).mean(1) if found.dim() > 1 else found


def opacus(model, x, y) -> tuple[Step, int]:
    """Returns the same with Opacus: noise and clip are those of og.Private."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator
    if ModuleValidator.validate(model):
        model = ModuleValidator.fix(model)  # attention of its own
    about = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    own = _own_bytes(model)
    model, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model.train(),
        optimizer=torch.optim.Adam([p for p in model.parameters() if p.requires_grad]),
        criterion=_MeanOfSample(),
        data_loader=torch.utils.data.DataLoader(range(len(x)), batch_size=len(x)),
        grad_sample_mode="ghost",
        **about,
    )

    def step() -> None:
        optimizer.zero_grad()
        with warnings.catch_warnings():  # of hooks
            warnings.simplefilter("ignore")
            criterion(model(x), y).backward()
        optimizer.step()

    return step, own


def _own_bytes(model: nn.Module) -> int:
    return sum((3 if p.requires_grad else 1) * p.nbytes for p in model.parameters())


def peak(step: Step, watched: bool) -> int:
    """Returns the most bytes that a step holds, besides what is there before it."""
    if not watched:
        step()
        return 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    waiting, found = list(profiled.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    held = most = 0
    for _, change in sorted(found, key=lambda pair: pair[0]):
        held += change
        most = max(most, held)
    return most


def row(make, steps: int) -> list[str]:
    """Returns the figures of a model, and why Opacus refuses it if it does."""
    found, held, refused = simulate(partial(site, make, steps), 2)[0]
    texts = []
    for name in (*WAYS, OPACUS):
        if name not in found:
            texts.append(f"refuses ({refused})")
            continue
        pairs = list(zip(found[name], found[NONE], strict=True))[BEFORE:]
        time, wall = (statistics.median(own[k] / none[k] for own, none in pairs) for k in (0, 1))
        texts.append(f"{time:.2f} (wall {wall:.2f}, memory {held[name] / held[NONE]:.2f})")
    return texts


def noise_ns(draw) -> float:
    """Returns the least time of a normal number, of a million, in nanoseconds."""
    count, least = 1 << 20, float("inf")
    for _ in range(10):
        began = thread_time()
        for _ in range(16):
            draw(count // 16)
        least = min(least, thread_time() - began)
    return 1e9 * least / count


def record_ms(folder):
    """Returns the median time in which a ledger writes a step down, in milliseconds."""
    ledger = og.private.Ledger(delta=1e-5, file=Path(folder) / "ledger.json")
    step, took_s = og.private.Release(1.1, og.private.Poisson(0.01), sites=2), []
    for _ in range(200):
        began = perf_counter()
        ledger.record(step)
        took_s.append(perf_counter() - began)
    return 1e3 * statistics.median(took_s)


def main(steps: int, names: list[str]) -> None:
    """Prints a row per model, and the time of noise."""
    print("model", *WAYS, OPACUS, sep=" | ")
    for name in names or MODELS:
        print(name, *row(MODELS[name], steps), sep=" | ", flush=True)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    default, secure = (source(None, secure=secure) for secure in (False, True))
    draws = [lambda n: default.draw(n, device), lambda n: secure.draw(n, device), torch.randn]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        print(f"ms to write a step into a ledger's file: {record_ms(folder):.1f}")
    print("ns per normal number:", *(f"{noise_ns(draw):.1f}" for draw in draws))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60, sys.argv[2:])
