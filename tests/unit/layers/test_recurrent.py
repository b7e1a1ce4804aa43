"""Recurrent layers: the outputs of PyTorch's own, and the gradients that autograd finds there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import outergrad as og
from outergrad.core.types import Call
from outergrad.layers import rule_for

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")

LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "gru without bias": (nn.GRU, {"bias": False, "num_layers": 2}),
    "gru both ways": (nn.GRU, {"bidirectional": True, "num_layers": 3, "batch_first": True}),
    "lstm": (nn.LSTM, {}),
    "lstm without bias": (nn.LSTM, {"bias": False, "batch_first": True}),
    "lstm both ways": (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
    "projected": (nn.LSTM, {"proj_size": 3, "batch_first": True}),
    "projected both ways": (
        nn.LSTM,
        {"proj_size": 2, "bidirectional": True, "num_layers": 2, "bias": False},
    ),
}
LENGTHS = {
    "packed": [6, 6, 4, 1],
    "packed unsorted": [2, 6, 1, 6],
    "packed equal": [6] * 4,
    "packed one": [5],
}
SHAPES = {"batch": (6, 4), "unbatched": (6,), "one step": (1, 4), "no sequences": (6, 0)}
FORMS = [*SHAPES, *LENGTHS]


class Capture(torch.autograd.Function):
    """What a tap does, for one process: the factors of every slot are multiplied at once."""

    @staticmethod
    def forward(ctx, y, a, taken, slot, *params):
        ctx.save_for_backward(a)
        ctx.taken, ctx.slot = taken, slot
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx, delta):
        ctx.taken.add(ctx.slot, Call(ctx.saved_tensors[0], delta))
        return delta, *(None for _ in ctx.needs_input_grad[1:])


class Tapped:
    """A module computed by its rule; the gradients of its parameters by name, from factors."""

    def __init__(self, module: nn.RNNBase) -> None:
        self.module, self.rule = module, og.RULES[type(module)]
        self.slots = self.rule.slots(module, "")
        self.gradients = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        self.rows = [0] * len(self.slots)

    def __call__(self, *args: Any) -> Any:
        return self.rule.forward(self.module, self._tap, *args)

    def add(self, slot: int, call: Call) -> None:
        factors, here = self.rule.factors(self.module, slot, call), self.slots[slot]
        self.rows[slot] += factors.d_GRO.shape[1]
        self.gradients[here.weight] += (factors.d_GRO.mT @ factors.a_GRI)[0]
        if here.bias is not None:
            self.gradients[here.bias] += factors.d_GRO.sum((0, 1))

    def _tap(self, y: Tensor, a: Tensor, slot: int = 0, **_: Any) -> Tensor:
        params = [self.module.get_parameter(name) for name in self.slots[slot].params]
        return Capture.apply(y, a, self, slot, *params)


def build(name: str, **more: Any) -> nn.RNNBase:
    kind, options = LAYERS[name]
    return kind(5, 4, **{**options, **more}).double()


def leaves(module: nn.RNNBase, form: str, given: bool = True) -> list[Tensor]:
    """The input and, if they are given, the first states."""
    lengths, first = LENGTHS.get(form), module.batch_first
    shape = (max(lengths), len(lengths)) if lengths else SHAPES[form]
    turned = first and len(shape) == 2
    widths = [module.proj_size or module.hidden_size, module.hidden_size]
    widths = widths[: given * (2 if isinstance(module, nn.LSTM) else 1)]
    shapes = [(*(reversed(shape) if turned else shape), 5)]
    shapes += [(len(module.all_weights), *shape[1:], width) for width in widths]
    return [torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes]


def arguments(module: nn.RNNBase, form: str, x: Tensor, *states: Tensor) -> tuple[Any, ...]:
    """What the module is called with."""
    sequence: Any = x
    if form in LENGTHS:
        options = {"batch_first": module.batch_first, "enforce_sorted": False}
        sequence = pack_padded_sequence(x, LENGTHS[form], **options)
    if not states:
        return (sequence,)
    return sequence, states if isinstance(module, nn.LSTM) else states[0]


def flat(output: tuple[Any, Any]) -> list[Tensor]:
    """The output and the last states."""
    y, last = output
    y = y.data if isinstance(y, PackedSequence) else y
    return [y, last] if isinstance(last, Tensor) else [y, *last]


def loss(outputs: list[Tensor]) -> Tensor:
    """Another weight for every element."""
    weights = [torch.linspace(-1, 2, t.numel()).to(t.dtype).view(t.shape) for t in outputs]
    return sum((t * w + t.square()).sum() for t, w in zip(outputs, weights, strict=True))


def gradients(call: Any, module: nn.RNNBase, form: str, inputs: list[Tensor], used=slice(None)):
    """Outputs, and the gradients of a loss of the used ones by inputs."""
    copies = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = flat(call(*arguments(module, form, *copies)))
    loss(outputs[used]).backward()
    return outputs, [torch.zeros_like(t) if t.grad is None else t.grad for t in copies]


def own_gradients(module: nn.RNNBase) -> dict[str, Tensor]:
    """What autograd has left in the parameters."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
    }


def compare(module: nn.RNNBase, form: str, given: bool = True, used=slice(None)) -> Tapped:
    """That a module and its rule agree on everything."""
    tapped, inputs = Tapped(module), leaves(module, form, given)
    torch.manual_seed(3)
    expected = gradients(module, module, form, inputs, used)
    torch.manual_seed(3)
    found = gradients(tapped, module, form, inputs, used)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(tapped.gradients, own_gradients(module), **close)
    for output, own in zip(found[0], expected[0], strict=True):
        assert output.stride() == own.stride()
    return tapped


