"""Outer optimizer of `og.LocalSteps` under Muon: mean changes of matrices are made orthonormal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outergrad.optim.groups import begin_step, check_last, check_ranges, gradient
from outergrad.optim.matrices import as_matrices, holds_matrices, muon_groups, of_one_shape
from outergrad.optim.orthonormal import STEPS, newton_schulz

_ITERATIONS = 12


class OuterMuon(Optimizer):
    """Moves matrices by their mean change, made orthonormal, as far as its largest singular value.

    For a matrix θ (O, I) with the mean change G over the sites, old weights minus new:

        θ ← θ - η σ(G) newton_schulz(G)      where σ(G) is the largest singular value of G

    Each site's Muon makes its own changes orthonormal. Their mean is shorter in all directions in
    which the sites differ, and what few bits add to it is noise in all directions. Made orthonormal
    once more it has the same length in all of them, as the update of one Muon over all sites. So
    `og.Sparse` keeps no residual of matrices all of whose entries are sent. Choose it with the
    signs of whole matrices, which take turns (docs/fewest-bytes.md, "Orthonormal once more"):

        few = og.Sparse(
            density=1.0, select="random_blocks", block=256, wire=og.wire.Sign(),
            vectors=og.wire.Int4(),
        )
        outer = og.optim.OuterMuon
        steps = og.LocalSteps(3, stream=3, outer=outer, method=few, error_reset=True)

    Matrices are what `muon_groups` finds in the model that is trained: those that `Muon` moves so.
    All other parameters, as embeddings and the head, become their mean over the sites, with the
    error feedback of the method. It has no state. With weight decay of the inner optimizer the
    decay is part of the change.

    Source: the iteration of Jordan et al., Muon, kellerjordan.github.io/posts/muon. To make the
    mean orthonormal again is ours.

    Args:
        params: Weights that all sites had after the last exchange. A group may say its rule: with
            ``matrices=True`` all are made orthonormal, with False none, with None those that
            `og.LocalSteps` finds to be matrices, or by themselves those of two rows or more. With
            ``stacked=True`` the last two dimensions are matrices.
        lr: η. Signs of normally distributed numbers keep 2/π of these, so the default is about π/2.
            Use 1 where changes travel exactly.
        steps: Newton-Schulz iterations.
        adam: Patterns of names of matrices that the inner optimizer moves otherwise, as they were
            given to `muon_groups`.
        tables: Whether all parameters of two rows or more are matrices, embeddings and the head,
            too; a stack of matrices is one matrix then. Choose it for small vocabularies, as of
            letters, among more than two sites.

    Raises:
        ValueError: A value is out of range; or, from `og.distribute`, ``matrices=True`` is said of
            a vector.
    """

    needs_matrices = True
    """Shards of a matrix cannot be made orthonormal each by itself."""

    def __init__(
        self,
        params: Any,
        lr: float = 1.6,
        *,
        steps: int = STEPS,
        adam: Iterable[str] = (),
        tables: bool = False,
    ) -> None:
        rules = {"adam": tuple(adam), "tables": tables, "matrices": None, "stacked": False}
        super().__init__(params, {"lr": lr, "steps": steps, **rules})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, after checking its values."""
        super().add_param_group(param_group)
        check_last(self, _check)

    def regroup(
        self, model: nn.Module, copies: Mapping[nn.Parameter, nn.Parameter]
    ) -> list[nn.Parameter]:
        """Groups what has no rule yet as `muon_groups` groups the parameters of a model.

        `og.LocalSteps` calls it before the first step.

        Args:
            model: Model that is trained.
            copies: By the model's parameter, the one that this optimizer holds for it.

        Returns:
            Parameters whose mean change is made orthonormal.

        Raises:
            ValueError: ``matrices=True`` is said of a vector.
        """
        given, self.param_groups = self.param_groups, []
        for group in given:
            if group["tables"] or group["matrices"] is not None:
                self.param_groups.append(group)
                continue
            held = set(group.pop("params"))
            group.pop("param_names", None)
            for found in muon_groups(model, group["adam"]):
                params = [copies[p] for _, p in found["params"] if copies.get(p) in held]
                if params:
                    self.param_groups.append({**group, **found, "params": params})
        names = {copies[p]: name for name, p in model.named_parameters() if p in copies}
        matrices = [p for g in self.param_groups for p in g["params"] if _is_matrix(g, p)]
        for p in matrices:
            if p.dim() < 2:
                raise ValueError(
                    f"OuterMuon: {names[p]!r} is a vector in a group with matrices=True; put it "
                    f"into one with matrices=False"
                )
        return matrices

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # PyTorch says None or float
        """Moves the parameters that have a change."""
        loss = begin_step(self, closure)
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            for alike in of_one_shape([p for p in moved if _is_matrix(group, p)]):
                _move_matrices(group, alike)
            for p in moved:
                if not _is_matrix(group, p):
                    p.sub_(p.grad)
        return loss


def _is_matrix(group: Mapping[str, Any], p: Tensor) -> bool:
    return holds_matrices(p) if group["matrices"] is None else group["matrices"]


def _move_matrices(group: Mapping[str, Any], alike: list[Tensor]) -> None:
    changes = torch.stack([as_matrices(gradient(p), group["stacked"]) for p in alike])
    lengths = group["lr"] * largest_singular_value(changes)[..., None, None]
    for p, update in zip(alike, lengths * newton_schulz(changes, group["steps"]), strict=True):
        p.sub_(update.view(p.shape))


def largest_singular_value(matrix: Tensor) -> Tensor:
    """Returns the largest singular values of matrices (..., O, I), real (...), by power iterations.

    Each is at most the true one, and seldom less by more than a few percent: they begin with the
    longest row.
    """
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    longest = x.abs().square().sum(dim=-1, keepdim=True).argmax(dim=-2, keepdim=True)
    direction = x.take_along_dim(longest, dim=-2).mH  # (..., I, 1)
    tiny = torch.finfo(x.dtype).tiny
    length = torch.linalg.vector_norm(direction, dim=-2, keepdim=True)
    for _ in range(_ITERATIONS):
        image = x @ (direction / length.clamp_min(tiny))
        image = image / torch.linalg.vector_norm(image, dim=-2, keepdim=True).clamp_min(tiny)
        direction = x.mH @ image
        length = torch.linalg.vector_norm(direction, dim=-2, keepdim=True)
    return length[..., 0, 0]


def _check(group: Mapping[str, Any]) -> None:
    ranges = {
        "lr": (group["lr"] > 0, "more than 0"),
        "steps": (group["steps"] >= 1, "1 or more"),
    }
    check_ranges("OuterMuon", group, ranges)
