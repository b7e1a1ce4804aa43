"""What docs/ledger.md shows is what its program prints."""

from __future__ import annotations

import pytest

from places import REPOSITORY
from written import blocks

PAGE = [*blocks(REPOSITORY / "docs" / "ledger.md")]


def test_the_program_of_the_page_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in PAGE:
        if block.language == "python":
            exec(compile(block.code, block.place, "exec"), names)
    (shown,) = (block.code for block in PAGE if block.language == "text")
    assert capsys.readouterr().out == shown
    assert (tmp_path / "ledger-0.json").exists()
