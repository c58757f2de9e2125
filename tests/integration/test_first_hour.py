"""The notebook examples/first_hour.ipynb runs from its first cell to its last."""

import os
import shutil
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the test extra (nbformat is missing)")
nbclient = pytest.importorskip("nbclient", reason="needs the test extra (nbclient is missing)")
pytest.importorskip("ipykernel", reason="needs the test extra (ipykernel is missing)")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_valid_and_has_no_outputs(notebook):
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs(notebook, tmp_path):
    shutil.copy(ROOT / "examples" / "classify.py", tmp_path)
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.startswith("!"):
            cell.source += "\nassert _exit_code == 0"  # a command that fails stops no notebook
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, resources=resources).execute(env=environment)
    output = tmp_path / "output" / "first_hour"
    for made in ("run/summary.json", "accuracy.json", "routing/routing.png", "exported/model.onnx"):
        assert (output / made).is_file()
    kinds = [kind for cell in notebook.cells for kind in _kinds(cell)]
    assert kinds.count("image/png") == 3


def _kinds(cell) -> list[str]:
    """The MIME types of what a cell shows."""
    return [kind for output in cell.get("outputs", []) for kind in output.get("data", {})]
