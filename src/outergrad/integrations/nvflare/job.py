"""NVFLARE jobs that run a training script at every client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nvflare.job_config.api import FedJob

from outergrad.integrations.nvflare.server import GRACE_S, StarController
from outergrad.integrations.nvflare.site import StarExecutor


def star_job(
    name: str,
    script: str | os.PathLike[str],
    args: str = "",
    *,
    min_clients: int,
    mandatory_clients: Sequence[str] | None = None,
    grace_s: float = GRACE_S,
    min_sites: int | None = None,
    send_script: bool = True,
) -> FedJob:
    """Creates a job whose script trains with `og.distribute(..., transport=og.Star())`.

    Args:
        name: name of the job.
        script: file of the training script.
        args: arguments of the script, as in a shell; `%site%` stands for the name of the client.
        min_clients: number of clients that NVFLARE waits for. All connected ones then take part.
        mandatory_clients: names of clients that must be among them.
        grace_s: seconds for which a site may be away before the others are told that it is lost.
        min_sites: as in `og.Star`: number of scripts that must end without an error; all if None.
        send_script: whether the job brings the script. Otherwise every site has it at that full
            path, which needs no right to bring code.

    Returns:
        A job to export, to submit, or to run in the simulator.
    """
    job = FedJob(
        name=name,
        min_clients=min_clients,
        mandatory_clients=mandatory_clients and [*mandatory_clients],
    )
    job.job.set_app_packages(["outergrad"])  # it is installed everywhere, and not sent
    job.to_server(StarController(grace_s, min_sites))
    job.to_clients(StarExecutor(Path(script).name if send_script else str(script), args))
    if send_script:
        job.to_clients(str(script))
    return job
