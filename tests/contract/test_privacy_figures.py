"""Figures of an audit on docs/privacy.md and docs/audit.md are those of the audit's results."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest

from outergrad.record.readable import Word
from outergrad_lab.experiments.audited import told_of
from outergrad_lab.experiments.spec import experiment
from outergrad_lab.experiments.tables import write_tables
from places import REPOSITORY

FOLDER = REPOSITORY / "experiments" / "results" / "audit-full"
PAGE = (REPOSITORY / "docs" / "privacy.md").read_text()
PART, SUM, MASKED = "a part", "a sum of 2", "masked"


@cache
def results() -> list[dict]:
    return [json.loads(line) for line in (FOLDER / "results.jsonl").read_text().splitlines()]


def observer(method: str, rows: int, workload: str = "mlp", seen: str = PART) -> dict:
    wanted = {"workload": workload, "method": method, "batch_size": rows}
    (found,) = (one for one in results() if one["settings"].items() >= wanted.items())
    (observer,) = (one for one in found["observers"] if one["observer"] == seen)
    return observer


def figure(value: str, *of, **more) -> float:
    return told_of(observer(*of, **more))[value]


def findings(method: str, rows: int, attack: str) -> list[dict]:
    """Those of all attacks on a site's own part of the MLP whose names begin so."""
    found = observer(method, rows)["findings"]
    return [one for one in found if one["attack"].startswith(attack)]


def back(*of, thing="rows", **more) -> str:
    return f"{100 * figure(f'{thing}_back', *of, **more):.0f} %"


def auc(*of, **more) -> str:
    return f"{figure('member_auc', *of, **more):.2f}"


