r"""What it costs that all sites vote on a step: the same steps with votes and without, in turns.

    python benchmarks/vote.py --workloads mlp,gru,cnn --methods dad,rank-dad-4,dense

Two local sites, blocks of `--block` steps. The table shows the median time of a step without votes
and the median over the rounds of the time that votes add, also in parts of the step. There is no
link in between; one adds the time that a small message takes to the other side.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist
from compiled import Side

from outergrad.launch.start import run_sites
from outergrad.messages.wire import State
from outergrad.step import step as _step
from outergrad.step.commit import Ballot, Decision


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
        "| workload | method | ms without votes | votes add, ms | of the step |",
        "|---" * 5 + "|",
    ]
    for workload in options.workloads:
        for method in options.methods:
            rows.append(f"| {workload} | {method} | {_row(workload, method, options)} |")
    if dist.get_rank() == 0:
        print(*rows, sep="\n")


def _row(workload: str, method: str, options: argparse.Namespace) -> str:
    side = Side(workload, method, "uncompiled")
    side.seconds(5)  # the second plan
    taken: dict[type[Ballot], list[float]] = {Ballot: [], OwnVote: []}
    for number in range(options.rounds):
        for ballot in list(taken) if number % 2 else reversed(taken):
            _step.Ballot = ballot
            taken[ballot].append(side.seconds(options.block))
    side.close()
    _step.Ballot = Ballot
    voting, without = (torch.tensor(taken[ballot]) for ballot in (Ballot, OwnVote))
    added = voting - without
    share = (added / without).median().item()
    return f"{1e3 * without.median():.1f} | {1e3 * added.median():.2f} | {share:+.1%}"


if __name__ == "__main__":
    run_sites(partial(compare, parse()), 2)
