"""The notebook in recipes/ runs from top to bottom, on real parts."""

import os
import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.engine]


def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    notebook = nbformat.read(ROOT / "recipes" / "notebook.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=dict(os.environ))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    printed = "".join(output.get("text", "") for output in outputs)
    assert printed.count("→") == 3  # one sample of each step
    listed = outputs[-1]["data"]["text/plain"]
    assert "'model'" in listed and "'report.html'" in listed
