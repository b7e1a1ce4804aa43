"""Rules, one per type of layer: its forward through taps, and the factors of its gradient.

To teach outergrad a new layer, write a `Rule` and pass `rules={**og.RULES, MyLayer: MyRule()}`.
"""

from __future__ import annotations

from types import MappingProxyType

from torch import nn

from outergrad.core.protocols import Rule, Rules
from outergrad.layers.attention import MultiheadAttentionRule
from outergrad.layers.cells import CellRule, gru_cell, lstm_cell, rnn_cell
from outergrad.layers.conv import ConvRule
from outergrad.layers.embedding import EmbeddingRule
from outergrad.layers.embedding_bag import EmbeddingBagRule
from outergrad.layers.linear import LinearRule
from outergrad.layers.recurrent import RecurrentRule, gru, lstm, rnn

_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: LinearRule(),
    nn.Conv1d: ConvRule(),
    nn.Conv2d: ConvRule(),
    nn.Conv3d: ConvRule(),
    nn.Embedding: EmbeddingRule(),
    nn.EmbeddingBag: EmbeddingBagRule(),
    nn.MultiheadAttention: MultiheadAttentionRule(),
    nn.RNNCell: CellRule(rnn_cell),
    nn.GRUCell: CellRule(gru_cell),
    nn.LSTMCell: CellRule(lstm_cell),
    nn.RNN: RecurrentRule(rnn),
    nn.GRU: RecurrentRule(gru),
    nn.LSTM: RecurrentRule(lstm),
}
RULES: Rules = MappingProxyType(_RULES)
"""Default rules of `distribute`, by type of module."""


def rule_for(module: nn.Module, rules: Rules) -> tuple[Rule | None, str]:
    """Returns the rule of a module's type, or of the base class that it inherits its forward from.

    Returns:
        The rule, or None with the reason why the module's gradients are sent dense.
    """
    known = next((base for base in type(module).__mro__ if base in rules), None)
    if known is None:
        return None, f"no rule for {type(module).__name__}"
    for method in getattr(rules[known], "relies_on", ("forward",)):
        if getattr(type(module), method) is not getattr(known, method) or method in vars(module):
            return None, f"{type(module).__name__} has a {method} of its own"
    objection = rules[known].objection(module) or _computed(module, rules[known])
    return (None, objection) if objection else (rules[known], "")


def _computed(module: nn.Module, rule: Rule) -> str:
    """Returns an objection if a weight is computed from others (`weight_norm`), else ""."""
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    wanted = (name for slot in rule.slots(module, "") for name in slot.params)
    computed = next((name for name in wanted if name not in own), None)
    return f"its {computed} is computed from others" if computed else ""
