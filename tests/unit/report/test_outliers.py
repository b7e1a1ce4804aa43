"""Samples that stood out are listed, the worst first."""

from made_up_run import write_run
from outergrad.report.page import write_page
from outergrad.report.recording import load
from outergrad.report.summary import SHOWN, outliers


def test_they_are_named_by_site_step_and_layer(tmp_path):
    told = outliers(load(write_run(tmp_path)))
    assert len(told) == SHOWN
    assert told[0] == "site 1, step 190: sample 7 of 16, 5.9 times the median in encoder.2.weight"
    assert told[-1].startswith("site 1, step 0: sample 7 of 16, 4 times")


def test_the_page_shows_them(tmp_path):
    page = write_page([write_run(tmp_path / "run")], tmp_path / "page.html")
    text = page.path.read_text()
    assert f"Samples that stood out most ({SHOWN})" in text
    assert '"duplicates":[[0.25' in text
    assert '"sample_norm":[[0.1' in text


def test_nothing_is_said_where_nothing_was_recorded(tmp_path):
    recording = load(write_run(tmp_path, sites=1))
    assert outliers(recording) == []
