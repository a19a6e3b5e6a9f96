"""README and docs: every link leads somewhere, every key exists, every example runs. `make docs-check` runs the commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown.extensions.toc import slugify_unicode

from docs.blocks import ROOT, Block, blocks, commands, pages, rules
from docs.check import make_scratch, public_examples, run, run_examples
from docs.diagrams import IMAGES, PICTURES
from docs.hooks import MARKER, on_page_markdown
from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.recipe.mistakes import known_keys
from rlhfless_ray.recipe.recipe_file import read_tree
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.recipe.workflow_file import Workflow
from rlhfless_ray.sweep.sweep_file import load_sweep
from tests.conftest import command_here

KEYS = {*known_keys(Recipe), *known_keys(SupervisedRecipe)}
SECTIONS = {*Recipe.model_fields, *SupervisedRecipe.model_fields}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:[=:][^`]*)?`")
EXAMPLES = dict(public_examples())
OF_RUNS = ("rlhfless_ray.train", "rlhfless_ray.Runtime", "rlhfless_ray.RunParts", "rlhfless_ray.generate")
OF_STAGES = ("rlhfless_ray.run_supervised", "rlhfless_ray.run_workflow")
NEEDS_RAY = (*OF_RUNS, *OF_STAGES)


@cache
def prose(page: Path) -> str:
    """A page without its fenced blocks, its generated parts filled in."""
    text = page.read_text(encoding="utf-8")
    if "docs" in page.parts and MARKER.search(text):
        text = on_page_markdown(text)
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them, and those written as ids."""
    found = set(re.findall(r'id="([^"]+)"', prose(page)))
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        written = re.search(r"\{ *#([^ }]+) *\}$", heading)
        found.add(written[1] if written else slugify_unicode(re.sub(r"[`*]", "", heading), "-"))
    return found


@pytest.mark.parametrize("page", [*pages(), ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_picture_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {target.name} has no heading #{anchor}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_recipe_key_that_a_page_names_exists(page: Path) -> None:
    files = (".py", ".yaml", ".json", ".jsonl", ".csv", ".md", ".svg", ".html", ".txt")
    text = prose(page)
    if page.name == "trl-verl.md":  # the first column has the keys of the others
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    for key in INLINE.findall(text):
        if key.split(".")[0] in SECTIONS and not key.endswith(files):
            assert key in KEYS, f"{page.name}: the recipe has no key {key}"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_architecture_are_those_that_are_drawn(name: str) -> None:
    assert (IMAGES / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name]().svg(), "run python -m docs.diagrams"


def test_every_yaml_block_without_a_title_is_a_part_of_a_recipe() -> None:
    found = [block for block in blocks() if block.language == "yaml" and not block.title]
    assert len(found) >= 3
    for block in found:
        for key in _dotted(yaml.safe_load(block.text)):
            assert any(key == known or key.startswith(f"{known}.") for known in KEYS), f"{block.where}: the recipe has no key {key}"


def _dotted(tree: dict, prefix: str = "") -> list[str]:
    """Every dotted key of a mapping; what a setting's own mapping holds is its value."""
    keys: list[str] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_section = isinstance(value, dict) and any(known.startswith(f"{key}.") for known in KEYS)
        keys += [key, *(_dotted(value, f"{key}.") if is_section else [])]
    return keys


def test_every_override_in_a_command_makes_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_scratch(tmp_path)
    monkeypatch.chdir(tmp_path)
    trained = 0
    for command in commands():
        words = shlex.split(command.text)
        if words[:2] == ["rlhfless", "train"]:
            kind = SupervisedRecipe if "task" in read_tree(Path(words[2])) else Recipe
            kind.load(words[2], [word for word in words[3:] if not word.startswith("--")])
            trained += 1
    assert trained >= 10


def test_every_generation_evaluation_sweep_and_workflow_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of commands, and the files that pages show. `make docs-check` runs none of them as they stand."""
    make_scratch(tmp_path)
    for recipe in (tmp_path / "recipes").glob("*.yaml"):
        shutil.copy(recipe, tmp_path)
    monkeypatch.chdir(tmp_path)
    readers: dict[str, Any] = {"sweep": load_sweep, "workflow": lambda path: Workflow.load(path).plan()}
    seen: dict[str, Any] = {"my_workflow.yaml": readers["workflow"], "methods.yaml": load_sweep, "my_dpo.yaml": SupervisedRecipe.load}
    for file, reader in seen.items():
        reader(Path(file))
    for command in commands():
        words = shlex.split(re.sub(r" --\w+ \S+", "", command.text))
        if words[0] != "rlhfless" or words[1] not in (*readers, "generate", "evaluate"):
            continue
        seen[words[1]] = path = next((Path(word) for word in words[2:] if word.endswith(".yaml")), None)
        overrides = [word for word in words[2:] if "=" in word]
        readers[words[1]](path) if words[1] in readers else GenerationRecipe.read(path, overrides)
    assert {*seen} >= {"sweep", "workflow", "generate", "evaluate"}


def test_every_entry_of_commands_yaml_is_needed_and_gives_a_reason() -> None:
    shown = [command.text for command in commands()]
    for rule in rules():
        assert any(re.search(rule["match"], text) for text in shown), f"no page shows a command like {rule['match']}"
        assert rule.get("fast") or rule.get("reason") or rule.get("not_run"), f"{rule['match']}: give a reason"


@pytest.mark.parametrize("name", ["minimal", "own_loop"])
def test_the_commands_at_the_head_of_a_program_are_shown_on_a_page(name: str) -> None:
    """`make docs-check` reads pages only."""
    text = (ROOT / "recipes" / f"{name}.py").read_text(encoding="utf-8")
    head = re.findall(rf"^    (python recipes/{name}\.py.*?) *(?:#.*)?$", text, re.MULTILINE)
    assert len(head) == 2 and {*head} <= {command.text for command in commands()}


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if c.is_fast], ids=lambda command: command.where)
def test_fast_commands_run(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; `make docs-check` runs them as they stand."""
    monkeypatch.setenv("XDG_CACHE_HOME", make_scratch(tmp_path)["XDG_CACHE_HOME"])
    program, *words = shlex.split(command.run)
    done = command_here(*words, cwd=tmp_path)
    assert program == "rlhfless" and done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == "python"], ids=lambda block: block.where)
