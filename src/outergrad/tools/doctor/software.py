"""Checks of what is installed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from outergrad.tools.doctor.findings import Finding, note, ok, problem

LEAST = {"python": "3.10", "torch": "2.11", "numpy": "1.26"}
"""Oldest versions that will do, as in pyproject.toml."""

EXTRAS = {
    "cli": (("typer", "rich", "sklearn", "psutil"), "the command line"),
    "bench": (("matplotlib",), "plots of `outergrad bench`"),
    "report": (("pandas", "plotly"), "reports of a run"),
    "tensorboard": (("tensorboard",), "runs in TensorBoard"),
}
"""Modules that each extra brings, and what they are for."""


def check_version(name: str, version: str | None) -> Finding:
    """Whether a version is new enough.

    Args:
        name: A key of `LEAST`.
        version: What is installed; None for nothing.
    """
    least = LEAST[name]
    remedy = f"install Python {least} or later" if name == "python" else _upgrade(name, least)
    if version is None:
        return problem(name, "is not installed", remedy)
    if _numbers(version) < _numbers(least):
        return problem(name, f"{version} is too old: {least} or later is needed", remedy)
    return ok(name, version)


def _upgrade(name: str, least: str) -> str:
    return f"pip install --upgrade '{name}>={least}'"


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def check_gloo(available: bool) -> Finding:
    """Whether this build of torch can exchange anything between processors."""
    if available:
        return ok("gloo", "available: this is what carries the exchange between sites")
    return problem(
        "gloo",
        "this build of torch has no gloo, which carries the exchange between sites",
        "install torch from pytorch.org or with pip",
    )


def check_gpus(names: Sequence[str], cuda: str | None, nccl: str | None) -> Finding:
    """What graphics processors torch sees; none are needed.

    Args:
        names: Of the devices.
        cuda: The version that torch is built for, if any.
        nccl: NCCL's version, if torch has it.
    """
    if names:
        carried = f"; NCCL {nccl}" if nccl else "; without NCCL"
        return ok("GPU", f"{_counted(names)}, CUDA {cuda}{carried}")
    if cuda:
        return note(
            "GPU",
            f"torch is built for CUDA {cuda} but sees no GPU: training runs on the processor",
            "if this machine has one, see whether `nvidia-smi` finds it",
        )
    return ok("GPU", "none, and none needed: training runs on the processor")


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def check_extras(has: Callable[[str], bool]) -> list[Finding]:
    """Which extras are installed, and what for.

    Args:
        has: Whether a module can be imported.
    """
    there = [name for name, (modules, _) in EXTRAS.items() if all(map(has, modules))]
    findings = [ok("extras", f"installed: {', '.join(there)}")] if there else []
    return findings + [
        note("extras", f"{name} is not installed: {use}", f"pip install 'outergrad[{name}]'")
        for name, (_, use) in EXTRAS.items()
        if name not in there
    ]
