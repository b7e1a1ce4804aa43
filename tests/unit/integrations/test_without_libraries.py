"""outergrad itself needs none of the libraries, and an integration says what to install for it."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

LIBRARIES = {
    "accelerate": ("accelerate", "'accelerate>="),
    "transformers": ("transformers", "'transformers>=[^']*' 'accelerate>="),
    "lightning": ("lightning", "'lightning>="),
    "fabric": ("lightning", "'lightning>="),
    "nvflare": ("nvflare", "'nvflare>=[^']*' 'grpcio>=[^']*' 'cryptography>="),
}


@pytest.mark.slow
def test_outergrad_imports_none_of_them():
    program = "import sys, outergrad, outergrad.integrations; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "outergrad.integrations" in done.stdout.split()
    assert not set(LIBRARIES) & set(done.stdout.split())


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_missing_is_named_with_what_installs_it(name, monkeypatch):
    library, packages = LIBRARIES[name]
    for loaded in [m for m in sys.modules if m.startswith(f"{library}.")]:
        monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"outergrad.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {library}.*: pip install {packages}"):
        importlib.import_module(f"outergrad.integrations.{name}")
