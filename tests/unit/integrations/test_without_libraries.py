"""outergrad itself needs none of the libraries, and an integration says which extra it needs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

LIBRARIES = {
    "accelerate": ("accelerate", "huggingface"),
    "transformers": ("transformers", "huggingface"),
    "lightning": ("lightning", "lightning"),
    "fabric": ("lightning", "lightning"),
    "nvflare": ("nvflare", "nvflare"),
}


@pytest.mark.slow
def test_outergrad_imports_none_of_them():
    program = "import sys, outergrad, outergrad.integrations; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "outergrad.integrations" in done.stdout.split()
    assert not set(LIBRARIES) & set(done.stdout.split())


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_missing_is_named_with_its_extra(name, monkeypatch):
    library, extra = LIBRARIES[name]
    for loaded in [m for m in sys.modules if m.startswith(f"{library}.")]:
        monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"outergrad.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {library}.*pip install 'outergrad\[{extra}\]'"):
        importlib.import_module(f"outergrad.integrations.{name}")
