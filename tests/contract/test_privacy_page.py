"""docs/privacy.md says of each method what sessions say: what each other site learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.trace import Tracer
from outergrad.core.types import Link
from outergrad.session.attach import attach

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"
LINK = Link(delay_s=1e-3, bytes_per_s=1e9)
METHODS = {
    "`og.Dense()`, and what travels dense with any method": og.Dense(),
    "`og.DAD()`": og.DAD(always=True),
    '`og.DAD(reveal="activations")`': og.DAD(always=True, reveal="activations"),
    "`og.RankDAD()` that gathers or merges": og.RankDAD(rank=1, reduce="gather"),
    '`og.RankDAD(reduce="all_reduce")` or `"alternate"`, `og.PowerSGD()`': og.RankDAD(
        rank=1, reduce="all_reduce"
    ),
    "`og.Sparse()`": og.Sparse(density=0.01, always=True),
    '`og.Sparse(select="random")`': og.Sparse(density=0.01, select="random", always=True),
    '`og.Sparse(select="random", wire=og.wire.Sign())`, or a like codec, gathered or merged': (
        og.Sparse(density=0.01, select="random", wire=og.wire.Sign(), always=True)
    ),
    "an embedding with `og.DAD()`, or with `og.RankDAD()` that gathers or merges": og.DAD(
        always=True
    ),
    "`og.Local()`": og.PerLayer({"0.*": og.Local(), "*": og.Dense()}),
}
OTHERWISE = {  # of the words of these rows another test or sentence answers
    "`og.EDAD()`",
    "`og.LocalSteps(k, method=...)`",
    "`og.LocalSteps(k, method=..., quorum=...)`",
}


def table() -> dict[str, tuple[str, str]]:
    """What the page says of two and of more sites, by the first column."""
    text = PAGE.read_text()
    lines = text[text.index("| method | each other site learns") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    return {
        method: (two, two if more == "the same" else more)
        for method, two, more in ([cell.strip("| ") for cell in row] for row in rows)
    }


def test_every_row_of_the_page_is_known_here():
    assert table().keys() == METHODS.keys() | OTHERWISE


def learnt(method, sites, model, x) -> str:
    session = attach(model, method, MirrorComm(sites, Tracer()), LINK)
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
    found = next(one for one in session.coverage() if one.parameter in ("weight", "0.weight"))
    session.detach()
    return found.reveals


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("row", METHODS)
def test_the_page_says_what_sessions_say(row, more):
    if row.startswith("an embedding"):
        model, x = nn.Embedding(500, 40), torch.arange(6)
    else:
        layers = [nn.Linear(200, 100, bias=False), nn.Linear(100, 9)]
        model, x = nn.Sequential(*layers), torch.randn(3, 200)
    for other in (METHODS[row], *([og.PowerSGD(rank=1)] if "PowerSGD" in row else [])):
        assert learnt(other, 3 if more else 2, model, x) == table()[row][more]
