r"""What it costs that all sites vote: steps without votes, with late ones and waited for, in turns.

    python benchmarks/vote.py --workloads mlp,gru,cnn --methods dad,rank-dad-4,dense

Two local sites, blocks of `--block` steps. The table shows the median time of a step without votes
and the median over the rounds of the time that votes add, in ms and in parts of the step: one
for sixteen steps, as the library does it, and those that every site waits for. There is no link
in between; one adds the time that a small message takes to the other side, where sites wait.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from compiled import Side

from outergrad.commit.ballot import Ballot, Decision
from outergrad.launch.start import run_sites
from outergrad.messages.wire import State
from outergrad.step import step as _step
from outergrad.step.step import SharedStep


class OwnVote(Ballot):
    """Counts this site's own vote alone."""

    def cast(self, state: State, param: str | None = None) -> None:
        """Nothing is sent."""

    def count(self) -> Decision:
        """As if the others agreed."""
        return Decision(self._vote.verdict, self._vote)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["mlp"])
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=["dense", "dad", "rank-dad-4"]
    )
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=31)
    return parser.parse_args()


def compare(options: argparse.Namespace) -> None:
    """What each site does; site 0 prints."""
    rows = [
        "| workload | method | ms without votes | late ones add | of the step "
        "| waited for | of the step |",
        "|---" * 7 + "|",
    ]
    for workload in options.workloads:
        for method in options.methods:
            rows.append(f"| {workload} | {method} | {_row(workload, method, options)} |")
    if dist.get_rank() == 0:
        print(*rows, sep="\n")


def _row(workload: str, method: str, options: argparse.Namespace) -> str:
    side = Side(workload, method, "uncompiled")
    side.seconds(5)  # the second plan
    taken: dict[str, list[float]] = {"none": [], "late": [], "waited for": []}
    for number in range(options.rounds):
        for votes in list(taken) if number % 2 else reversed(taken):
            with _voting(votes):
                taken[votes].append(side.seconds(options.block))
    side.close()
    found = {votes: torch.tensor(seconds) for votes, seconds in taken.items()}
    without, columns = found.pop("none"), []
    for seconds in found.values():
        added = seconds - without
        columns += [f"{1e3 * added.median():.2f}", f"{(added / without).median().item():+.1%}"]
    return " | ".join([f"{1e3 * without.median():.1f}", *columns])


@contextmanager
def _voting(votes: str) -> Iterator[None]:
    """Sites vote so in the steps inside."""
    optimistic = SharedStep._may_be_optimistic
    _step.Ballot = OwnVote if votes == "none" else Ballot
    if votes != "late":
        SharedStep._may_be_optimistic = lambda step: False
    try:
        yield
    finally:
        _step.Ballot, SharedStep._may_be_optimistic = Ballot, optimistic


if __name__ == "__main__":
    run_sites(partial(compare, parse()), 2)
