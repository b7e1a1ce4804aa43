"""The notebook and the programs run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from covering import LONG
from places import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
NOTEBOOK = EXAMPLES / "introspection.ipynb"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # those of Jupyter's packages are theirs
def test_the_notebook_draws_its_figures(tmp_path):
    """With a third of its epochs, unless OUTERGRAD_LONG=1 asks for all."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if not LONG:
        training = next(cell for cell in notebook.cells if "--epochs 12" in cell.source)
        training.source = training.source.replace("--epochs 12", "--epochs 4")
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=250, kernel_name="python3", resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    said = "".join(output.get("text", "") for output in outputs)
    reached = [float(percent) for percent in re.findall(r"test accuracy ([0-9.]+)", said)]
    assert len(reached) == 2
    assert min(reached) >= 90
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"exact", "adaptive"}


def output_of(folder: Path, *command: str) -> str:
    """What a program prints in a folder of its own."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    options = {"cwd": folder, "env": settings, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *command], check=False, timeout=250, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_trainer_of_transformers_learns(tmp_path):
    said = output_of(tmp_path, *TORCHRUN, str(EXAMPLES / "huggingface.py"))
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", said)]
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]
    assert said.count("bytes in the last step") == 1
    saved = tmp_path / "runs" / "huggingface" / "checkpoint-60"
    assert {path.name for path in saved.iterdir()} >= {"outergrad_0.pt", "outergrad_1.pt"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lightning_learns(tmp_path):
    said = output_of(tmp_path, str(EXAMPLES / "lightning_strategy.py"))
    assert float(said.split("test accuracy ")[1].split("%")[0]) > 90
    assert len(list((tmp_path / "checkpoints" / "outergrad").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hospitals_train_until_their_budget_is_spent(tmp_path):
    said = output_of(tmp_path, *TORCHRUN, str(EXAMPLES / "private_hospitals.py"))
    assert float(re.search(r"area under the curve on \d+ other images: ([0-9.]+)", said)[1]) > 0.8
    assert "spent after 150 steps" in said
    spent = {
        whom: float(re.search(rf"^{whom}.* ([0-9.]+)$", said, re.MULTILINE)[1])
        for whom in ("whoever gets the model", "another site", "the hub")
    }
    assert 7.9 < spent["another site"] <= 8
    assert spent["another site"] == spent["the hub"] > spent["whoever gets the model"] > 0
    assert "per patient" in said
    assert {path.name for path in tmp_path.iterdir()} == {"ledger-0.json", "ledger-1.json"}
