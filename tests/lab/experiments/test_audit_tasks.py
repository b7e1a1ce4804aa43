"""Tasks that attack what a method sends."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import outergrad.tools.audit.attacks as attacks
from outergrad.launch.errors import RecipeError
from outergrad.tools.audit.audit import MASKED, PART, SUM, audit
from outergrad.tools.audit.things import THINGS, is_data, thing_of
from outergrad_lab import workloads
from outergrad_lab.experiments.audited import AuditWork, observed_rows, told_of
from outergrad_lab.experiments.frames import finals
from outergrad_lab.experiments.kinds import KINDS
from outergrad_lab.experiments.tables import write_tables
from outergrad_lab.experiments.task import Context, read
from outergrad_lab.labels import Method

SETTINGS = {"workload": "mlp", "method": "dense", "batch_size": 2}
REFUSED = [
    ({"workload": "nobody"}, "workload must be one of mlp"),
    ({"batch_size": 0}, "batch_size must be a whole number of 1"),
    ({"positions": 0}, "positions must be a whole number of 1"),
    ({"method": "dance"}, "method must be one of .* not 'dance'"),
    ({"method": "dense@0"}, "a number above 0"),
    ({"rows": 3}, "no setting 'rows'"),
]


@pytest.fixture
def small(monkeypatch):
    """The MLP with narrow layers."""
    mlp = replace(workloads.WORKLOADS["mlp"], widths=(32,))
    monkeypatch.setitem(workloads.WORKLOADS, "mlp", mlp)


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_a_wrong_setting_is_refused_by_name(changed, said):
    with pytest.raises(RecipeError, match=said):
        KINDS["audit"]({**SETTINGS, **changed})


def test_its_findings_are_those_of_the_command(small):
    told: list[int] = []
    work = read(AuditWork, SETTINGS)
    found = work.run(Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1)))
    assert told == [1, 1]
    assert json.loads(json.dumps(found)) == found
    assert [one["observer"] for one in found["observers"]] == [PART, SUM, MASKED]
    for kept, seen in zip(found["observers"][:2], audit(work.question)[:2], strict=True):
        assert kept["findings"] == [
            {name: getattr(one, name) for name in kept["findings"][0]} for one in seen.findings
        ]


def test_a_method_that_does_not_go_with_a_model_is_left_out_and_why_is_told(monkeypatch):
    from outergrad.tools.audit import audit as tool

    def refuses(*_):
        raise RecipeError("no privacy here")

    monkeypatch.setattr(tool, "observed", refuses)
    found = read(AuditWork, SETTINGS).run(Context(data_dir=Path()))
    assert found == {"skipped": "mlp, dense: no privacy here"}


def finding(attack, found, of, **more):
    usual = {"exact": 0, "guessed": 0.0, "false": 0, "deviation": 0.0, "canaries": 0}
    return {"attack": attack, "layer": "0", "found": found, "of": of, **usual, **more}


FINDINGS = [
    finding("rows by division", 1, 8, false=3),
    finding("rows by SPEAR", 6, 8, exact=6, false=1),
    finding("labels", 6, 8, guessed=4.0, false=2),
    finding("members by the span", 8, 8, false=2, canaries=32),
    finding("members by products", 0.9, 0, deviation=0.1, canaries=32),
]


def test_the_attack_that_found_most_counts_and_all_false_alarms_do():
    assert told_of({"findings": FINDINGS}) == {
        "data_back": 6 / 8,
        "rows_back": 6 / 8,
        "labels_back": 2 / 4,
        "members_named": 1.0,
        "member_auc": 0.9,
        "member_z": pytest.approx(4.0),
        "false_rows": 4,
        "canary_alarms": 2,
    }


def test_what_was_not_attacked_is_unknown_and_not_zero():
    assert told_of({"findings": FINDINGS[2:3]}).keys() == {"labels_back"}


def made_up(method, batch_size, findings, observer=PART):
    seen = {"observer": observer, "who": "", "findings": findings}
    settings = {**SETTINGS, "method": method, "batch_size": batch_size}
    return {"kind": "audit", "settings": settings, "observers": [seen], "seconds": 1.0}


def test_a_table_has_a_row_per_method_and_a_column_per_batch_size(tmp_path):
    results = [made_up("dense@8", 8, FINDINGS), made_up("dad", 1, FINDINGS[1:2])]
    assert list(finals(results)["rows_back"]) == [0.75, 0.75]
    assert observed_rows(results[1])[0]["observer"] == PART
    wanted = {"name": "t", "rows": "method", "columns": "batch_size", "value": "rows_back"}
    (table,) = write_tables([wanted], results, tmp_path)
    assert sorted(table.rows) == [
        ["dAD", "75 %", "\N{EN DASH}"],
        ["dense, ε = 8", "\N{EN DASH}", "75 %"],
    ]


def test_privacy_in_a_name_is_a_setting_of_the_label():
    assert Method.parse("rank-dad:rank=4:wire=int8@0.5").label == (
        "rank-dAD, rank 4, wire = int8, ε = 0.5"
    )


def test_attacks_are_named_by_what_they_are_after():
    sources = "".join(p.read_text() for p in Path(attacks.__file__).parents[1].glob("*.py"))
    named = re.findall(r'(?:attack=|_of_rows\()"([^"]+)"', sources)
    assert len(named) > 5
    assert {thing_of(attack) for attack in named} <= set(THINGS)
    assert is_data("rows by division")
    assert not is_data("members by products")
    with pytest.raises(ValueError, match="begin its name with one of rows"):
        thing_of("everything by magic")
