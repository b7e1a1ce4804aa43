"""Sites that hold different digits train one model: the loop is that of DDP.

torchrun --nproc-per-node 2 examples/train.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import outergrad as og

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
site, sites = dist.get_rank(), dist.get_world_size()

# Each site keeps its own classes of the ten: no site could learn all of them alone.
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
train, test = train_test_split(range(len(labels)), stratify=labels, test_size=0.2, random_state=0)
mine = [row for row in train if labels[row] * sites // 10 == site]
data = TensorDataset(images[mine], labels[mine])

# The sampler gives every site the same number of steps, however many rows it holds.
loader = DataLoader(data, batch_size=16, sampler=RandomSampler(data, num_samples=16 * 50))

model = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
)
session = og.distribute(model, og.DAD())  # in place: the only line that is new
optimizer = torch.optim.Adam(model.parameters())
loss_fn = nn.CrossEntropyLoss()

for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()  # param.grad is the mean over all sites
        optimizer.step()

    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    if site == 0:
        sent = session.stats().sent_bytes
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}, {sent:,} bytes in the last step")

dist.destroy_process_group()
