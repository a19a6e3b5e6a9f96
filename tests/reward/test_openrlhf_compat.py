"""What reward files import from OpenRLHF works without it, and does not stand in the way of the real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhfless_ray.reward.math_answer import extract_boxed_answer, grade_answer

ROOT = Path(__file__).resolve().parents[2]
FILE = """
from openrlhf.utils import extract_boxed_answer, grade_answer
from openrlhf.utils.logging_utils import init_logger
import openrlhf.utils.math_utils as maths
logger = init_logger(__name__)
def reward_func(queries, prompts, labels, **kwargs):
    assert maths.grade_answer is grade_answer
    return {"rewards": [float(grade_answer(extract_boxed_answer(q), label)) for q, label in zip(queries, labels)]}
"""
USE = f"""
from rlhfless_ray.reward.openrlhf_reward import QuerySource
from rlhfless_ray.reward.user_file import UserFile
for _ in range(2):
    worker = QuerySource(UserFile("r.py", {FILE!r}), "reward_func", "answer").worker(60.0)
print([s.reward if s.error is None else s.error for s in worker.score([(0, r"so \\boxed{{\\frac12}}", "", "0.5"), (1, "2", "", "2")])])
"""


def run(code: str, *paths: Path) -> str:
    path = ":".join(map(str, [*paths, ROOT]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env={"PYTHONPATH": path}, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow  # imports in a process of its own
def test_a_file_that_imports_them_loads_and_scores() -> None:
    assert run(USE) == "[1.0, 0.0]"


def test_an_installed_package_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "openrlhf" / "utils").mkdir(parents=True)
    (tmp_path / "openrlhf" / "__init__.py").touch()
    (tmp_path / "openrlhf" / "utils" / "__init__.py").write_text("mine = 1")
    said = run(
        "from rlhfless_ray.reward.openrlhf_compat import install_modules; install_modules()\n"
        "import openrlhf.utils as u; print(u.mine, u.__file__)",
        tmp_path,
    )
    assert said == f"1 {tmp_path / 'openrlhf' / 'utils' / '__init__.py'}"


def checkout(folder: Path, utils: str) -> Path:
    """What matters of OpenRLHF's repository."""
    (folder / "openrlhf" / "utils").mkdir(parents=True)
    (folder / "openrlhf" / "__init__.py").touch()
    (folder / "openrlhf" / "utils" / "__init__.py").write_text(utils)
    (folder / "openrlhf" / "utils" / "agent.py").write_text("import nowhere\nclass MultiTurnAgentExecutor: theirs = True\n")
    return folder


@pytest.mark.parametrize("works", [True, False])
def test_agents_subclass_our_classes_also_in_a_checkout_of_openrlhf(tmp_path: Path, works: bool) -> None:
    """Theirs know other engines; and a checkout may lack what it needs itself."""
    (tmp_path / "agent.py").write_text(
        "from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor\n"
        "from openrlhf.utils import extract_boxed_answer\nimport openrlhf.utils.agent as again\n"
        "assert again.MultiTurnAgentExecutor is MultiTurnAgentExecutor\n"
        "class Agent(AgentInstanceBase): ...\n"
        "class AgentExecutor(MultiTurnAgentExecutor):\n    def __init__(self): super().__init__(Agent)\n"
    )
    theirs = "extract_boxed_answer = 'theirs'\n" if works else "import flash_attention_that_is_not_there\n"
    said = run(
        f"from rlhfless_ray.agent.load_agent import AgentSource\nsource = AgentSource.load({str(tmp_path / 'agent.py')!r})\n"
        "print(source.contract, source.file.module().extract_boxed_answer == 'theirs')",
        checkout(tmp_path / "OpenRLHF", theirs),
    )
    assert said == f"executor {works}"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"a \boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{x}", "x"),
        (r"\boxed{a{b}c}", "a{b}c"),
        ("none", None),
        (r"cut \boxed{1", None),
        (r"\boxed{}", ""),
        (r"\fbox{1} \boxed{2}", "2"),
        (r"\boxed{1} \fbox{2}", "2"),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert extract_boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("given", "truth", "same"),
    [
        ("72", "72", True),
        ("1,250", "1250", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\dfrac 12", r"\frac12", True),
        ("x+1", "1+x", True),
        (r"\left(1, 2\right)", "(1,2)", True),
        ("72", "73", False),
        ("", "1", False),
        (None, "1", False),
        ("1", None, False),
        ("11/2", "1 1/2", False),
        (r"\sqrt{2}", r"\sqrt{3}", False),
        ("(1,2)", "(2,1)", False),
        ("1.5", "1 1/2", True),
        ("blue", "blue", True),
        ("blue", "red", False),
    ],
)
def test_the_same_answer(given: str | None, truth: str | None, same: bool) -> None:
    assert grade_answer(given, truth) is same
