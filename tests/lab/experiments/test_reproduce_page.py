"""The page: whole in itself, and nothing in it is taken for markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from made_up_results import timing, training

pytest.importorskip("pandas")
pytest.importorskip("seaborn")

from outergrad_lab.experiments.figures import write_figures
from outergrad_lab.experiments.page import write_page
from outergrad_lab.experiments.tables import write_tables

NASTY = "<script>alert('1')</script> & \"quoted\""
TABLE = {"name": "accuracy", "title": "Accuracy", "rows": "method", "value": "accuracy"}
FIGURE = {"name": "loss", "title": "Loss", "x": "step", "y": "loss", "lines": "method"}


class Reader(HTMLParser):
    """Collects tags, what they refer to and the text."""

    def __init__(self):
        super().__init__()
        self.tags, self.sources, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [v for name, v in attrs if name in ("src", "href", "srcset")]

    def handle_data(self, data):
        self.text.append(data)


def experiment(text="An experiment"):
    names = ("name", "title", "shows", "claim", "command")
    return SimpleNamespace(size="small", **dict.fromkeys(names, text))


def page(folder, text="An experiment", results=None):
    """The page's source and what a reader finds."""
    results = results or [training(method=text, machine=text), timing()]
    tables = write_tables([TABLE | {"title": text}], results, folder)
    figures = write_figures([FIGURE | {"title": text}], results, folder)
    source = write_page(experiment(text), results, tables, figures, folder).read_text("utf-8")
    reader = Reader()
    reader.feed(source)
    return source, reader


def test_it_needs_nothing_else(tmp_path):
    source, reader = page(tmp_path)
    assert reader.sources
    assert all(found.startswith("data:") for found in reader.sources)
    assert not re.search(r"url\(|@import|https?:", source)
    assert "default-src 'none'" in source
    assert "img" in reader.tags


def test_everything_is_escaped(tmp_path):
    source, reader = page(tmp_path, NASTY)
    assert "script" not in reader.tags
    assert source.count("alert('1')") == 0
    assert "".join(reader.text).count(NASTY) >= 5
    assert "$" not in "".join(reader.text)


def test_it_says_what_was_run(tmp_path):
    trained = [training(method=m, lr=0.001) for m in ("pooled", "dad")]
    _, reader = page(tmp_path, results=[*trained, timing()])
    text = " ".join(reader.text)
    for said in (
        "25 s in 3 runs",
        "2 cores of a made-up CPU",
        "outergrad 0.9.0, PyTorch 2.13.0",
        "2026-02-03",
        "Trainings (2)",
        "data mnist, model mlp, sites 2, seed 0, learning rate 0.001",
        "Step times (1)",
        "90.0 %",
    ):
        assert said in text


def test_it_opens_before_anything_was_run(tmp_path):
    source = write_page(experiment(), [], [], [], tmp_path).read_text("utf-8")
    assert "An experiment" in source
    assert "<h2>Tables</h2>" not in source
