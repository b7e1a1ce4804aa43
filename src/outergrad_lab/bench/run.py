"""Runs a plan on one link after another."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psutil
import torch

from outergrad._amounts import many
from outergrad.launch.links import ShapedLink, places
from outergrad.launch.machine import cores, describe
from outergrad.launch.processes import run_processes
from outergrad.tools.plan.subject import subject, try_step
from outergrad_lab.bench.combine import arrivals, timings
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.results import LinkResult, Results
from outergrad_lab.bench.site import Found, run_site

COPIES = 6
"""Copies of the parameters that a method holds at most: gradients, buckets, error feedback."""


def bench(
    plan: Plan,
    links: Sequence[ShapedLink],
    command: list[str],
    done: Callable[[Results, LinkResult], None],
    *,
    verbose: bool = False,
    shown: bool = True,
) -> Results:
    """Measures a plan on every link.

    Args:
        plan: Settings of the benchmark.
        links: Links, one after another.
        command: The command line, to be kept with the results.
        done: Called after each link with all results so far and those of that link.
        verbose: Whether a failure includes its traceback.
        shown: Whether there is a bar.

    Raises:
        RecipeError: The user made a mistake.
        SiteError: A site failed; the others have been ended.
    """
    parameters = count_parameters(plan)
    results = Results(
        about=describe(command),
        plan={name: value for name, value in asdict(plan).items() if name != "data_dir"},
        parameters=parameters,
        notes=notes(plan, links),
        links=[],
    )
    keep = fits(plan, parameters)
    for link in links:
        results.links.append(measure_link(plan, link, keep, verbose, shown))
        done(results, results.links[-1])
    return results


def measure_link(
    plan: Plan, link: ShapedLink, keep: bool, verbose: bool, shown: bool
) -> LinkResult:
    """Runs a process per site, each at its place, and combines their measurements."""
    # Otherwise gloo warns that the addresses of a namespace have no host names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with (
        places(plan.sites, link) as sites,
        tempfile.TemporaryDirectory(prefix="outergrad-") as folder,
    ):
        works = [
            partial(run_site, plan, link, place, Path(folder), site, keep, shown=shown)
            for site, place in enumerate(sites)
        ]
        return _result(plan, link, run_processes(works, verbose=verbose))


def _result(plan: Plan, link: ShapedLink, found: list[Found]) -> LinkResult:
    return LinkResult(
        link=link.name,
        rate_bit_per_s=link.rate_bit_per_s,
        rtt_s=link.rtt_s,
        loopback=link.loopback,
        probe=found[0].probe,
        data=found[0].data,
        timings=timings(found),
        arrivals=arrivals(found, plan.until_loss) if plan.until_loss else [],
    )


def count_parameters(plan: Plan) -> int:
    """Returns the number of the model's parameters, of a workload without allocating them.

    Raises:
        RecipeError: The user's own model cannot be built, or fails on its inputs.
    """
    if plan.recipe is None:
        own = subject(plan.workload, plan.rows)
        try_step(own)
        return sum(parameter.numel() for parameter in own.model.parameters())
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in plan.recipe.build().parameters())


def fits(plan: Plan, parameters: int) -> bool:
    """True if the models of all methods and sites fit in half of the free memory at once."""
    needed_bytes = 4 * parameters * COPIES * len(plan.methods) * plan.sites
    return plan.until_loss is not None or 2 * needed_bytes < psutil.virtual_memory().available


def notes(plan: Plan, links: Sequence[ShapedLink]) -> list[str]:
    """Returns caveats about the figures."""
    said = []
    wanted, there = plan.sites * plan.threads, cores()
    if wanted > there:
        said.append(
            f"{plan.sites} sites with {many(plan.threads, 'thread')} each share "
            f"{many(there, 'core')}: "
            "seconds are longer than on machines of their own, bytes are the same"
        )
    if any(link.loopback for link in links):
        said.append(
            "loopback is not shaped, and its bytes are those of every program on this machine, "
            "divided by the sites"
        )
    return said
