"""The notebooks in recipes/ run from top to bottom, on real parts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from docs.check import small_recipe
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the recipes, where Jupyter starts their notebooks, with a cache in which a policy from scratch is warm-started once.
    The quickstart has little work in it."""
    folder = Path(shutil.copytree(ROOT / "recipes", tmp_path_factory.mktemp("notebooks") / "recipes"))
    tree = small_recipe("quickstart") | {"policy": {"hidden_size": 64, "layers": 2}}
    (folder / "quickstart.yaml").write_text(yaml.safe_dump(tree))
    return folder


def execute(name: str, folder: Path, replaced: dict[str, str] | None = None) -> list[Any]:
    """Run a notebook and return its outputs. `replaced`: pieces of its code, to make it shorter."""
    notebook = nbformat.read(ROOT / "recipes" / name, as_version=4)
    for cell in notebook.cells:
        for old, new in (replaced or {}).items():
            cell.source = cell.source.replace(old, new)
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}}).execute(env=environment)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    return outputs


LITTLE = {"warm_start.steps=30": "warm_start.steps=5", "evaluate.prompts=32": "evaluate.prompts=8"}


def printed(outputs: list[Any]) -> str:
    return "".join(output.get("text", "") for output in outputs)


def shown(outputs: list[Any]) -> list[str]:
    return [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]


def test_every_notebook_is_executed_here() -> None:
    assert {path.name for path in (ROOT / "recipes").glob("*.ipynb")} == {
        "notebook.ipynb",
        "planner_notebook.ipynb",
        "comparison_notebook.ipynb",
        "workflow_notebook.ipynb",
    }


@pytest.mark.slow  # imports in a process of its own
def test_the_planner_plans_and_draws(scratch: Path) -> None:
    outputs = execute("planner_notebook.ipynb", scratch)
    said, plots = printed(outputs), shown(outputs)
    assert len(plots) == 3 and all("<svg" in plot for plot in plots)
    cost = {line.split()[0]: float(line.split()[-2]) for line in said.splitlines() if "engines," in line}
    assert cost["cheapest"] <= cost["between"] <= cost["fastest"] and cost["budget"] <= cost["fastest"]


@pytest.mark.ray
@pytest.mark.engine
def test_the_loop_runs(scratch: Path) -> None:
    outputs = execute("notebook.ipynb", scratch, LITTLE)
    assert printed(outputs).count("→") == 3  # one sample of each step
    listed = outputs[-1]["data"]["text/plain"]
    assert "'model'" in listed and "'report.html'" in listed


@pytest.mark.long  # two of the runs above; `test_autoscaler.py` and `test_inline.py` have the change of the objective and the views
@pytest.mark.ray
@pytest.mark.engine
def test_two_settings_are_compared(scratch: Path) -> None:
    outputs = execute("comparison_notebook.ipynb", scratch, LITTLE)
    lines = [line for line in printed(outputs).splitlines() if "engines," in line]
    assert len(lines) == 8
    plan, figure, record = shown(outputs)
    assert "chosen" in plan and figure.count("<svg") == 3 and "cheapest" in figure and "fastest" in figure
    assert "done, step 4 of 4" in record


@pytest.mark.long  # `test_workflow.py` runs the same stages
@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.learner
def test_the_workflow_runs(scratch: Path) -> None:
    """Few rows, and a reward of any kind: an untrained policy is never right."""
    (scratch / "reward.py").write_text("def spread(prompt, response, row):\n    return len(response)\n")
    smaller = {'"rows": 64}': '"rows": 12}', '"rows": 4000}': '"rows": 64}', '"prompts": 64': '"prompts": 4'}
    smaller |= {'"reward": {"function": "task"}': '"reward": {"function": "reward.py:spread"}', '"max_tokens": 96': '"max_tokens": 16'}
    outputs = execute("workflow_notebook.ipynb", scratch, smaller)
    table, record = shown(outputs)
    assert "<td>sft</td>" in table and "<td>dpo</td>" in table and "done, step" in record
    assert (scratch / "runs" / "workflow-notebook" / "report.html").is_file()
