"""What the modules may import: no circles of modules or folders, no stage that holds another one, and no simulator in what trains.
Read from the sources, so imports inside functions and under TYPE_CHECKING count. And class names, of which each is defined once."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = {
    "learn": {"rlhfless_ray.learn.learn_stage"},
    "prefix": {"rlhfless_ray.prefix.prefix_stage"},
    "reward": {"rlhfless_ray.reward.prescored_stage", "rlhfless_ray.reward.score_stage"},
    "rollout": {"rlhfless_ray.rollout.rollout_stage"},
}


def modules(package: str) -> dict[str, Path]:
    """{dotted name: file}; a package is named by its folder."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "shim" not in parts and not any(part.startswith(".") for part in parts):
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


Node = ast.Import | ast.ImportFrom


@cache
def contents(path: Path) -> tuple[list[Node], list[tuple[str, int]]]:
    """The import statements of a file, also inside functions and under TYPE_CHECKING, and the names and lines of its outer classes."""
    tree = ast.parse(path.read_text())
    classes = [(node.name, node.lineno) for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node for node in statements(tree) if isinstance(node, Node)], classes


def statements(block: ast.AST) -> Iterator[ast.AST]:
    """The statements of a block and of those inside it. ast.walk would visit ten times as many expressions."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(block, name, ()):
            if isinstance(node, ast.AST):
                yield node
                yield from statements(node)


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules among `known` that this one imports by name."""
    found = set()
    for node in contents(path)[0]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            assert node.level == 0, f"{name}: imports are absolute"
            found |= {inner if (inner := f"{node.module}.{alias.name}") in known else node.module for alias in node.names}
    return {one for one in found if one in known and one != name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = []
            while not component or component[-1] != name:
                component.append(stack.pop())
            found.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return [component for component in found if len(component) > 1]


@cache
def graph_of(package: str) -> dict[str, set[str]]:
    known = modules(package)
    return {name: imports(name, path, known) for name, path in known.items()}


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}}
    assert circles(graph) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circles(graph_of("rlhfless_ray")) == []
    assert circles(graph_of("placement")) == []


def folder_graph(package: str) -> dict[str, set[str]]:
    """{folder: folders that its modules import}. `loop.py` counts to `runtime/`, whose page it is, and another module by its name."""
    graph: dict[str, set[str]] = {}

    def folder(name: str) -> str:
        top = name.split(".")[1]
        return "runtime" if top == "loop" else top

    for name, imported in graph_of(package).items():
        if name != package:
            graph.setdefault(folder(name), set()).update(folder(other) for other in imported if other != package)
    return {name: others - {name} for name, others in graph.items()}


def test_no_folders_import_one_another_in_a_circle() -> None:
    assert circles(folder_graph("rlhfless_ray")) == []
    assert circles(folder_graph("placement")) == []


def test_only_the_fork_server_imports_other_folders_by_their_names() -> None:
    """The circles above do not show such imports. `memory_watch` only compares names of processes, and `watcher` starts a process."""
    known, found = modules("rlhfless_ray"), dict[str, set[str]]()
    for name, path in known.items():
        for other in re.findall(r'"(rlhfless_ray(?:\.\w+)+)"', path.read_text()):
            if other.split(".")[1] != name.split(".")[1]:
                found.setdefault(name, set()).add(other)
    assert found.keys() == {f"rlhfless_ray.local.{name}" for name in ("laptop.fork_server", "memory_watch", "watcher")}
    for name, others in found.items():
        assert others <= known.keys(), (name, others - known.keys())


def test_what_is_for_laptops_has_one_door_each() -> None:
    room, doors = "rlhfless_ray.local.laptop.", {"local_ray", "forked_workers", "cpu_bfloat16", "processor"}
    graph = graph_of("rlhfless_ray")
    used = {other for name, imported in graph.items() if not name.startswith(room) for other in imported if other.startswith(room)}
    assert used == {f"{room}{door}" for door in doors}


def test_no_stage_imports_another() -> None:
    graph = graph_of("rlhfless_ray")
    for folder, own in STAGES.items():
        assert own <= graph.keys()
        others = set().union(*STAGES.values()) - own
        found = {
            (name, other) for name, imported in graph.items() if name.startswith(f"rlhfless_ray.{folder}.") for other in imported & others
        }
        assert not found, found


@pytest.mark.slow
def test_nothing_that_trains_loads_the_simulator() -> None:
    script = (
        "import sys, rlhfless_ray.cli.run_command, rlhfless_ray.autoscaler.initial_speed, rlhfless_ray.runtime.runtime, rlhfless_ray.loop\n"
    )
    script += "print([name for name in sys.modules if name.startswith('placement.simulate')])"
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.strip() == "[]"


def packages_imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, also inside functions and under TYPE_CHECKING."""
    nodes, _ = contents(path)
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in named}


def test_only_engines_import_vllm() -> None:
    found = {name for name, path in modules("rlhfless_ray").items() if "vllm" in packages_imported(path)}
    assert {name for name in found if not name.startswith("rlhfless_ray.engine.")} == {"rlhfless_ray.prefix.connector"}


def test_what_the_packages_import_is_installed_with_them() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    declared = {re.split(r"[\[<>=~]", line)[0] for lines in required for line in lines.split("\n") if line}
    imported = {one for package in ("rlhfless_ray", "placement") for path in modules(package).values() for one in packages_imported(path)}
    distributions = packages_distributions()
    for name in imported - sys.stdlib_module_names - {"rlhfless_ray", "placement"}:
        providers = {one.lower().replace("_", "-") for one in distributions.get(name, [name])} | {name}
        assert providers & declared or any(one.startswith(f"{name}-") for one in declared), f"setup.cfg does not declare {name}"


def test_every_name_that_the_planner_exports_is_there() -> None:
    import placement

    assert all(getattr(placement, name) is not None for name in placement.__all__)


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = {}
    for package in ("rlhfless_ray", "placement", "benchmarks", "docs"):
        for path in modules(package).values():
            for name, line in contents(path)[1]:
                if not name.startswith("_"):
                    places.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{line}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
