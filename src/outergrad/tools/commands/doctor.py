"""Command ``outergrad doctor``."""

import os
import sys
from typing import Annotated

import typer

from outergrad.launch.console import errors_in_one_line
from outergrad.launch.errors import RecipeError
from outergrad.launch.start import number_of_sites, under_torchrun
from outergrad.tools.doctor.course import check_alone, check_at_site, check_rehearsal
from outergrad.tools.doctor.meeting import PORT, meeting_at, meeting_from

Sites = Annotated[
    int | None,
    typer.Option(min=1, help="Number of sites; without --rank, local processes to start."),
]
Rank = Annotated[
    int | None, typer.Option(min=0, help="Which of the sites this is, from 0; needs no torchrun.")
]
Master = Annotated[
    str,
    typer.Option(help=f"Address of site 0, the same at every site: 10.0.0.1:{PORT}, [fd00::1]."),
]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds to wait for the other sites.")]


def doctor(
    sites: Sites = None, rank: Rank = None, master: Master = "", timeout: Timeout = 30
) -> None:
    """Check this machine and the connections between sites; suggest remedies.

    Alone it checks this machine; with --sites 2, two local processes besides.

    On several machines, run it on each, with --sites, --rank and --master.

    Under torchrun it needs no options, but torchrun itself waits until all have come.
    """
    with errors_in_one_line():
        if code := _check(sites, rank, master, timeout):
            sys.exit(code)


def _check(sites: int | None, rank: int | None, master: str, timeout_s: float) -> int:
    if rank is not None or master:
        if sites is None or rank is None or not master:
            raise RecipeError("--rank, --master and --sites go together: give all three")
        return check_at_site(meeting_at(master, rank, sites), timeout_s)
    if under_torchrun() and number_of_sites(sites) > 1:
        return check_at_site(meeting_from(os.environ), timeout_s)
    return check_alone() if (sites or 1) == 1 else check_rehearsal(sites or 1, timeout_s)
