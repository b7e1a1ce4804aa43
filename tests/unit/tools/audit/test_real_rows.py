"""Named workloads have the rows of their data sets where these are, and it is said which."""

from __future__ import annotations

import gzip

import pytest
import torch
from torch import Tensor

from outergrad.tools.audit.findings import Finding
from outergrad.tools.audit.subjected import subjected
from outergrad_lab.data import decoder, folder_of, load
from small_files import TRAIN, write


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTERGRAD_CACHE", str(tmp_path / "cache"))


def as_rows(x: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in x.flatten(1).tolist()}


def test_rows_of_the_data_set_are_used_where_it_is_there(tmp_path):
    write("mnist", tmp_path)
    data = load("mnist", tmp_path)
    found = subjected("mlp", 10, data_dir=tmp_path)
    assert found.source == "rows of mnist"
    assert found.x.shape == (10, 784)
    assert as_rows(found.x) <= as_rows(data.x_train)
    labels = {tuple(x): int(y) for x, y in zip(data.x_train.tolist(), data.y_train, strict=True)}
    assert [labels[tuple(x)] for x in found.x.tolist()] == found.y.tolist()
    again = subjected("mlp", 10, data_dir=tmp_path)
    assert torch.equal(found.x, again.x)


def test_without_the_data_set_rows_are_made_up_and_it_is_said_why(tmp_path):
    assert subjected("mlp", 3).source == "made-up rows"
    assert subjected("wide-mlp", 3, data_dir=tmp_path).source == "made-up rows"
    assert "mnist is not there" in subjected("mlp", 3, data_dir=tmp_path).source
    write("mnist", tmp_path)
    found = subjected("mlp", TRAIN + 1, data_dir=tmp_path)
    assert f"mnist has {TRAIN} rows, and {TRAIN + 1} are needed" in found.source
    assert len(found.x) == TRAIN + 1


@pytest.mark.parametrize("name", ["tinyshakespeare", "war-and-peace"])
def test_characters_are_decoded_to_the_text_that_was_read(tmp_path, name):
    write(name, tmp_path)
    (file,) = folder_of(name, tmp_path).iterdir()
    text = gzip.decompress(file.read_bytes()).decode()
    decode = decoder(name, tmp_path)
    row = load(name, tmp_path).x_train[1].tolist()
    assert decode is not None
    assert len(decode(row)) == len(row)
    known = decode(row).split("\N{REPLACEMENT CHARACTER}")
    assert all(part in text for part in known)


def test_tokens_are_decoded_and_what_came_back_is_told_as_a_text(tmp_path):
    pytest.importorskip("tokenizers")
    write("ag-news", tmp_path)
    found = subjected("encoder", 4, data_dir=tmp_path)
    assert found.source == "rows of ag-news"
    back = Finding(
        attack="texts", layer="", found=1, of=1, figure="", pairs=[(found.x[0], found.x[0])]
    )
    (text,) = found.texts_of([back])
    source = gzip.decompress((folder_of("ag-news", tmp_path) / "train_subset.csv.gz").read_bytes())
    words = text.replace("[PAD]", " ").split()
    assert words
    assert all(word in source.decode().lower() for word in words)


def test_rows_that_are_no_texts_have_no_decoder(tmp_path):
    write("mnist", tmp_path)
    assert decoder("mnist", tmp_path) is None
    assert subjected("mlp", 1, data_dir=tmp_path).texts_of([]) == []
