"""The programs of docs/private.md run, and print what was released."""

from __future__ import annotations

import pytest

import outergrad as og
from places import REPOSITORY
from ranks import run_on_lasting_groups
from written import blocks

PAGE = [b for b in blocks(REPOSITORY / "docs" / "private.md") if b.language == "python"]


def test_the_programs_of_the_page_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")
    monkeypatch.chdir(tmp_path)
    distribute = og.distribute

    def body(rank, group):
        monkeypatch.setattr(
            og, "distribute", lambda *args, **about: distribute(*args, group=group, **about)
        )
        names: dict[str, object] = {}
        for block in PAGE:
            exec(compile(block.code, block.place, "exec"), names)
        return names["ledger"].steps

    assert run_on_lasting_groups(1, body) == [100]
    told = capsys.readouterr().out
    assert "after 20 released steps" in told  # by Poisson batches of all rows
    assert "after 100 released steps" in told  # by batches of parts in turn
    assert (tmp_path / "ledger.json").exists()
