"""Two hospitals train on chest X-rays, and no patient's images can be told from the model.

torchrun --nproc-per-node 2 examples/private_hospitals.py

Around a hub (docs/institutions.md), each hospital with its own kit, so that sums are masked:
python examples/private_hospitals.py hospital-a.kit
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outergrad as og
import outergrad.star.backend  # the hub; not needed with PyTorch 2.14 and later

# What the hospitals agree on before anybody looks at data.
EPSILON, DELTA = 8.0, 1e-5  # δ is well below one over all patients
RATE, STEPS = 0.05, 150  # each patient is in a step with this probability
PATIENTS = 1500  # of both hospitals together, about
CLIP = 1.0  # length of a patient's gradient at most

if sys.argv[1:]:
    address = f"star://{Path(sys.argv[1]).resolve()}?blind=1"
    dist.init_process_group("outergrad", init_method=address)
    sums = "masked"
else:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    sums = "open"  # each hospital sees what the other sends
site, sites = dist.get_rank(), dist.get_world_size()


def made_up(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise, with a bright patch where the label is 1: for machines without the data."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, rows)
    images = random.normal(110, 40, (rows, 28, 28))
    images[labels == 1, 14:22, 8:20] += 50
    return images.clip(0, 255), labels


file = Path(os.environ.get("OUTERGRAD_DATA", "data"), "pneumoniamnist", "pneumoniamnist.npz")
if file.exists():  # outergrad train --data pneumonia says where it is to be had
    with np.load(file) as arrays:
        train, test = (
            (arrays[f"{part}_images"], arrays[f"{part}_labels"].ravel())
            for part in ("train", "test")
        )
else:
    train, test = made_up(4700, seed=0), made_up(600, seed=1)

# These data do not say whose an image is. Here one to five images of one label are a patient's.
order = np.argsort(train[1], kind="stable")
of_image = np.repeat(np.arange(len(order)), 1 + np.arange(len(order)) % 5)[: len(order)]
mine = of_image % sites == site
images, labels, patients = train[0][order][mine], train[1][order][mine], of_image[mine]


def as_tensors(images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.tensor(images, dtype=torch.float32)[:, None]
    return pixels / 128 - 1, torch.tensor(labels, dtype=torch.int64)  # no statistics of the data


data = TensorDataset(*as_tensors(images, labels), torch.from_numpy(patients))
sampler = og.private.PoissonSampler(len(data), RATE, groups=patients, unit="patient", site=site)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=og.private.CollateEmpty(data))

sampling = og.private.sampling_of(loader)
# Whatever is stated holds against the other hospital; whoever gets the model learns less. RDP is
# quick; accountant="pld", the default, needs less noise, and half a minute more.
noise = og.private.noise_for(
    EPSILON, DELTA, sampling, STEPS, sites=sites, sums=sums, observer="site", accountant="rdp"
)
file = f"ledger-{site}.json"  # what was released stays released, if the training starts again
ledger = og.private.Ledger(DELTA, stop_at=EPSILON, against="site", accountant="rdp", file=file)

torch.manual_seed(0)
model = nn.Sequential(  # a batch norm would mix patients: group norms see one image at a time
    nn.Conv2d(1, 16, 5, stride=2, padding=2),
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.GroupNorm(4, 32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(512, 2),
)
private = og.Private(
    clip=CLIP,
    noise=noise,
    batch=RATE * PATIENTS,
    unit="patient",
    ledger=ledger,  # each step is counted before anything of it is sent
    sampling=sampling,  # not the loader: PATIENTS is about right, and is not compared
)
session = og.distribute(model, og.Dense(), transform=private)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def batches():
    while True:
        yield from loader


try:
    for x, y, whose in batches():
        optimizer.zero_grad()
        session.units(whose)  # all images of a patient are clipped as one
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # both hospitals stop before the same step
        optimizer.step()
except og.private.BudgetSpentError as spent:
    if site == 0:
        print(f"the budget of ε = {EPSILON:g} was spent after {spent.steps} steps")

if site == 0:
    x, y = as_tensors(*test)
    with torch.no_grad():
        score = model(x).diff(dim=1)[:, 0]
    area = (score[y == 1][:, None] > score[y == 0]).float().mean()
    print(f"area under the curve on {len(y)} other images: {area:.3f}")
    print(session.privacy())
dist.destroy_process_group()