RANK_4, RANK_16 = "rank-dad:rank=4", "rank-dad:rank=16"
INT8, INT4 = "dad:always=True:wire=int8", "dad:always=True:wire=int4"
SKETCHES, LOCAL = "rank-dad:rank=4:reduce=all_reduce", "local-steps:k=4"
SENTENCES = {
    "`og.Dense()` {} of 8 rows and {} of 32": lambda: (back("dense", 8), back("dense", 32)),
    "whether it was there (AUC {}, where 0.5 is chance; the span of the gradient named {}": (
        lambda: (auc("dense", 32), f"{100 * figure('members_named', 'dense', 32):.0f} %")
    ),
    '{} of 128 rows of `og.DAD(reveal="activations")` and of `og.EDAD()`': (
        lambda: {(back("dad-activations", 128),), (back("edad", 128),)}.pop()
    ),
    "rank 16 gave back {} of 8 rows, rank 4 {}": lambda: (back(RANK_16, 8), back(RANK_4, 8)),
    "AUC {} at rank 4 and 32 rows": lambda: (auc(RANK_4, 32),),
    "`og.Sparse()` is alike: no row, AUC {}": lambda: (auc("sparse", 32),),
    "Who was there they do not hide: AUC {} at 32 rows": (
        lambda: {(auc(INT8, 32),), (auc(INT4, 32),)}.pop()
    ),
    "and none of batches of 8, of which AUC was {}; of 32 it was {}.": (
        lambda: (auc("local-steps:k=16", 8), auc("local-steps:k=16", 32))
    ),
    "AUC {} with ε = 8 in this step, {} with ε = 3, {} with ε = 1": (
        lambda: tuple(auc(f"dense@{epsilon}", 32) for epsilon in (8, 3, 1))
    ),
    "{} of 8 texts came back from `og.Dense()`, and {} of 32": (
        lambda: tuple(back("dense", n, workload="encoder", thing="texts") for n in (8, 32))
    ),
    "of 8 rows each {} came back, of 32 each {}, and AUC at 32 rows was {}": (
        lambda: (*(back("dense", n, seen=SUM) for n in (8, 32)), auc("dense", 32, seen=SUM))
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_figures_in_sentences_are_measured(sentence):
    assert sentence.format(*SENTENCES[sentence]()) in PAGE


def all_of(value: str, seen: str = PART, **wanted) -> list[float]:
    """A figure of all audits with these settings; of methods, those that a test chooses."""
    chosen = wanted.pop("choose", lambda method: True)
    observers = [
        observer
        for one in results()
        if one["settings"].items() >= wanted.items() and chosen(one["settings"]["method"])
        for observer in one["observers"]
        if observer["observer"] == seen
    ]
    found = [told[value] for told in map(told_of, observers) if value in told]
    assert found
    return found


def test_what_is_said_in_words_is_measured_too():
    assert figure("labels_back", "dense", 32) == 1.0
    assert "and all labels came back." in PAGE
    assert [figure("rows_back", INT8, rows) for rows in (1, 8, 32)] == [1.0] * 3
    assert max(all_of("rows_back", workload="mlp", method=INT4)) == 0.0
    assert "Eight bits gave back up to 32 rows, but not exactly; four bits none." in PAGE
    assert max(all_of("rows_back", workload="mlp", method="sparse")) == 0.0
    assert [figure("rows_back", "local-steps:k=16", rows) for rows in (1, 8)] == [1.0, 0.0]
    assert max(all_of("rows_back", choose=lambda method: "@" in method)) == 0.0
    assert "`og.Private` hid all rows" in PAGE
    assert min(all_of("tokens_back", workload="encoder", choose=lambda m: "@" not in m)) == 1.0
    assert "tokens came back in every batch and from every method without noise" in PAGE
    assert max(all_of("tokens_back", choose=lambda method: "@" in method)) == 0.0
    assert max(all_of("rows_back", workload="cnn")) == 0.0
    assert "Of the CNN no image came back" in PAGE
    assert figure("labels_back", "dense", 32, workload="cnn") == 1.0
    for value in ("rows_back", "texts_back", "tokens_back", "members_named"):
        assert max(all_of(value, seen=MASKED)) == 0.0


NAMED = {"`dad` in int8": INT8, "`dad` in int4": INT4}
NAMED |= {f"`{SKETCHES}`, both sketches": SKETCHES, "`local-steps:k=4` (four batches)": LOCAL}


def table_of_audit() -> list[list[str]]:
    """The cells of each method in the table of docs/audit.md."""
    page = (REPOSITORY / "docs" / "audit.md").read_text()
    lines = page[page.index("| method | 1 row |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("cells", table_of_audit(), ids=lambda cells: cells[0])
def test_the_table_of_the_audits_page_is_measured(cells):
    name, *back, labels, auc_at_32 = cells
    method = NAMED.get(name, name.strip("`"))
    for rows, told in zip((1, 8, 32, 128), back, strict=True):
        best = max(findings(method, rows, "rows"), key=lambda one: (one["found"], one["exact"]))
        of = f" of {best['of']}" if method.startswith("local-steps") and best["of"] > rows else ""
        exactly = ", not exactly" if best["exact"] < best["found"] else ""
        assert told == f"{best['found']}{of}{exactly}"
    assert auc_at_32 == auc(method, 32)
    (found,) = findings(method, 32, "labels")
    of = f" of {found['of']}" if found["of"] > 32 else ""
    signs = ", each, by signs" if found["attack"] == "labels by signs" else ""
    assert labels == f"{found['found']}{of}{signs}"


def test_what_the_audits_page_says_of_canaries_is_measured():
    page = (REPOSITORY / "docs" / "audit.md").read_text()
    found = [
        one
        for result in results()
        if result["settings"]["workload"] == "mlp"
        for observer in result["observers"]
        for one in observer["findings"]
    ]
    named = [one for one in found if one["attack"] == "members by the span"]
    assert sum(one["false"] for one in named) == 0
    assert f"none of the MLP's {sum(one['canaries'] for one in named):,} was taken" in page
    assert sum(one["false"] for one in found if one["attack"] == "rows by SPEAR") == 0
    few, one = (findings(m, n, "rows by division")[0] for m, n in ((RANK_4, 8), ("sparse", 1)))
    assert f"{few['false']} in `{RANK_4}` at 8 rows, {one['false']} in `sparse` at 1." in page


@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_rows_in_eight_bits_did_not_come_back_exactly(batch_size):
    rows = findings(INT8, batch_size, "rows")
    assert max(one["found"] for one in rows) == batch_size
    assert max(one["exact"] for one in rows) == 0


def test_tables_are_those_of_the_results(tmp_path):
    tables = [one for one in experiment("audit", full=True).tables if one["name"] == "rows"]
    (table,) = write_tables(tables, results(), tmp_path)
    assert table.markdown == (FOLDER / "rows.md").read_text()
    assert table.markdown.partition("\n\n")[2] in PAGE


def test_every_word_of_the_coverage_table_is_explained():
    lines = PAGE[PAGE.index("| word | the most") :].split("\n\n")[0].splitlines()[2:]
    assert [re.split(r"\s*\|\s*", line)[1] for line in lines] == [word.value for word in Word]
