"""Tasks of kind "audit": attacks on what one method sends at one batch size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad.tools.audit.audit import Question, Seen, audit
from outergrad.tools.audit.findings import Finding
from outergrad.tools.audit.observed import Asked
from outergrad.tools.audit.things import DATA, thing_of
from outergrad_lab.experiments.task import Context, at_least
from outergrad_lab.workloads import WORKLOADS

KEPT = ("attack", "layer", "found", "of", "exact", "guessed", "false", "deviation", "canaries")
"""Figures of a finding that a result keeps."""


@dataclass(frozen=True, kw_only=True)
class AuditWork:
    """Attacks what a method sends in one step, with every attack that fits the model.

    Its result has, for each observer, the findings of all attacks as they are in
    `outergrad.tools.audit.findings.Finding`, without pairs. A method that does not go with the
    model leaves the task out, with ``{"skipped": why}``.

    Attributes:
        workload: One of `WORKLOADS`.
        method: A name as `outergrad audit --methods` takes it, as ``dense@8`` for ε = 8.
        batch_size: Rows per site and step.
        positions: Length to which texts are cut; None for their own.
    """

    workload: str
    method: str
    batch_size: int = at_least(1)
    positions: int | None = at_least(1, None)

    def __post_init__(self) -> None:
        """Refuses workloads and methods that there are not."""
        if self.workload not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise RecipeError(f"workload must be one of {known}, not {self.workload!r}")
        Asked.of(self.method, "method")

    @property
    def question(self) -> Question:
        """Question for the audit."""
        return Question(
            model=self.workload,
            methods=(self.method,),
            rows=(self.batch_size,),
            positions=self.positions,
        )

    def run(self, context: Context) -> dict[str, Any]:
        """Attacks, in one step of progress."""
        context.steps(1)
        seen = audit(self.question)
        context.advance()
        if refused := next((one.refused for one in seen if one.refused), ""):
            return {"skipped": f"{self.workload}, {self.method}: {refused}"}
        return {"observers": [_observer(one) for one in seen]}


def _observer(seen: Seen) -> dict[str, Any]:
    findings = [{name: getattr(one, name) for name in KEPT} for one in seen.findings]
    return {"observer": seen.observer, "who": seen.who, "findings": findings}


def told_of(observer: Mapping[str, Any]) -> dict[str, float]:
    """Returns an observer's figures, of all its attacks together; without an attack there is none.

    `data_back`, `rows_back`, `texts_back`, `tokens_back` and `members_named` are shares of what
    there was, `labels_back` a share beyond an even guess, each of the attack that found most.
    `member_auc` is the AUC of members by products, and `member_z` how many of its standard
    deviations by chance it lies above one half. `false_rows` counts what attacks claimed to be data
    and is none, `canary_alarms` rows that were not there and were named as members.

    Args:
        observer: One of the observers in the result of an `AuditWork`.
    """
    findings = [Finding(figure="", **found) for found in observer["findings"]]
    by_thing: dict[str, list[Finding]] = {}
    for one in findings:
        by_thing.setdefault(thing_of(one.attack), []).append(one)
    named = [one for one in by_thing.get("members", []) if one.of]
    aucs = [one for one in by_thing.get("members", []) if not one.of]
    data = [one for thing in DATA for one in by_thing.get(thing, [])]
    shares = {
        "data_back": data,
        **{f"{t}_back": by_thing.get(t, []) for t in ("rows", "texts", "tokens", "labels")},
        "members_named": named,
    }
    told = {name: _most(of) for name, of in shares.items() if of}
    if aucs:
        best = max(aucs, key=lambda one: one.found)
        told |= {"member_auc": best.found, "member_z": (best.found - 0.5) / best.deviation}
    if data:
        told["false_rows"] = sum(one.false for one in data)
    if named:
        told["canary_alarms"] = sum(one.false for one in named)
    return told


def _most(findings: Iterable[Finding]) -> float:
    return max(one.share for one in findings)


def observed_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row of figures per observer of an audit's result."""
    return [{"observer": one["observer"], **told_of(one)} for one in result["observers"]]