@pytest.mark.parametrize("given", [True, False], ids=["given", "zeros"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_autograd(name, form, given):
    compare(build(name), form, given)


@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_that_nobody_uses_count_for_nothing(name, used):
    module = build(name)
    if used < 2 or isinstance(module, nn.LSTM):
        compare(module, "packed unsorted", used=slice(used, used + 1))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["batch", "packed unsorted"])
@pytest.mark.parametrize("name", ["relu", "gru both ways", "projected both ways"])
def test_dropout_draws_what_the_module_draws(name, form, training):
    compare(build(name, dropout=0.4).train(training), form)


@pytest.mark.parametrize("form", ["batch", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_rows_are_told_before(name, form):
    module = build(name)
    tapped = compare(module, form)
    args = arguments(module, form, *leaves(module, form))
    assert tapped.rule.rows(module, args, {}) == tapped.rows
    assert tapped.rule.rows(module, (), {"input": args[0]}) == tapped.rows


@pytest.mark.parametrize("name", LAYERS)
def test_a_second_backward_adds_the_same(name):
    module = build(name)
    tapped, inputs = Tapped(module), leaves(module, "packed")
    result = loss(flat(tapped(*arguments(module, "packed", *inputs))))
    result.backward(retain_graph=True)
    once = [t.clone() for t in (*tapped.gradients.values(), *(t.grad for t in inputs))]
    result.backward()
    twice = [*tapped.gradients.values(), *(t.grad for t in inputs)]
    torch.testing.assert_close(twice, [2 * t for t in once])


@pytest.mark.parametrize("name", LAYERS)
def test_a_checkpoint_recomputes_the_same(name):
    module = build(name, **({"dropout": 0.4} if "both" in name else {}))
    tapped, inputs = Tapped(module), leaves(module, "packed unsorted")

    def recomputed(*args):
        return checkpoint(tapped, *args, use_reentrant=False)

    torch.manual_seed(3)
    found = gradients(recomputed, module, "packed unsorted", inputs)
    torch.manual_seed(3)
    torch.testing.assert_close(found, gradients(module, module, "packed unsorted", inputs))
    torch.testing.assert_close(tapped.gradients, own_gradients(module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["batch", "packed", "unbatched"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_outputs_may_be_changed_in_place(name, form, dtype):
    module = build(name).to(dtype)
    tapped, inputs = Tapped(module), [t.to(dtype) for t in leaves(module, form)]

    def changed(*args):
        outputs = flat(tapped(*args))
        return outputs[0].mul_(3), outputs[1:]

    def tripled(*args):
        outputs = flat(module(*args))
        return outputs[0] * 3, outputs[1:]

    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    found = gradients(changed, module, form, inputs)
    torch.testing.assert_close(found, gradients(tripled, module, form, inputs), **close)
    torch.testing.assert_close(tapped.gradients, own_gradients(module), **close)


@pytest.mark.parametrize("form", ["batch", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_under_autocast_dtypes_are_the_modules_own(name, form):
    module = build(name).float()
    inputs = [t.detach().float() for t in leaves(module, form)]
    tapped = Tapped(module)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (gradients(c, module, form, inputs) for c in (tapped, module))
    for output, own in zip(found[0], expected[0], strict=True):
        assert output.dtype == own.dtype
    for t, own in zip(found[1], expected[1], strict=True):
        assert (t - own).norm() < 0.03 * own.norm()
    for key, own in own_gradients(module).items():
        assert (tapped.gradients[key] - own).norm() < 0.03 * own.norm(), key


MISTAKES: dict[str, tuple[Any, ...]] = {
    "one dimension": (torch.zeros(5),),
    "four dimensions": (torch.zeros(6, 4, 1, 5),),
    "another width": (torch.zeros(6, 4, 3),),
    "another dtype": (torch.zeros(6, 4, 5, dtype=torch.float64),),
    "no steps": (torch.zeros(0, 4, 5),),
    "states of another batch": (torch.zeros(6, 4, 5), torch.zeros(1, 3, 4)),
    "states of another width": (torch.zeros(6, 4, 5), torch.zeros(1, 4, 5)),
    "states without a batch": (torch.zeros(6, 4, 5), torch.zeros(1, 4)),
    "states with a batch": (torch.zeros(6, 5), torch.zeros(1, 1, 4)),
    "states of another dtype": (torch.zeros(6, 4, 5), torch.zeros(1, 4, 4, dtype=torch.float64)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_what_the_module_refuses_is_refused(kind, mistake):
    module, (x, *states) = kind(5, 4), MISTAKES[mistake]
    hx = None if not states else states[0] if kind is not nn.LSTM else (states[0], states[0])
    with pytest.raises((RuntimeError, ValueError)) as own:
        module(x, hx)
    with pytest.raises(own.type):
        Tapped(module)(x, hx)


@pytest.mark.parametrize("name", ["weight_hh_l0", "bias_ih_l0_reverse"])
def test_weights_computed_from_others_travel_dense(name):
    module = nn.GRU(5, 4, bidirectional=True)
    assert rule_for(module, og.RULES)[0] is not None
    register_parametrization(module, name, nn.Tanh())
    assert rule_for(module, og.RULES) == (None, f"its {name} is computed from others")
