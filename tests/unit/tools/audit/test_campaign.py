"""The audit finds what must be found, and nothing where nothing can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from outergrad.tools.audit import audit as audits
from outergrad.tools.audit.audit import CANARIES, PART, SUM
from outergrad.tools.audit.campaign import Campaign
from outergrad.tools.audit.findings import Finding, Truth
from outergrad.tools.audit.observed import Asked, observed
from outergrad.tools.audit.places import places_of
from outergrad.tools.audit.verdict import verdict
from outergrad.tools.audit.view import View, masked, view_of
from outergrad_lab.data.dataset import Format
from outergrad_lab.models import build_model

ROWS = Format(shape=(40,), classes=10)
TEXTS = Format(shape=(16,), classes=40, tokens=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return build_model("mlp", ROWS, (200, 200))


def drawn(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 40, generator=generator)
    return x, torch.randint(10, (rows,), generator=generator)


def truth(x: Tensor, y: Tensor) -> Truth:
    return Truth(x=x, y=y, outside=drawn(CANARIES, 99))


def findings(name: str, rows: int) -> dict[str, Finding]:
    """Findings in the part of the first of two sites."""
    model, batch = network(), drawn(rows, 1)
    asked = Asked.of(name)
    (sent, _) = observed(model, asked, [[batch], [drawn(rows, 2)]])
    view = view_of(sent, dict(model.named_parameters()), changed_by=asked.changed_by)
    return looked(model, view, truth(*batch))


def looked(model: nn.Module, view: View, about: Truth) -> dict[str, Finding]:
    found = Campaign(model, places_of(model, about.x)).on(view, about)
    return {finding.attack: finding for finding in found}


@pytest.mark.parametrize("name", ["dense", "dad:always=True"])
def test_the_row_of_a_batch_of_one_comes_back_exactly(name):
    found = findings(name, 1)
    assert (found["rows by division"].exact, found["rows by division"].false) == (1, 0)
    assert (found["labels"].found, found["members by the span"].found) == (1, 1)


def test_the_row_of_one_local_step_comes_back_but_for_the_rounding_of_weights():
    found = findings("local-steps:k=1", 1)["rows by division"]
    assert (found.found, found.false) == (1, 0)


def test_all_rows_come_back_from_activations():
    found = findings("dad-activations", 8)
    assert (found["rows in the message"].exact, found["rows in the message"].false) == (8, 0)


def test_all_rows_come_back_from_the_hidden_activations_of_edad():
    found = findings("edad:always=True", 8)
    assert (found["rows behind activations"].found, found["rows behind activations"].false) == (
        8,
        0,
    )


@pytest.mark.parametrize("name", ["dense", "dad:always=True"])
def test_all_rows_of_eight_and_labels_of_32_come_back_from_a_gradient(name):
    found = findings(name, 8)
    assert (found["rows by SPEAR"].exact, found["rows by SPEAR"].false) == (8, 0)
    assert findings(name, 32)["labels"].found == 32


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("name", ["dense", "dad:always=True", "dad-activations", "rank-dad:rank=2"])
def test_no_canary_is_taken_for_a_member(name, rows):
    found = findings(name, rows)["members by the span"]
    assert found.canaries == CANARIES
    assert found.false == 0


def test_labels_come_back_row_by_row_from_the_last_deltas_of_edad():
    found = findings("edad:always=True", 8)["labels by signs"]
    assert (found.found, found.of, found.false) == (8, 8, 0)


@pytest.mark.parametrize("name", ["dense", "dad-activations", "edad:always=True"])
def test_canaries_are_planted_beside_every_attack_but_those_on_labels(name):
    for attack, found in findings(name, 8).items():
        assert found.canaries == (0 if attack.startswith("labels") else CANARIES), attack


def nothing_is_found(found: dict[str, Finding]) -> None:
    for attack, finding in found.items():
        if attack == "members by products":
            assert abs(finding.found - 0.5) < 4 * finding.deviation
        elif attack != "labels":  # whose guesses are right by chance: tested below
            assert (finding.found, finding.false) == (0, 0), attack


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_masked_parts_and_noise_tell_nothing(rows):
    model, batch = network(), drawn(rows, 1)
    (sent, _) = observed(model, Asked.of("dense"), [[batch], [drawn(rows, 2)]])
    view = view_of(sent, dict(model.named_parameters()))
    generator = torch.Generator().manual_seed(0)
    noise = {n: torch.randn(g.shape, generator=generator) for n, g in view.gradients.items()}
    for told in (masked(view), View(gradients=noise)):
        nothing_is_found(looked(model, told, truth(*batch)))


def test_another_batch_is_not_found():
    model, batch = network(), drawn(8, 1)
    (sent, _) = observed(model, Asked.of("dense"), [[drawn(8, 2)], [drawn(8, 3)]])
    found = looked(model, view_of(sent, dict(model.named_parameters())), truth(*batch))
    assert found["rows by SPEAR"].found == 0
    assert found["rows by SPEAR"].false == 8  # rows indeed, of somebody else
    assert found["members by the span"].found == 0
    assert (
        abs(found["members by products"].found - 0.5) < 4 * found["members by products"].deviation
    )


def test_labels_of_masked_parts_are_guesses():
    model, right, guessed = network(), 0.0, 0.0
    for seed in range(40):
        batch = drawn(8, seed)
        zeros = {n: torch.randn_like(p) * 1e-3 for n, p in model.named_parameters()}
        campaign = Campaign(model, places_of(model, batch[0]))  # whose other attacks take seconds
        (found,) = campaign._labels(masked(View(gradients=zeros)), truth(*batch))
        right, guessed = right + found.found, guessed + found.guessed
    assert right < 1.2 * guessed


def test_texts_of_a_gpt_come_back_and_those_of_masked_parts_do_not():
    torch.manual_seed(0)
    model = build_model("gpt", TEXTS, (96,))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(40, (20, 8), generator=generator)
    x, outside = ids[:8], (ids[16:], ids[16:])
    (sent, _) = observed(model, Asked.of("dense"), [[(x, x)], [(ids[8:16], ids[8:16])]])
    view = view_of(sent, dict(model.named_parameters()))
    about = Truth(x=x, y=x, outside=outside, vocabulary=40)
    found = looked(model, view, about)["texts by spans"]
    assert (found.found, found.of, found.false) == (8, 8, 0)
    assert sorted(text.tolist() for text in found.texts) == sorted(x.tolist())
    found = looked(model, masked(view), about)["texts by spans"]
    assert (found.found, found.false, found.texts) == (0, 0, [])


def test_matching_is_for_few_rows_and_only_where_asked():
    model, batch = network(), drawn(1, 1)
    (sent, _) = observed(model, Asked.of("dense"), [[batch], [drawn(1, 2)]])
    view = view_of(sent, dict(model.named_parameters()))
    campaign = Campaign(model, places_of(model, batch[0]))
    asked = {f.attack: f for f in campaign.on(view, truth(*batch), matching=True)}
    assert "inputs by matching" not in {f.attack for f in campaign.on(view, truth(*batch))}
    ((original, back),) = asked["inputs by matching"].pairs
    assert original.shape == back.shape == (40,)


def finding(attack: str, found: float, of: int = 8) -> Finding:
    return Finding(attack=attack, layer="0", found=found, of=of, figure=f"{found:g} of {of} rows")


def test_a_verdict_says_what_came_back_and_to_whom():
    about = {"method": "dense", "who": "somebody"}
    part = audits.Seen(**about, rows=8, observer=PART, findings=[finding("rows by SPEAR", 8)])
    total = audits.Seen(**about, rows=8, observer=SUM, findings=[finding("rows by SPEAR", 0)])
    told = verdict([part, total])
    assert not [line for line in told if line.startswith("Least came back")]
    larger = audits.Seen(**about, rows=32, observer=PART, findings=[finding("rows by SPEAR", 0)])
    assert "Least came back of: dense at 32." in verdict([part, total, larger])
    assert told[0].startswith("dense: 8 of 8 rows (rows by SPEAR) in batches of up to 8")
    assert "not of sums" in told[0]
    assert any("What to change" in one for one in told)
    nothing = replace(part, findings=[finding("rows by SPEAR", 0)])
    assert verdict([nothing])[0] == "dense: nothing came back beyond chance."
    refused = replace(part, findings=[], refused="no")
    assert "does not go with this model" in verdict([refused])[0]


def test_chance_has_no_share():
    guess = finding("labels", 3)
    assert replace(guess, guessed=3).share == 0
    assert replace(guess, found=8, guessed=3).share == 1
    alone = Finding(attack="members", layer="", found=1.0, of=0, deviation=0.3, figure="")
    assert alone.share == 0
    assert replace(alone, found=0.9, deviation=0.01).share == pytest.approx(0.76)
