"""What is of recurrent layers alone: packed sequences, states, dropout, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from tapped import Tapped, changed_in_place, compare, weighted

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


def build(name: str, **more: Any) -> nn.RNNBase:
    kind, options = LAYERS[name]
    return kind(5, 4, **{**options, **more}).double()


def shapes(module: nn.RNNBase, form: str) -> tuple[list[int], tuple[int, ...]]:
    """Of the input, and of sequences in a state."""
    lengths = LENGTHS.get(form)
    steps, *count = (max(lengths), len(lengths)) if lengths else SHAPES[form]
    return [*([*count, steps] if module.batch_first else [steps, *count]), 5], tuple(count)


def arguments(module: nn.RNNBase, form: str, given: bool = True) -> tuple[Any, ...]:
    """The input and, if they are given, the first states."""
    shape, count = shapes(module, form)
    x = torch.randn(shape, dtype=torch.float64)
    widths = [module.proj_size or module.hidden_size, module.hidden_size]
    first = [torch.randn(len(module.all_weights), *count, w, dtype=x.dtype) for w in widths]
    return (x, *([tuple(first)] if isinstance(module, nn.LSTM) else first[:1])) if given else (x,)


def packed(module: nn.RNNBase, form: str, x: Tensor) -> Any:
    """As the module is given it."""
    if form not in LENGTHS:
        return x
    return pack_padded_sequence(x, LENGTHS[form], module.batch_first, enforce_sorted=False)


def check(
    module: nn.RNNBase, form: str, given: bool = True, *, around: Any = None, **about: Any
) -> None:
    """That a module and its rule agree; packing is part of what is called."""
    args = arguments(module, form, given)

    def packing(call: Any) -> Any:
        def forward(x: Tensor, *states: Any) -> tuple[Tensor, Any]:
            y, last = call(packed(module, form, x), *states)
            return y.data if isinstance(y, PackedSequence) else y, last

        return around(forward) if around else forward

    tapped, _ = compare(module, args, around=packing, **about)
    assert tapped.rule.rows(module, (packed(module, form, args[0]),), {}) == tapped.told
    assert tapped.rows == tapped.told


@pytest.mark.parametrize("given", [True, False], ids=["given", "zeros"])
@pytest.mark.parametrize("form", [*SHAPES, *LENGTHS])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_gradients_and_rows_are_those_of_the_module(name, form, given):
    check(build(name), form, given)


@pytest.mark.parametrize("name", LAYERS)
def test_packed_outputs_may_be_changed_in_place(name):
    check(build(name), "packed unsorted", around=changed_in_place)


@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_that_nobody_uses_count_for_nothing(name, used):
    module = build(name)
    if used < 2 or isinstance(module, nn.LSTM):
        check(module, "packed unsorted", loss=lambda outputs: weighted([outputs[used]]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["batch", "packed unsorted"])
@pytest.mark.parametrize("name", ["relu", "gru both ways", "projected both ways"])
def test_dropout_draws_what_the_module_draws(name, form, training):
    check(build(name, dropout=0.4).train(training), form)


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
