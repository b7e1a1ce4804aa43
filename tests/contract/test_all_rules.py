"""What every rule must do, those of the library and one of another's own.

A layer of your own goes into `LAYERS`, with what it is called with.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from examples.transposed import Transposed, TransposedRule
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import outergrad as og
from outergrad.layers import rule_for
from tapped import (
    CLOSE,
    Tapped,
    add,
    autograds,
    changed_in_place,
    compare,
    outcome,
    tensors_of,
    weighted,
    zeros,
)

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")

RULES = {**og.RULES, Transposed: TransposedRule()}


class Layer(NamedTuple):
    """A layer, and what it is called with.

    Attributes:
        make: a new one.
        calls: arguments by form; the first has a sample in each place of `samples`.
        samples: the dimension of its arguments that counts samples.
    """

    make: Callable[[], nn.Module]
    calls: dict[str, tuple[Any, ...]]
    samples: int = 0


def floats(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


ROWS = {"batch": (5,), "one row": (1,), "no rows": (0,), "a row by itself": ()}


def rows_of(width: int, *states: int) -> dict[str, tuple[Any, ...]]:
    """Of a layer that takes rows, and a first state of them or two."""

    def arguments(*shape: int) -> tuple[Any, ...]:
        first = tuple(floats(*shape, state) for state in states)
        return (floats(*shape, width), *([first] if len(first) > 1 else first))

    return {form: arguments(*shape) for form, shape in ROWS.items()}


def positions_of(width: int) -> dict[str, tuple[Any, ...]]:
    return rows_of(width) | {"more dimensions": (floats(2, 3, 4, width),)}


def images(*shape: int) -> dict[str, tuple[Any, ...]]:
    forms = {"batch": (3,), "one sample": (1,), "no samples": (0,), "a sample by itself": ()}
    return {form: (floats(*batch, *shape),) for form, batch in forms.items()}


def ids() -> dict[str, tuple[Any, ...]]:
    """Some of them several times; 0 may be padding."""
    found = torch.tensor([[3, 0, 3, 7], [7, 7, 1, 0], [2, 9, 4, 3]])
    forms = {"batch": found, "one dimension": found[0], "one": found[2, 1], "none": found[:0]}
    return {form: (x,) for form, x in (forms | {"alike": torch.full((2, 3), 5)}).items()}


def bags(*, weights: bool = False, last: bool = False) -> dict[str, tuple[Any, ...]]:
    """Bags of one width, then of several; one is empty, and ids are in several, or twice in one."""
    found = torch.tensor([[3, 0, 3, 7], [7, 7, 1, 0], [0, 0, 0, 0], [2, 9, 4, 3]])
    starts = torch.tensor([0, 1, 1, 9] + [16] * last)
    whole = {"batch": (found,), "one": (found[:1],), "alike": (torch.full((2, 3), 5),)}
    apart = {
        "offsets": (found.flatten(), starts),
        "none": (found[0, :0], starts[-1:] * 0),
        "all empty": (found[0, :0], starts * 0),
    }
    forms = whole | apart
    if weights:
        forms = {k: (*v, *[None] * (2 - len(v)), floats(*v[0].shape)) for k, v in forms.items()}
    return forms


def sequences(*states: int, layers: int = 1, batch_first: bool = False) -> dict[str, Any]:
    def arguments(*batch: int, steps: int = 6) -> tuple[Any, ...]:
        shape = (*batch, steps) if batch_first else (steps, *batch)
        first = tuple(floats(layers, *batch, width) for width in states)
        return (floats(*shape, 5), *([first] if len(first) > 1 else first))

    forms = {"batch": arguments(3), "no sequences": arguments(0), "a sequence": arguments()}
    return forms | {"one step": arguments(3, steps=1)}


def attended(k: int = 8, v: int = 8) -> dict[str, tuple[Any, ...]]:
    """Queries, keys and values; equal ones are one tensor."""
    x, q, keys, values = floats(4, 3, 8), floats(2, 3, 8), floats(4, 3, k), floats(4, 3, v)
    own = {"three inputs": (q, keys, values), "by itself": (q[:, 0], keys[:, 0], values[:, 0])}
    if (k, v) != (8, 8):
        return {"batch": own["three inputs"], **own}
    none = floats(4, 0, 8)
    shared = {"batch": (x, x, x), "a memory": (q, x, x), "no samples": (none, none, none)}
    return shared | own


LAYERS: dict[str, Layer] = {
    "linear": Layer(lambda: nn.Linear(6, 5), positions_of(6)),
    "linear without bias": Layer(lambda: nn.Linear(6, 5, bias=False), positions_of(6)),
    "conv1d": Layer(lambda: nn.Conv1d(4, 6, 3, stride=2), images(4, 9)),
    "conv2d, groups": Layer(
        lambda: nn.Conv2d(4, 6, (3, 2), padding=1, dilation=2, groups=2), images(4, 6, 5)
    ),
    "conv2d, circular": Layer(
        lambda: nn.Conv2d(4, 3, 3, padding="same", padding_mode="circular", bias=False),
        images(4, 5, 5),
    ),
    "conv3d": Layer(lambda: nn.Conv3d(2, 3, 2), images(2, 4, 3, 3)),
    "embedding": Layer(lambda: nn.Embedding(10, 6), ids()),
    "embedding, padding": Layer(lambda: nn.Embedding(10, 6, padding_idx=0), ids()),
    "bag": Layer(lambda: nn.EmbeddingBag(10, 6), bags()),
    "bag, sum": Layer(lambda: nn.EmbeddingBag(10, 6, mode="sum"), bags()),
    "bag, padding": Layer(lambda: nn.EmbeddingBag(10, 6, padding_idx=0), bags()),
    "bag, last offset": Layer(
        lambda: nn.EmbeddingBag(10, 6, include_last_offset=True), bags(last=True)
    ),
    "bag, weights": Layer(
        lambda: nn.EmbeddingBag(10, 6, mode="sum", padding_idx=3), bags(weights=True)
    ),
    "attention": Layer(lambda: nn.MultiheadAttention(8, 2), attended(), 1),
    "attention, more keys": Layer(
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True), attended(), 1
    ),
    "attention, widths": Layer(
        lambda: nn.MultiheadAttention(8, 2, bias=False, kdim=5, vdim=7), attended(5, 7), 1
    ),
    "rnn cell": Layer(lambda: nn.RNNCell(6, 5), rows_of(6)),
    "rnn cell, relu": Layer(lambda: nn.RNNCell(6, 5, nonlinearity="relu"), rows_of(6, 5)),
    "gru cell": Layer(lambda: nn.GRUCell(6, 5), rows_of(6, 5)),
    "lstm cell": Layer(lambda: nn.LSTMCell(6, 5), rows_of(6, 5, 5)),
    "lstm cell without bias": Layer(lambda: nn.LSTMCell(6, 5, bias=False), rows_of(6)),
    "rnn": Layer(lambda: nn.RNN(5, 4), sequences(4), 1),
    "gru": Layer(
        lambda: nn.GRU(5, 4, 2, batch_first=True, bidirectional=True),
        sequences(batch_first=True),
    ),
    "lstm": Layer(lambda: nn.LSTM(5, 4, proj_size=3), sequences(3, 4), 1),
    "transposed": Layer(lambda: Transposed(6, 5), positions_of(6)),
}
CALLS = [(name, form) for name, layer in LAYERS.items() for form in layer.calls]


def built(name: str) -> tuple[nn.Module, Any]:
    """A layer in float64, and its rule."""
    torch.manual_seed(0)
    module = LAYERS[name].make().double()
    return module, RULES[type(module)]


def batch_of(name: str) -> tuple[Any, ...]:
    return LAYERS[name].calls["batch"]


def spread(value: Any) -> Any:
    """The same numbers, with others between them in memory."""
    twice = {id(t): torch.stack([t, t], dim=-1)[..., 0] for t in tensors_of(value)}
    return tree_map(lambda t: twice.get(id(t), t), value)


def test_no_rule_is_left_out():
    assert {id(RULES[type(built(name)[0])]) for name in LAYERS} == {*map(id, RULES.values())}


@pytest.mark.parametrize(("name", "form"), CALLS)
def test_outputs_gradients_and_rows_are_those_of_the_layer(name, form):
    """Rows that are told before are those that factors have; arguments may have names."""
    (module, rule), args = built(name), LAYERS[name].calls[form]
    tapped, _ = compare(module, args, rule)
    named = inspect.signature(module.forward).bind(*args).arguments
    assert tapped.rows == tapped.told == rule.rows(module, args, {}) == rule.rows(module, (), named)


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_need_not_lie_side_by_side(name):
    module, rule = built(name)
    compare(module, spread(batch_of(name)), rule)


@pytest.mark.parametrize("name", LAYERS)
def test_slots_follow_from_the_layer_and_its_name_alone(name):
    module, rule = built(name)
    slots = rule.slots(module, "a.b")
    assert slots == rule.slots(copy.deepcopy(module), "a.b") == rule.slots(module, "a.b")
    params = {f"a.b.{n}": p for n, p in module.named_parameters()}
    for slot, at_root in zip(slots, rule.slots(module, ""), strict=True):
        assert slot.layer == "a.b"
        assert slot.params == tuple(f"a.b.{name}" for name in at_root.params)
        inputs, outputs = slot.inputs, slot.groups * slot.outputs
        rows, width = (inputs, outputs) if slot.lookup else (outputs, inputs)
        weight = params[slot.weight][slice(*(slot.weight_rows or (None,)))]
        assert weight.flatten(1).shape == (rows, width)
        if slot.bias is not None:
            assert params[slot.bias][slice(*(slot.bias_rows or (None,)))].shape == (outputs,)


@pytest.mark.parametrize("name", LAYERS)
def test_ids_that_are_looked_up_again_are_added_up(name):
    module, rule = built(name)
    tapped, _ = compare(module, batch_of(name), rule)
    for slot, call, _ in tapped.uses:
        if tapped.slots[slot].lookup:
            ids_R = rule.factors(module, slot, call).a_GRI
            assert len(ids_R.unique()) == len(ids_R) < call.a.numel()


@pytest.mark.parametrize("name", [n for n in LAYERS if hasattr(built(n)[1], "by_sample")])
def test_rows_by_sample_are_the_gradient_of_each(name):
    """As the layer has it of that sample alone."""
    (module, rule), args, dim = built(name), batch_of(name), LAYERS[name].samples

    def loss(outputs):
        return sum((t.square() + t.sin()).sum() for t in outputs)

    tapped, _ = compare(module, args, rule, loss=loss)
    count = args[0].shape[dim]
    assert {about.total for _, _, about in tapped.uses} == {count}
    found_B = [zeros(module) for _ in range(count)]
    for slot, call, about in tapped.uses:
        (d_GNO, a_GNI, _), samples_N = rule.by_sample(module, slot, call, about)
        assert samples_N.shape == d_GNO.shape[1:2]
        for sample, gradients in enumerate(found_B):
            of = samples_N == sample
            a = a_GNI[of] if tapped.slots[slot].lookup else a_GNI[:, of]
            add(gradients, tapped.slots[slot], og.Factors(d_GNO[:, of], a))
    for sample, gradients in enumerate(found_B):
        alone = copy.deepcopy(module)
        one = {id(t): t.narrow(dim, sample, 1) for t in tensors_of(args)}
        outcome(alone, tree_map(lambda t, one=one: one.get(id(t), t), args), loss)
        expected = {n: g for n, g in autograds(alone).items() if g.any() or gradients[n].any()}
        for key in {key for slot in tapped.slots for key in slot.params} & {*expected}:
            torch.testing.assert_close(gradients[key], expected[key], **CLOSE)


@pytest.mark.parametrize("name", LAYERS)
def test_a_second_backward_adds_the_same(name):
    module, rule = built(name)
    tapped = Tapped(module, rule)
    result = weighted(tensors_of(tapped(*batch_of(name))))
    result.backward(retain_graph=True)
    once = {key: gradient.clone() for key, gradient in tapped.total().items()}
    result.backward()
    torch.testing.assert_close(tapped.total(), {key: 2 * g for key, g in once.items()})


@pytest.mark.parametrize("name", LAYERS)
def test_a_checkpoint_recomputes_the_same(name):
    module, rule = built(name)

    def recomputed(call):
        return partial(checkpoint, call, use_reentrant=False)

    compare(module, batch_of(name), rule, around=recomputed)


@pytest.mark.parametrize(("name", "form"), [c for c in CALLS if not c[0].startswith("rnn cell")])
def test_the_output_may_be_changed_in_place(name, form):
    """But that of cells whose own backward needs it, PyTorch's too."""
    module, rule = built(name)
    compare(module, LAYERS[name].calls[form], rule, around=changed_in_place)


