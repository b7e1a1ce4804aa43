"""Sites that train, save, are killed and go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import outergrad as og
from outergrad.checkpoint import folder as files

METHODS = {
    "dad": og.DAD(),
    "rank-dad": og.RankDAD(rank=2, min_ratio=1.0),
    "rank-dad dense": og.RankDAD(rank=2, min_ratio=1.0, error_feedback="dense"),
    "sketches": og.RankDAD(rank=2, reduce="all_reduce", min_ratio=1.0),
    "sides in turn": og.RankDAD(rank=2, reduce="alternate", min_ratio=1.0),
    "local steps": og.LocalSteps(3, outer=og.nesterov, method=og.RankDAD(rank=2, min_ratio=1.0)),
    "powersgd": og.PowerSGD(rank=2, min_ratio=1.0),
    "sparse": og.Sparse(density=0.1, momentum=0.9, warmup=6),
    "every": og.DAD(every=3),
    "own": og.PerLayer({"0.*": og.Local(), "*": og.RankDAD(rank=2, min_ratio=1.0)}),
}


class Killed(BaseException):
    """What a SIGKILL is to a thread."""


class Dropout(nn.Module):
    """Draws from a stream of its own: the threads of a process share that of PyTorch."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape, generator=self.generator) < 0.8) / 0.8


class Site:
    """A model with dropout and batch norm, an optimizer, a schedule, a session, its files."""

    def __init__(
        self,
        method: Any,
        rank: int,
        group: Any,
        folder: Path,
        *,
        number: int | None = None,
        keep: int = 2,
    ):
        self.number = rank if number is None else number
        self.generator = torch.Generator().manual_seed(10 + self.number)
        self.model = nn.Sequential(
            nn.Linear(14, 12),
            nn.BatchNorm1d(12),
            nn.Tanh(),
            Dropout(self.generator),
            nn.Linear(12, 10),
        )
        draws = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=draws))
        self.session = og.distribute(self.model, method, group=group, buffers="local")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.7)
        self.checkpoints = og.Checkpoints(
            folder,
            self.session,
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            dropout=self.generator,
            site=number,
            keep=keep,
        )

    def step(self, step: int) -> float:
        generator = torch.Generator().manual_seed(1000 * step + self.number)
        x = torch.randn(6 + self.number % 2, 14, generator=generator)
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def run(
        self,
        stop: int,
        every: int,
        kill: Callable[[int], None] = lambda step: None,
        losses: dict[int, float] | None = None,
    ) -> dict[int, float]:
        """Goes on from what there is; the loss of every step, put into `losses`."""
        losses = {} if losses is None else losses
        restored = self.checkpoints.restore()
        for step in range(restored.step if restored else 0, stop):
            losses[step] = self.step(step)
            if (step + 1) % every == 0:
                self.checkpoints.save(step + 1)
            kill(step)
        return losses


def writing_that_dies(step: int, phases: dict[str, str]) -> Callable[[Path, Any], None]:
    """A `files.write` in which every site is killed.

    Args:
        step: of the checkpoint.
        phases: per thread, before, within or after it writes its file.
    """
    write = files.write

    def dying(path: Path, value: Any) -> None:
        phase = phases[threading.current_thread().name]
        last = path.parent.name.startswith(f"step-{step:08}") and path.name.startswith("site")
        if last and phase == "before":
            raise Killed
        if last and phase == "within":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.123").write_bytes(b"half")
            raise Killed
        write(path, value)
        if last:
            raise Killed

    return dying
