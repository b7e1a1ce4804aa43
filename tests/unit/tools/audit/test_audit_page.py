"""The page of an audit: texts position by position, figures per layer, and nothing that scrolls."""

from __future__ import annotations

import re

import torch

from outergrad.tools.audit.audit import PART, Question, Seen
from outergrad.tools.audit.findings import Finding
from outergrad.tools.audit.page import write_audit
from outergrad.tools.audit.texts import NONE, paired, text_pair

TRUTH = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])


def test_each_found_text_stands_beside_the_true_one_that_it_resembles():
    found = torch.tensor([[7, 0, 9], [1, 2, 3]])
    pairs = [(truth.tolist(), back.tolist()) for truth, back in paired(TRUTH, found)]
    assert pairs == [
        ([1, 2, 3], [1, 2, 3]),
        ([7, 8, 9], [7, 0, 9]),
        ([4, 5, 6], [NONE] * 3),
    ]


def test_a_found_text_is_shown_once():
    twice = TRUTH[[0, 0]]
    pairs = paired(twice, TRUTH[:1])
    assert [back.tolist() for _, back in pairs] == [[1, 2, 3], [NONE] * 3]


def test_without_a_found_text_there_are_the_true_ones():
    pairs = paired(TRUTH, TRUTH[:0], most=2)
    assert [truth.tolist() for truth, _ in pairs] == [[1, 2, 3], [4, 5, 6]]
    assert all((back == NONE).all() for _, back in pairs)


def test_wrong_positions_alone_are_marked():
    shown = text_pair(TRUTH[0], torch.tensor([1, 0, NONE]))
    assert re.findall("<mark>(.*?)</mark>", shown) == ["0", "\N{MIDDLE DOT}"]
    assert "1 of 3 positions" in shown
    assert "<mark>" not in text_pair(TRUTH[0], TRUTH[0])


def page(tmp_path, *findings: Finding) -> str:
    seen = [Seen(method="dense<", rows=3, observer=PART, who="every other site", findings=findings)]
    path = tmp_path / "page.html"
    write_audit(Question(model="mine:<b>", methods=("dense",)), seen, path)
    return path.read_text()


TEXTS = Finding(
    attack="texts by spans",
    layer="attention.<in>",
    found=1,
    of=3,
    false=1,
    figure="1 of 3 texts",
    pairs=paired(TRUTH, torch.tensor([[1, 2, 3], [4, 0, 6]])),
)


def test_texts_are_shown_with_what_is_wrong_and_no_picture(tmp_path):
    found = page(tmp_path, TEXTS)
    assert found.count('class="wrong"') == 4
    assert "<img" not in found
    assert "2 of 3 positions" in found


def test_rows_are_pictures(tmp_path):
    pairs = [(torch.rand(9), torch.rand(9))]
    rows = Finding(
        attack="rows by division", layer="0", found=1, of=3, figure="1 of 3 rows", pairs=pairs
    )
    found = page(tmp_path, rows)
    assert found.count("<img") == 2
    assert 'class="texts"' not in found


def test_every_attack_is_listed_with_its_layer(tmp_path):
    span = Finding(
        attack="members by the span", layer="0", found=0, of=3, canaries=32, figure="0 of 3 members"
    )
    found = page(tmp_path, TEXTS, span)
    listed = found[found.index("<details>") :]
    assert "<td>attention.&lt;in&gt;</td><td>1 of 3 texts</td><td>33%</td><td>1</td>" in listed
    assert "<td>0</td><td>0 of 3 members</td><td>0%</td><td>0, 32 canaries</td>" in listed


def test_every_table_scrolls_in_its_own_box_and_names_are_no_html(tmp_path):
    found = page(tmp_path, TEXTS)
    assert len(re.findall('<div class="wide"><table', found)) == found.count("<table") > 2
    assert ".wide { overflow-x: auto; }" in found
    assert "dense<" not in found
    assert "mine:<b>" not in found
