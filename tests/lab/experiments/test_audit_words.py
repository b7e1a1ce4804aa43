"""The words of the coverage table are those that the audit's results say."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from outergrad.record.readable import WORDS, Content, Layer, LayerKind, Word, layers_of
from outergrad.tools.audit.audit import PART
from outergrad.tools.audit.findings import Finding
from outergrad.tools.audit.things import is_data, thing_of
from outergrad_lab.experiments.audited import told_of
from outergrad_lab.workloads import WORKLOADS
from places import REPOSITORY

RESULTS = REPOSITORY / "experiments" / "results" / "audit-full" / "results.jsonl"
WAYS = {
    "dad-activations": Content.ROWS,
    "edad": Content.ROWS,
    "rank-dad": Content.PARTS,
    "sparse": Content.ENTRIES,
    "dense": Content.GRADIENT,
    "dad": Content.GRADIENT,
    "local-steps": Content.GRADIENT,
}
OF = {LayerKind.LINEAR: "mlp", LayerKind.EMBEDDING: "encoder", LayerKind.CONVOLUTION: "cnn"}
"""Workload whose first layer is of that kind."""
MOST, CHANCE = 0.5, 2.5
"""Share of rows or tokens that count as back, and deviations of an AUC that are no chance."""
LARGE = 128


def measured() -> dict[tuple[LayerKind, Content], list[tuple[int, dict]]]:
    """Batch size and a site's own part of each audit, by kind of its first layer and way."""
    found = defaultdict(list)
    for line in RESULTS.read_text().splitlines():
        result = json.loads(line)
        settings = result["settings"]
        name, _, epsilon = settings["method"].partition("@")
        way = Content.NOISE if epsilon else WAYS[name.partition(":")[0]]
        kind = next((kind for kind, one in OF.items() if one == settings["workload"]), None)
        part = next(one for one in result["observers"] if one["observer"] == PART)
        # An embedding and convolutions have no rows that would travel as they are.
        if kind and (way != Content.ROWS or kind == LayerKind.LINEAR):
            found[kind, way].append((settings["batch_size"], part))
    return found


def word_of(parts: list[tuple[int, dict]], way: Content) -> Word:
    """The strongest word that these audits bear out."""
    back, tokens, members = defaultdict(list), [], []
    for rows, part in parts:
        told = told_of(part)
        findings = [Finding(figure="", **one) for one in part["findings"]]
        of_data = [
            one for one in findings if is_data(one.attack) and thing_of(one.attack) == "rows"
        ]
        back[rows].append(max((one.share for one in of_data), default=0.0))
        tokens.append(told.get("tokens_back", 0.0))
        members.append(told.get("member_z", 0.0))
    if max(back.get(LARGE, [0.0])) >= MOST:
        return Word.ROWS
    if max(map(max, back.values())) >= MOST:
        return Word.FEW_ROWS
    if max(tokens) >= MOST:
        return Word.TOKENS
    if max(members) > CHANCE:
        return Word.NOISE if way == Content.NOISE else Word.MEMBERS
    return Word.UNFOUND


FOUND = measured()


def test_every_word_is_measured_and_every_measurement_has_a_word():
    assert WORDS.keys() == FOUND.keys()


@pytest.mark.parametrize(("kind", "way"), WORDS, ids=str)
def test_the_word_is_what_the_audit_found(kind, way):
    assert WORDS[kind, way] == word_of(FOUND[kind, way], way)


@pytest.mark.parametrize(("kind", "workload"), OF.items(), ids=str)
def test_the_data_of_these_workloads_enters_such_a_layer(kind, workload):
    first = next(iter(layers_of(WORKLOADS[workload].build()).values()))
    assert isinstance(first, Layer)
    assert first.kind == kind


def test_less_epsilon_is_less_of_who_was_there():
    """The word of noise says so: of 32 rows of the MLP, whose AUC has the least of chance."""
    found = {}
    for line in RESULTS.read_text().splitlines():
        result = json.loads(line)
        settings = result["settings"]
        if settings["workload"] == "mlp" and settings["batch_size"] == 32:
            found[settings["method"]] = told_of(result["observers"][0])["member_auc"]
    assert found["dense@1"] < found["dense@3"] < found["dense@8"]
