"""Tools that trace, copy, save or watch a model while it is distributed, on one site of several."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import outergrad as og
from covering import covering
from loops import METHODS, batch, loss_of, net
from ranks import run_on_lasting_groups

pytestmark = [
    pytest.mark.usefixtures("large_matrices"),
    pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*deprecated"),
]

SITES, STEPS = 2, 4
WITHIN = (1, 3)
"""Steps between whose forward and backward site 1 uses the tool."""


def assert_same(found: Any, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x))


def jit_trace(model, x):
    assert_same(torch.jit.trace(model, x), model, x)


def add_graph(model, x, folder):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(folder)) as writer:
        writer.add_graph(model, x)


def jit_script_of_a_copy(model, x):
    with pytest.raises(RuntimeError, match=r"copy\.deepcopy\(model\).*session\.detach\(\)"):
        torch.jit.script(model)
    assert_same(torch.jit.script(copy.deepcopy(model)), model, x)


def export(model, x):
    program = torch.export.export(model, (x,))
    assert "outergrad" not in str(program.graph)
    assert_same(program.module(), model, x)


def strict_export(model, x):
    program = torch.export.export(model, (x,), strict=True)
    assert "outergrad" not in str(program.graph)
    assert_same(program.module(), model, x)


def fx_symbolic_trace(model, x):
    traced = torch.fx.symbolic_trace(model)
    assert [node.name for node in traced.graph.nodes if node.op == "placeholder"] == ["x"]
    assert_same(traced, model, x)


def make_fx_of_it(model, x):
    assert_same(make_fx(model)(x), model, x)


def fake_tensors(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == (len(x), 12)


def deep_copy(model, x):
    twin = copy.deepcopy(model)
    assert type(twin) is type(net())
    loss_of(twin, x).backward()


def save(model, x):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=False), model, x)
    assert_same(pickle.loads(pickle.dumps(model)), model, x)


def quantize(model, x):
    torch.ao.quantization.quantize_dynamic(model)(x)


def share_memory(model, x):
    model.share_memory()


def count_flops(model, x):
    totals = []
    for counted in (model, copy.deepcopy(model)):
        with torch.no_grad(), FlopCounterMode(display=False) as flops:
            counted(x)
        totals.append(flops.get_total_flops())
    assert totals[0] == totals[1] > 0


def look_by_hooks(model, x):
    seen = []
    look = lambda module, inputs, output: seen.append(output.shape)  # noqa: E731
    handles = [module.register_forward_hook(look) for module in model.modules()]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    assert len(seen) > 4


def per_sample_gradients(model, x):
    given = {name: p.detach() for name, p in model.named_parameters()}
    one = grad(lambda p, row: functional_call(model, p, (row,)).sum())
    found = vmap(one, in_dims=(None, 0))(given, x)
    assert all(g.shape[0] == len(x) for g in found.values())


def ensemble(model, x):
    stack_module_state([copy.deepcopy(model), copy.deepcopy(model)])


def read_signature(model, x):
    assert list(inspect.signature(model.forward).parameters) == ["x"]


TOOLS = [
    jit_trace,
    jit_script_of_a_copy,
    export,
    fx_symbolic_trace,
    make_fx_of_it,
    fake_tensors,
    deep_copy,
    save,
    quantize,
    share_memory,
    count_flops,
    look_by_hooks,
    ensemble,
    read_signature,
]


def train(method, tool, **settings):
    """Gradients of every step and the bytes that it sent, of both sites."""
    together = threading.Barrier(SITES)  # some tools change PyTorch for all threads of a process

    def body(site, group):
        model, found = net(), []
        session = og.distribute(model, method, group=group, **settings)
        for step in range(STEPS):
            model.zero_grad()
            loss = loss_of(model, batch(site, step))
            together.wait()
            if site == 1 and step in WITHIN:
                tool(model, batch(9, step, rows=2))
            together.wait()
            loss.backward()
            found.append(([p.grad for p in model.parameters()], session.stats().sent_bytes))
        session.detach()
        return found

    def checked(site, group):
        try:
            return body(site, group)
        except threading.BrokenBarrierError:
            raise TimeoutError("timed out, since the other site raised") from None
        except BaseException:
            together.abort()
            raise

    return run_on_lasting_groups(SITES, checked)


@cache
def trained_without(label, **settings):
    return train(METHODS[label], lambda model, x: None, **settings)


def assert_undisturbed(label, tool, **settings):
    expected = trained_without(label, **settings)
    for ours, theirs in zip(train(METHODS[label], tool, **settings), expected, strict=True):
        for (found, sent), (gradients, sent_then) in zip(ours, theirs, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(found, gradients, strict=True))
            assert sent == sent_then


@pytest.mark.parametrize(("tool", "label"), covering(TOOLS, ["dad", "edad"], quick=4, every=2))
def test_training_goes_on_to_the_bit(tool, label):
    assert_undisturbed(label, tool)


@pytest.mark.parametrize("tool", [jit_trace, export, fx_symbolic_trace], ids=lambda t: t.__name__)
def test_samples_of_a_trace_are_not_counted(tool):
    assert_undisturbed("dad", tool, weighting="samples")


def test_the_graph_of_tensorboard(tmp_path):
    assert_undisturbed("edad", lambda model, x: add_graph(model, x, tmp_path))


@pytest.mark.slow
def test_strict_export():
    for label in ("dad", "edad"):
        assert_undisturbed(label, strict_export)


@pytest.mark.parametrize("label", METHODS)
def test_per_sample_gradients_leave_the_step_exact(label):
    """They change no gradient; which layers are tapped in this step they may."""

    def body(site, group):
        model = net()
        session = og.distribute(model, METHODS[label], group=group)
        if site == 1:
            per_sample_gradients(model, batch(9, 0))
        loss_of(model, batch(site, 0)).backward()
        session.detach()
        return [p.grad for p in model.parameters()]

    model = net().double()
    for site in range(SITES):
        (loss_of(model, batch(site, 0).double()) / SITES).backward()
    for gradients in run_on_lasting_groups(SITES, body):
        for p, q in zip(gradients, model.parameters(), strict=True):
            assert (p.double() - q.grad).norm() < 2e-5 * q.grad.norm().clamp(min=1e-3)
