"""Sites as workers of Ray Train, on a cluster of Ray or on one machine.

Run with Ray 2.60 on one machine. Not run by us: on a cluster of several, since none was at hand. A
test runs `train` with the variables that Ray sets, which are those of torchrun (docs/ray.md).

pip install 'ray[train]'
python examples/ray_train.py
"""

import torch
import torch.distributed as dist
from torch import nn

import outergrad as og

SITES = 2


def train(settings: dict) -> None:
    """Trains at one site. Ray has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    if not dist.is_initialized():  # TorchTrainer has made a process group; torchrun makes none
        dist.init_process_group("gloo")
    site = dist.get_rank()

    # Here the data is drawn. Yours would come from where this site keeps it.
    rows = torch.Generator().manual_seed(site)
    x_all = torch.randn(320, 64, generator=rows)
    y_all = x_all[:, :10].argmax(dim=1)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    session = og.distribute(model, og.DAD(), timeout=60)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings["lr"])
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(settings["epochs"]):
        for x, y in zip(x_all.split(16), y_all.split(16), strict=True):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()  # param.grad is the mean over all sites
            optimizer.step()
        if site == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
    session.detach()


def main() -> None:
    """Starts a worker of Ray for each site; each takes a CPU, as far apart as possible."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config={"lr": 1e-3, "epochs": 5},
        torch_config=TorchConfig(backend="gloo"),  # NCCL is Ray's choice where there are GPUs
        scaling_config=ScalingConfig(num_workers=SITES, placement_strategy="SPREAD"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