@pytest.mark.parametrize("name", LAYERS)
def test_under_autocast_dtypes_are_the_layers_own(name):
    module, rule = built(name)
    single = {id(t): t.float() for t in tensors_of(batch_of(name)) if t.is_floating_point()}
    args = tree_map(lambda t: single.get(id(t), t), batch_of(name))
    tapped, plain = Tapped(copy.deepcopy(module).float(), rule), copy.deepcopy(module).float()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = outcome(tapped, args), outcome(plain, args)
    assert [t.dtype for t in found[0]] == [t.dtype for t in expected[0]]
    pairs = [*zip(found[1], expected[1], strict=True)]
    pairs += [(g, autograds(plain)[key]) for key, g in tapped.total().items()]
    for t, own in pairs:
        assert (t - own).norm() <= 0.03 * own.norm()


# -- what travels dense -----------------------------------------------------------------------


def parameters_in_slots(name: str) -> list[str]:
    module, rule = built(name)
    return sorted({parameter for slot in rule.slots(module, "") for parameter in slot.params})


@pytest.mark.parametrize(
    ("name", "parameter"), [(name, of) for name in LAYERS for of in parameters_in_slots(name)]
)
def test_a_parameter_that_is_computed_from_others_is_none(name, parameter):
    """Autograd has to form the gradients of what it is computed from."""
    module, rule = built(name)
    assert rule_for(module, RULES) == (rule, "")
    child, _, own = parameter.rpartition(".")
    register_parametrization(module.get_submodule(child), own, nn.Tanh())
    found, why = rule_for(module, RULES)
    assert found is None
    assert parameter in why


OBJECTIONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear": (lambda: nn.Linear(0, 3), "no inputs"),
    "cell": (lambda: nn.GRUCell(0, 3), "no inputs"),
    "maxima": (lambda: nn.EmbeddingBag(9, 3, mode="max"), 'mode="max"'),
    "frequencies of bags": (lambda: nn.EmbeddingBag(9, 3, scale_grad_by_freq=True), "by_freq"),
    "frequencies": (lambda: nn.Embedding(9, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "norms": (lambda: nn.Embedding(9, 3, max_norm=1.0), "set max_norm=None"),
    "sparse": (lambda: nn.Embedding(9, 3, sparse=True), "set sparse=False"),
    "norms of bags": (lambda: nn.EmbeddingBag(9, 3, max_norm=1.0), "set max_norm=None"),
    "sparse bags": (lambda: nn.EmbeddingBag(9, 3, sparse=True), "set sparse=False"),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("name", OBJECTIONS)
def test_an_objection_says_why(name):
    make, why = OBJECTIONS[name]
    rule, said = rule_for(make(), RULES)
    assert rule is None
    assert why in said


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_names_the_remedy(name):
    make, remedy = REFUSED[name]
    with pytest.raises(ValueError, match=remedy):
        rule_for(make(), RULES)
