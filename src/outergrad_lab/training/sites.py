"""Small agreements between the sites of a process group, the default group if none is given."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from outergrad.launch.errors import RecipeError
from outergrad_lab.training.job import Job, option

T = TypeVar("T")


Group = dist.ProcessGroup | None


def rank_in(group: Group) -> int:
    """Returns the rank of this site."""
    return dist.get_rank() if group is None else group.rank()


def number_in(group: Group, present: Sequence[int] | None = None) -> int:
    """Returns the number of this site, by which it has its rows; its rank, if all are present."""
    rank = rank_in(group)
    return rank if present is None else present[rank]


def sites_of(group: Group) -> int:
    """Returns the number of sites."""
    return dist.get_world_size() if group is None else group.size()


def mean_over_sites(values: Tensor, group: Group = None) -> Tensor:
    """Averages a tensor of the same shape at every site."""
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total / sites_of(group)


def smallest_over_sites(value: int, group: Group = None) -> int:
    """Returns the smallest of the numbers that the sites hold."""
    smallest = torch.tensor(value)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    return int(smallest)


def prepare_together(job: Job, prepare: Callable[[], T], group: Group = None) -> T:
    """Prepares a job at every site, or fails at every site alike.

    Args:
        job: The job, as given to this site.
        prepare: What this site does before it may start.
        group: The sites.

    Returns:
        The result of ``prepare``.

    Raises:
        RecipeError: The same one everywhere: jobs differ, or a site cannot prepare.
    """
    prepared, mistake = _attempt(prepare)
    told: list[tuple[Job, str | None]] = [(job, None)] * sites_of(group)
    dist.all_gather_object(told, (job, mistake), group=group)
    jobs, mistakes = zip(*told, strict=True)
    _check_same(jobs)
    _check_none(mistakes)
    assert prepared is not None
    return prepared


def _attempt(prepare: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return prepare(), None
    except RecipeError as error:
        return None, str(error)


def _check_same(jobs: Sequence[Job]) -> None:
    for site, job in enumerate(jobs):
        name = jobs[0].first_difference(job)
        if name:
            raise RecipeError(
                f"{option(name)} is {getattr(job, name)!r} at site {site} but "
                f"{getattr(jobs[0], name)!r} at site 0: start all sites alike"
            )


def _check_none(mistakes: Sequence[str | None]) -> None:
    for site, mistake in enumerate(mistakes):
        if mistake:
            everywhere = set(mistakes) == {mistake}
            raise RecipeError(mistake if everywhere else f"site {site}: {mistake}")
