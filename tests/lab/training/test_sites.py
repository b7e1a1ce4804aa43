from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from forked import forked_processes
from outergrad.launch.errors import RecipeError
from outergrad.launch.start import run_sites
from outergrad_lab.training.job import Job
from outergrad_lab.training.sites import mean_over_sites, prepare_together, smallest_over_sites


def fail(message: str) -> None:
    raise RecipeError(message)


def test_a_mistake_of_all_sites_is_told_as_it_is(one_site):
    with pytest.raises(RecipeError, match=r"^no data"):
        prepare_together(Job(), partial(fail, "no data"))
    assert prepare_together(Job(), lambda: 3) == 3


def agreements() -> None:
    """What two sites must agree on, checked at both."""
    site, job = dist.get_rank(), Job()
    assert mean_over_sites(torch.tensor([1.0, 2.0]) * site).tolist() == [0.5, 1.0]
    assert smallest_over_sites(5 - site) == 4
    with pytest.raises(RecipeError, match="--epochs is 9 at site 1 but 5 at site 0"):
        prepare_together(replace(job, epochs=9) if site else job, lambda: site)
    with pytest.raises(RecipeError, match=r"^site 1: no data"):
        prepare_together(job, partial(fail, "no data") if site else lambda: site)
    assert prepare_together(job, lambda: site) == site


@pytest.mark.slow
def test_two_sites_agree_or_fail_alike():
    with forked_processes():
        run_sites(agreements, 2)
