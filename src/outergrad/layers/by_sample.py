"""The rule by which all parameters of a module have gradients by sample."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from outergrad.core.protocols import Rule
from outergrad.layers.bare import BareRule
from outergrad.layers.norms import NORMALISED, NormRule


def with_bare(
    rule: Rule | None, why: str, module: nn.Module, trained: Callable[[nn.Parameter], bool]
) -> tuple[Rule | None, str]:
    """Returns the rule by which all parameters of a module have gradients by sample.

    Args:
        rule: of the module's type, if there is one.
        why: the reason where there is none.
        module: the module.
        trained: True for a parameter that is trained and shared.

    Returns:
        The rule, or None with the reason why these gradients are not known.
    """
    own = {n: p for n, p in module.named_parameters(recurse=False) if trained(p)}
    params = dict(module.named_parameters(remove_duplicate=False))
    covered = set() if rule is None else {n for s in rule.slots(module, "") for n in s.params}
    in_part = any(not trained(params[name]) for name in covered)
    if in_part and all(p.dim() < 2 for p in own.values()):
        rule, covered = None, set()  # a bias alone
    bare = [name for name in own if name not in covered]
    if not bare or (rule is not None and not hasattr(rule, "by_sample")):
        return rule, why
    objection = _objection(module)
    return (None, objection) if objection else (_bare_rule(module, bare, rule), "")


def _objection(module: nn.Module) -> str:
    """Returns why a module's own forward does not read its parameters; else an empty text."""
    if isinstance(module, ParametrizationList):
        return (
            "a weight is computed from it; torch.nn.utils.parametrize.remove_parametrizations() "
            "makes that a parameter again"
        )
    if type(module).__name__.startswith("Dora") and type(module).__module__.startswith("peft."):
        return "DoRA computes its magnitudes from products that are of no sample; use_dora=False"
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return (
            f"it is in a {type(module).__name__}, and other modules read it; as an attribute of "
            f"the module that reads it, it has one"
        )
    return ""


def _bare_rule(module: nn.Module, names: list[str], rule: Rule | None) -> BareRule:
    if rule is None and type(module) in NORMALISED:
        return NormRule(module, names)
    return BareRule(module, names, rule)
