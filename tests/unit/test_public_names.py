"""``import outergrad`` is quick: names are imported when they are used, and nothing heavy is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import outergrad as og

HEAVY = {
    "cryptography",
    "grpc",
    "matplotlib",
    "outergrad.integrations",
    "outergrad.launch",
    "outergrad.tools",
    "outergrad_lab",
    "pandas",
    "plotly",
    "psutil",
    "rich",
    "sklearn",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "typer",
    "wandb",
}

FIRST_SESSION = """
import torch, torch.distributed as dist, outergrad as og
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
og.distribute(torch.nn.Linear(4, 4)).detach()
dist.destroy_process_group()
"""
NOT_BY_DEFAULT = {
    "outergrad.linalg.compress",
    "outergrad.methods.edad",
    "outergrad.methods.low_rank",
    "outergrad.methods.powersgd",
    "outergrad.methods.rank_dad",
    "outergrad.methods.schedule",
    "outergrad.methods.sparse",
    "outergrad.session.local_steps",
    "outergrad.session.mesh.topology",
    "outergrad.star.line",
}
FILES_BY_DEFAULT = 246
"""Of the package, at most, until a first model is distributed; before this held, 278."""


def loaded_by(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_import_alone_loads_not_even_pytorch():
    loaded = loaded_by("import outergrad")
    assert "outergrad" in loaded
    assert not loaded & {"torch", "numpy", *HEAVY}


def test_a_training_loads_nothing_heavy():
    loaded = loaded_by("import outergrad as og; og.distribute, og.RankDAD, og.JSONL, og.Star")
    assert {"torch", "outergrad.session.attach"} <= loaded
    assert not loaded & HEAVY


def test_a_first_session_loads_what_its_method_needs():
    loaded = loaded_by(FIRST_SESSION)
    own = {name for name in loaded if name.partition(".")[0] == "outergrad"}
    assert "outergrad.methods.auto.chooser" in own
    assert not loaded & {*HEAVY, *NOT_BY_DEFAULT}
    assert len(own) <= FILES_BY_DEFAULT


def test_every_public_name_is_there_and_is_what_type_checkers_read():
    names: dict[str, object] = {}
    for node in ast.walk(ast.parse(Path(og.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outergrad"):
            found: dict[str, object] = {}
            exec(ast.unparse(node), found)
            names |= {alias.name: found[alias.name] for alias in node.names}
    assert {*names} == {*og.__all__}
    assert all(getattr(og, name) is value for name, value in names.items())
    assert {*og.__all__} <= {*dir(og)}


def test_a_misspelt_name_is_an_attribute_error_that_knows_the_names():
    with pytest.raises(AttributeError, match="has no attribute 'RankDad'") as raised:
        _ = og.RankDad
    assert "RankDAD" in dir(raised.value.obj)  # from which Python makes its "did you mean"
