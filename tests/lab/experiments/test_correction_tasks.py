"""Tasks that correct changed images, on made-up ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Format, synthetic
from outergrad_lab.experiments import correction
from outergrad_lab.experiments.correction import CHANGES, WAYS, CorrectionWork
from outergrad_lab.experiments.task import Context, read

SMALL = {"data": "mnist", "steps": 2, "batch_size": 4, "test_rows": 8, "quantiles": 4}


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    images = Format(shape=(784,), classes=3)
    monkeypatch.setattr(correction, "load", lambda *_: synthetic(images, 40, seed=0))


def test_every_change_is_tested_in_every_way():
    told: list[int] = []
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    found = read(CorrectionWork, SMALL).run(context)
    assert told == [2 + len(CHANGES)] + [1] * (2 + len(CHANGES))
    assert json.loads(json.dumps(found)) == found
    cases = [(row["case"], row["way"]) for row in found["rows"]]
    assert cases == [(change, way) for change in CHANGES for way in WAYS]
    # 48 channels of 4 quantiles and two counts, as floats, by one of two sites
    assert found["shared_bytes"] == 4 * (48 * 4 + 2)


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "none"])
def test_a_change_changes_and_repeats(change):
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    first, again = (CHANGES[change](x, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.shape == x.shape
    assert first.equal(again)
    assert not first.allclose(x, atol=0.01)


def test_data_without_images_is_refused():
    with pytest.raises(RecipeError, match="data must be one of mnist"):
        read(CorrectionWork, {**SMALL, "data": "imdb"})
