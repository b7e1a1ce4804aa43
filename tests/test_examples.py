"""The notebook runs as it stands."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "introspection.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Jupyter's packages are theirs
def test_the_notebook_draws_its_figures(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert "".join(output.get("text", "") for output in outputs).count("test accuracy 9") == 2
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"exact", "adaptive"}
