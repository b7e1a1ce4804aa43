"""The tests of DistributedDataParallel that PyTorch's wheel ships, run by ranks without GPUs.

`torch.testing._internal.distributed.distributed_test` moves nearly all of them to GPUs, also where
nothing in them needs one. Their source is read from the installed wheel and changed as it is
compiled: `.cuda()` leaves a tensor where it is, and a rank's number as a device means the CPU. A
test runs when it passes with PyTorch's own `DistributedDataParallel` in this form.

    python torch_tests_on_cpus.py RANK WORLD_SIZE FOLDER [KIT HUB]

reads lines `{"test": ..., "method": ...}` and answers each with `{"error": ...}`, null
if it passed. With a kit and the address of a hub, the group is not gloo's, but the star's.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import inspect
import json
import os
import random
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ddp
import sync_norms_on_cpus
import torch
import torch.distributed as dist

SOURCE = "torch.testing._internal.distributed.distributed_test"
_BASE = "_DistTestBase"
TIMEOUT_S = 60
"""Of the group, also until the slower process has begun."""
_INSIDE = {
    "_get_ddp_logging_data",
    "_set_ddp_runtime_logging_sample_rate",
    "bucket_indices",
    "ddp_logging_data",
    "grad_ready_order",
    "join_config",
    "local_used_map",
    "reducer",
    "sync_bn_logged",
    "variable_usage_tensor",
}
"""What a statement speaks of that is left out: the reducer, log entries, who joins whom."""
_TORCHS_OWN = torch.nn.parallel.DistributedDataParallel
import_module("outergrad.capture.wrappers")  # which looks for PyTorch's own class, not for the shim


def main(rank: int, world_size: int, folder: Path, kit: str = "", hub: str = "") -> None:
    """Runs the tests that standard input names, one after the other."""
    address = f"star://{kit}?hub={hub}" if kit else ""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "INIT_METHOD": f"file://{folder}",
        "TEMP_DIR": str(folder),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    }
    sync_norms_on_cpus.install()
    tests = adapted()
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        about = (rank, world_size, folder / f"store-{number}", address)
        error = _run(tests, *about, **asked)
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


def all_tests() -> list[str]:
    """Names of all tests, of collectives and of DDP."""
    return [name for name in _said() if name.startswith("test_")]


def of_ddp() -> list[str]:
    """Names of the tests that make a DistributedDataParallel, themselves or by their helpers."""
    said = _said()
    found = {name for name, names in said.items() if "DistributedDataParallel" in names}
    while more := {name for name in said.keys() - found if said[name] & found}:
        found |= more
    return [name for name in said if name in found and name.startswith("test_")]


def _said() -> dict[str, set[str]]:
    """The names in every function of the tests, by its own name."""
    source = Path(find_spec(SOURCE).origin).read_text()  # type: ignore[union-attr, arg-type]
    base = next(n for n in ast.walk(ast.parse(source)) if getattr(n, "name", "") == _BASE)
    return {f.name: _names_in(f) for f in base.body if isinstance(f, ast.FunctionDef)}  # type: ignore[attr-defined]


def adapted() -> types.ModuleType:
    """PyTorch's tests as a module, with CPUs in place of GPUs."""
    path = Path(find_spec(SOURCE).origin)  # type: ignore[union-attr, arg-type]
    tree = ast.fix_missing_locations(_OnCPUs().visit(ast.parse(path.read_text())))
    module = types.ModuleType("distributed_test_on_cpus")
    sys.modules[module.__name__] = module  # pickles look for classes there
    vars(module).update(_device=_device, _moved=_moved, __file__=str(path))
    exec(compile(tree, path, "exec"), vars(module))
    return module


class _OnCPUs(ast.NodeTransformer):
    """Moves nothing to GPUs, and leaves out statements about the inside of PyTorch's class."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return ast.Pass() if _is_inside(node) else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if _is_inside(node) else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if _is_inside(node.test) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords = [k for k in node.keywords if k.arg not in ("device_ids", "output_device")]
        for keyword in node.keywords:
            if keyword.arg == "device":
                keyword.value = _calls("_device", keyword.value)
        function = node.func
        if isinstance(function, ast.Attribute):
            if function.attr == "cuda":
                return function.value
            if function.attr in ("set_device", "synchronize"):  # of torch.cuda
                return ast.Constant(None)
            if function.attr == "current_device":
                return ast.Constant(0)
            if function.attr == "to" and len(node.args) == 1 and not node.keywords:
                return _calls("_moved", function.value, node.args[0])
            if function.attr == "device" and len(node.args) == 1 and not node.keywords:
                return _calls("_device", node.args[0])
        return node


def _names_in(node: ast.AST) -> set[str]:
    return {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(node)}


def _is_inside(node: ast.AST) -> bool:
    return not _names_in(node).isdisjoint(_INSIDE)


def _calls(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _device(device: Any) -> torch.device:
    return torch.device("cpu") if isinstance(device, int) else _no_gpu(torch.device(device))


def _no_gpu(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cuda" else device


def _moved(thing: Any, to: Any) -> Any:
    if isinstance(to, int | str | torch.device):
        to = _device(to)
    return thing.to(to)


def _run(
    tests: types.ModuleType,
    rank: int,
    world_size: int,
    store: Path,
    address: str,
    test: str,
    method: str,
) -> str | None:
    """Runs one test of the group's ranks; returns what went wrong."""
    instead: Any = _TORCHS_OWN if method == "ddp" else ddp.by(method)
    places = (torch.nn.parallel, torch.nn.parallel.distributed, tests)
    for place in places:
        vars(place)["DistributedDataParallel"] = instead
    limit = timedelta(seconds=TIMEOUT_S)
    if address:
        name = import_module("outergrad.star.backend").NAME
        vars(tests)["BACKEND"] = name
        dist.init_process_group(name, init_method=address, timeout=limit)
    else:
        group = dist.FileStore(str(store), world_size)
        about = {"rank": rank, "world_size": world_size, "timeout": limit}
        dist.init_process_group("gloo", store=group, **about)
    faulthandler.dump_traceback_later(2 * TIMEOUT_S, exit=True)
    try:
        torch.manual_seed(0)
        random.seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _test(tests, rank, world_size, store, test)()
        return None
    except BaseException as error:  # a test that is left out exits
        return "".join(traceback.format_exception(error))[-6000:]
    finally:
        faulthandler.cancel_dump_traceback_later()
        instead_of = _TORCHS_OWN
        for place in places:
            vars(place)["DistributedDataParallel"] = instead_of
        with contextlib.suppress(Exception):
            ddp.detach_all()
        dist.destroy_process_group()


def _test(
    tests: types.ModuleType, rank: int, world_size: int, store: Path, name: str
) -> Callable[[], None]:
    """A test as it stands under its decorators, which would leave it out without GPUs."""
    from torch.testing._internal.common_utils import TestCase

    function = inspect.unwrap(getattr(tests.DistributedTest._DistTestBase, name))
    body: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "file_name": f"{store}.tests",
        "init_method": f"file://{store}.tests",
        "_barrier": lambda self, *_, **__: dist.barrier(),
        name: function,
    }
    case = type("Ranked", (TestCase, tests.DistributedTest._DistTestBase), body)
    return getattr(case(name), name)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory():
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
