"""What a step costs with og.Private, beside one without: processor time of a site's thread.

    python benchmarks/private.py [STEPS]

Two sites are threads of this process. Each has the model six times, without a transform and with
each clipping, and makes a step of each in turn, so that other programs slow all of them alike. The
figures are medians of ratios of steps in the same turn. The line before the last is the time in
which a ledger writes a step into its file, in this folder. The last line is the time of one normal
number: by the default source, by `secure=True`, and by PyTorch.
"""

import copy
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time

import torch
from torch import nn

import outergrad as og
from outergrad.launch.simulate import simulate
from outergrad.private.noise import source
from outergrad_lab.data.catalogue import SOURCES
from outergrad_lab.models.transformers import GPT

WAYS = {
    "no noise": {"noise": 0.0},
    **{name: {"noise": 1.0, "clipping": name} for name in ("flat", "per_layer", "automatic")},
    "adaptive": {"noise": 1.0, "clipping": "adaptive"},
}


def mlp():
    """784-1024-1024-10 and 32 rows."""
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(32, 784), torch.arange(32) % 10


def gpt():
    """Four layers of 128 features, 8 rows of characters; norms and positions are frozen."""
    form = SOURCES["tinyshakespeare"].format
    model = GPT(form, 128)
    for name, p in model.named_parameters():
        p.requires_grad_("norm" not in name and "position" not in name)
    ids = torch.randint(0, form.classes, (8, *form.shape))
    return model, ids, ids.roll(-1, dims=1)


def site(make, steps, group, stop):
    """Returns the seconds of each way's steps, and of those without a transform."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x, y = make()
    given = {"none": None} | {n: og.Private(clip=1.0, batch=64, **s) for n, s in WAYS.items()}
    models = {name: copy.deepcopy(model) for name in given}
    sessions = {
        name: og.distribute(models[name], og.Dense(), transform=transform, group=group)
        for name, transform in given.items()
    }
    optimizers = {name: torch.optim.Adam(own.parameters()) for name, own in models.items()}
    seconds = {name: [] for name in given}
    for _ in stop.checked(iter(range(steps))):
        for name, own in models.items():
            began = thread_time()
            optimizers[name].zero_grad()
            nn.functional.cross_entropy(own(x), y).backward()
            optimizers[name].step()
            seconds[name].append(thread_time() - began)
    for session in sessions.values():
        session.detach()
    return seconds


def noise_ns(draw):
    """Returns the least time of a normal number, of a million, in nanoseconds."""
    count, least = 1 << 20, float("inf")
    for _ in range(10):
        began = perf_counter()
        for _ in range(16):
            draw(count // 16)
        least = min(least, perf_counter() - began)
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


def main(steps: int) -> None:
    """Prints a row per model, and the time of noise."""
    print("model", *WAYS, sep=" | ")
    for make in (gpt, mlp):
        seconds = simulate(partial(site, make, steps), 2)[0]
        pairs = {name: zip(seconds[name][5:], seconds["none"][5:], strict=True) for name in WAYS}
        ratios = [statistics.median(own / none for own, none in pairs[name]) for name in WAYS]
        print(make.__name__, *(f"{ratio:.2f}" for ratio in ratios), sep=" | ")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    default, secure = (source(None, secure=secure) for secure in (False, True))
    draws = [lambda n: default.draw(n, device), lambda n: secure.draw(n, device), torch.randn]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        print(f"ms to write a step into a ledger's file: {record_ms(folder):.1f}")
    print("ns per normal number:", *(f"{noise_ns(draw):.1f}" for draw in draws))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