def test_python_blocks_compile(block: Block) -> None:
    compile(block.text, block.where, "exec")


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_public_name_has_an_example_and_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EXAMPLES[name], f"{name}: its docstring has no example"
    if name in NEEDS_RAY:
        return  # the next test
    make_scratch(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_examples(EXAMPLES[name]) == ""


def failed_examples(tmp_path_factory: pytest.TempPathFactory, names: tuple[str, ...]) -> dict[str, str]:
    """Run examples that need Ray in one process and on one Ray. Returns what failed, by name."""
    folder = tmp_path_factory.mktemp("examples")
    code = "import json; from docs.check import *; from tests.conftest import one_ray; found = dict(public_examples())\n"
    code += f"with one_ray(): told = {{name: run_examples(found[name]) for name in {names}}}\n"
    code += "Path('told.json').write_text(json.dumps(told))"
    (folder / "examples.py").write_text(code)
    said = run(forked([sys.executable, str(folder / "examples.py")]), folder, make_scratch(folder), timeout_s=800)
    assert said == ""
    return json.loads((folder / "told.json").read_text())


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.parametrize("names", [OF_RUNS, pytest.param(OF_STAGES, marks=pytest.mark.long)])
def test_examples_that_need_ray_run(names: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert failed_examples(tmp_path_factory, names) == dict.fromkeys(names, "")


@pytest.mark.parametrize(("page", "lines"), [("README.md", 100), ("docs/architecture.md", 200)])
def test_pages_for_strangers_are_short(page: str, lines: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= lines


def test_every_module_that_a_page_names_exists() -> None:
    folders = ("rlhfless_ray", "placement", "tests", "benchmarks", "recipes", "docs")
    there = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = [(page.name, name) for page in pages() for name in re.findall(r"`([\w./-]+\.py)`", prose(page))]
    assert len(named) > 50
    assert [(page, name) for page, name in named if not any(path.endswith(f"/{name}") for path in there)] == []


def test_the_reference_names_every_key_and_command() -> None:
    for file, recipe in (("recipe.md", Recipe), ("supervised.md", SupervisedRecipe)):
        page = on_page_markdown((ROOT / "docs" / "reference" / file).read_text())
        for key in known_keys(recipe):
            assert f'id="{key}"' in page or f"#{key} }}" in page or key == "task", f"the reference lacks {key}"
    page = on_page_markdown((ROOT / "docs" / "reference" / "commands.md").read_text())
    for name in ("train", "generate", "evaluate", "workflow", "plan", "simulate", "report", "explain", "run", "submit"):
        assert f"## rlhfless {name}" in page
    page = on_page_markdown((ROOT / "docs" / "reference" / "openrlhf-flags.md").read_text())
    assert page.count("\n| `--") >= 167


@pytest.mark.slow
def test_the_site_builds_strictly_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    environment = make_scratch(tmp_path) | {"NO_MKDOCS_2_WARNING": "1"}
    context = tmp_path / "site"
    command = [str(tmp_path / "bin" / "python"), "-m", "mkdocs", "build", "--strict", "--site-dir", str(context)]
    assert run([*command, "--config-file", str(ROOT / "mkdocs.yml")], tmp_path, environment, timeout_s=120) == ""
    fetched = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\">]*", re.IGNORECASE)
    built = list(context.rglob("*.html"))
    assert len(built) >= 15
    for page in built:
        assert not fetched.findall(page.read_text(encoding="utf-8")), page.name
