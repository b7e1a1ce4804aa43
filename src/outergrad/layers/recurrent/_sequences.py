"""Conversion of a recurrent layer's sequences and states to rows, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from outergrad.layers.recurrent._steps import Steps

Sequences = Tensor | PackedSequence
States = tuple[Tensor, ...]
"""The hidden states and, of an LSTM, the cell states: (directions of all layers, B, width)."""


class Opened(NamedTuple):
    """The input as rows, (N, I), the positions of their time steps, and the initial states."""

    x_NI: Tensor
    steps: Steps
    states: States


def opened(module: nn.RNNBase, input: Sequences, hx: Any) -> Opened:
    """Converts the module's arguments to rows and initial states.

    Raises:
        ValueError: the input has another dtype or number of dimensions.
        RuntimeError: the input or a state has another size.
    """
    if isinstance(input, PackedSequence):
        return _opened_packed(module, input, hx)
    batch_dim, x, states = 0 if module.batch_first else 1, input, _states(hx)
    _check_dimensions(module, x, states)
    if x.dim() == 2:
        x, states = x.unsqueeze(batch_dim), tuple(state.unsqueeze(1) for state in states)
    states = states or _zeros(module, x, x.shape[batch_dim])
    module.check_forward_args(x, _hidden(module, states), None)
    x_TBI = x.transpose(0, 1) if module.batch_first else x
    time, batch = x_TBI.shape[:2]
    return Opened(x_TBI.flatten(0, 1), Steps([batch] * time, batch, x.device), states)


def closed(
    module: nn.RNNBase, input: Sequences, y_NP: Tensor, steps: Steps, states: States
) -> tuple[Any, Any]:
    """Returns the output and the final states, in the form of the input."""
    if isinstance(input, PackedSequence):
        hidden = module.permute_hidden(_hidden(module, states), input.unsorted_indices)
        return input._replace(data=y_NP), hidden
    y_TBP = y_NP.unflatten(0, (len(steps.sizes), steps.batch))
    y = y_TBP.transpose(0, 1) if module.batch_first else y_TBP
    if input.dim() == 3:
        return y, _hidden(module, states)
    squeezed = tuple(state.squeeze(1) for state in states)
    return y.squeeze(0 if module.batch_first else 1), _hidden(module, squeezed)


def _opened_packed(module: nn.RNNBase, input: PackedSequence, hx: Any) -> Opened:
    x_NI, batch = input.data, int(input.batch_sizes[0])
    if hx is None:
        hidden = _hidden(module, _zeros(module, x_NI, batch))
    else:
        hidden = module.permute_hidden(hx, input.sorted_indices)
    module.check_forward_args(x_NI, hidden, input.batch_sizes)
    steps = Steps(input.batch_sizes.tolist(), batch, x_NI.device, packed=True)
    return Opened(x_NI, steps, _states(hidden))


def _check_dimensions(module: nn.RNNBase, x: Tensor, states: States) -> None:
    name = type(module).__name__
    if x.dim() not in (2, 3):
        raise ValueError(f"{name}: the input must be 2-D or 3-D, not {tuple(x.shape)}")
    for state in states:
        if state.dim() != x.dim():
            raise RuntimeError(
                f"{name}: the states of a {x.dim()}-D input must be {x.dim()}-D, "
                f"not {tuple(state.shape)}"
            )


def _states(hx: Any) -> States:
    if hx is None:
        return ()
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _hidden(module: nn.RNNBase, states: States) -> Any:
    """Returns the states in the form that the module takes and returns."""
    return states if isinstance(module, nn.LSTM) else states[0]


def _zeros(module: nn.RNNBase, x: Tensor, batch: int) -> States:
    directions = module.num_layers * (2 if module.bidirectional else 1)
    widths = [module.proj_size or module.hidden_size, module.hidden_size]
    used = widths if isinstance(module, nn.LSTM) else widths[:1]
    return tuple(x.new_zeros(directions, batch, width) for width in used)
