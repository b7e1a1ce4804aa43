"""IPv6 in tests: whether there is any, and network namespaces that have nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress

import pytest

from outergrad.core.addresses import listen_at
from outergrad.launch.namespaces import INTERFACE


def _has_loopback() -> bool:
    with suppress(OSError), listen_at("::1"):
        return True
    return False


needs_ipv6 = pytest.mark.skipif(
    not _has_loopback(), reason="this machine has no IPv6: nothing can listen at ::1"
)


def address_of(place: int) -> str:
    """Returns the address that `add_ipv6` gives the namespace of this number."""
    return f"fd77::{place + 1}"


def add_ipv6(names: Sequence[str], alone: int | None = None) -> None:
    """Gives each namespace of `namespaces` an IPv6 address.

    Args:
        names: Of the namespaces.
        alone: Number of the first namespace that has no IPv4 any more; None if all keep it.
    """
    for place, name in enumerate(names):
        ip = ["ip", "-n", name, "addr"]
        if alone is not None and place >= alone:
            subprocess.run([*ip, "flush", "dev", INTERFACE], check=True)
        address = [f"{address_of(place)}/64", "dev", INTERFACE, "nodad"]  # there are no others
        subprocess.run([*ip, "add", *address], check=True)
