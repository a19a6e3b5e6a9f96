from __future__ import annotations

import ast
import inspect
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rlhfless_ray import recipe as package
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.kl_controller import AdaptiveKL
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.recipe.mistakes import known_keys
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

BASE: dict[str, Any] = {"prompts": {"task": "chain"}, "reward": {"function": "task"}}


def merged(*dotted: tuple[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {name: dict(section) for name, section in BASE.items()}
    for key, value in dotted:
        section, _, rest = key.partition(".")
        node = tree.setdefault(section, {})
        *parents, leaf = rest.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def refused(*dotted: tuple[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        Recipe.parse(merged(*dotted))
    said = str(error.value)
    assert said.startswith("recipe: ") and "\n" not in said, "one sentence"
    return said.removeprefix("recipe: ")


def write(folder: Path, text: str) -> Path:
    path = folder / "my-run.yaml"
    path.write_text(text)
    return path


# ---- every field ------------------------------------------------------------------------------------------------


def sections(model: type[BaseModel] = Recipe, prefix: str = "") -> list[tuple[str, type[BaseModel]]]:
    found = []
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found += [(f"{prefix}{name}", info.annotation), *sections(info.annotation, f"{prefix}{name}.")]
    return found


def test_every_field_is_described() -> None:
    found = [(f"{path}.{name}", info) for path, model in sections() for name, info in model.model_fields.items()]
    assert len(found) > 60
    assert [name for name, info in found if not info.description] == []


def test_docstrings_follow_their_field() -> None:
    """A string that follows nothing, or a second one, would be lost silently."""
    files = sorted(Path(inspect.getsourcefile(package) or "").parent.glob("*.py"))
    assert len(files) > 3
    for node in ast.walk(ast.Module([ast.parse(file.read_text()) for file in files], [])):
        if not isinstance(node, ast.ClassDef):
            continue
        for before, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and before is not node.body[0]:
                assert isinstance(before, ast.AnnAssign), f"{node.name}: {after.value.value!r}"


def test_defaults_are_valid_and_survive_yaml() -> None:
    recipe = Recipe.parse(merged())
    assert Recipe.parse(yaml.safe_load(recipe.to_yaml())) == recipe
    assert Recipe.parse(recipe.model_dump()) == recipe
    assert set(known_keys(Recipe)) >= {"run.seed", "algorithm.kl.estimator", "rollout"}


@settings(deadline=None, max_examples=50)
@given(st.text(string.printable + "äß→", max_size=30), st.integers(-(2**70), 2**70), st.floats(0, 1e9, exclude_min=True))
def test_any_value_survives_yaml(text: str, seed: int, rate: float) -> None:
    changes = [("prompts.system", text), ("run.seed", seed), ("learner.learning_rate", rate), ("learner.betas", [0.5, 0.9])]
    recipe = Recipe.parse(merged(*changes))
    assert Recipe.parse(yaml.load(recipe.to_yaml(), yaml.CSafeLoader)) == recipe


# ---- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("rollout.max_token", "rollout.max_tokens"),
        ("lerner.ranks", "learner"),
        ("algorithm.kl.coeficient", "algorithm.kl.coefficient"),
        ("learner.kv_cache_mb", "rollout.kv_cache_mb"),
        ("run.learning_rate", "learning_rate"),
        ("policy.hidden", "policy.hidden_size"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    said = refused((key, 1))
    assert f"unknown key `{key if not key.startswith('lerner') else 'lerner'}`" in said
    assert f"did you mean `{nearest}" in said or f".{nearest}`?" in said


def test_an_unknown_key_without_a_neighbour_names_none() -> None:
    assert refused(("run.qqqqqqqqqqqqqqqq", 1)) == "unknown key `run.qqqqqqqqqqqqqqqq`"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("run.steps", "many", "`run.steps`: input should be a valid integer"),
        ("run.steps", -1, "greater than or equal to 0 (got -1)"),
        ("run.root", "", "`run.root`: string should have at least 1 character"),
        ("run.steps", 1.5, "`run.steps`"),
        ("run.name", "a/b", "`run.name`"),
        ("run.name", "..", "`run.name`"),
        ("policy.hidden_size", 40, "multiple of 32 (got 40)"),
        ("policy.dtype", "float16", "`policy.dtype`: input should be 'float32' or"),
        ("rollout.temperature", 0, "greater than 0 (got 0)"),
        ("rollout.temperature", float("nan"), "`rollout.temperature`"),
        ("learner.learning_rate", float("inf"), "`learner.learning_rate`"),
        ("learner.zero_stage", 4, "`learner.zero_stage`"),
        ("learner.betas", [0.9], "`learner.betas"),
        ("learner.betas", [0.9, 1.0], "`learner.betas"),
        ("learner.betas", [-0.1, 0.9], "`learner.betas"),
        ("objective.prefer", 1.01, "less than or equal to 1"),
        ("algorithm.kl.estimator", "k4", "`algorithm.kl.estimator`"),
        ("rollout.samples_per_prompt", 1, "at least 2"),
        ("rollout.min_actors", 3, "must not exceed rollout.max_actors"),
        ("rollout.stop", "", "`rollout.stop`: expected texts that are not empty, each in quotes"),
        ("rollout.stop", ["</s>", ""], '`rollout.stop`: expected texts that are not empty, each in quotes, such as ["</answer>"]'),
        ("rollout.stop", ["x", 7], "(got ['x', 7])"),
        ("rollout.stop", ["x", "\\n\\n"], "`\\n\\n` is a backslash and a letter here, not a line break; write it in double quotes"),
        ("rollout.stop", True, "or [] for none (got True)"),
        ("rollout.top_k", -1, "`rollout.top_k`: input should be greater than or equal to 0 (got -1)"),
        ("rollout.min_tokens", 257, "rollout.min_tokens: must not exceed rollout.max_tokens"),
        ("reward.overlong_limit_tokens", 9, "reward.overlong_buffer_tokens: reward.overlong_limit_tokens needs it"),
        ("reward.overlong_penalty", 0.5, "reward.overlong_buffer_tokens: reward.overlong_penalty needs it"),
        ("functions.demand", True, "functions.demand: runs that share a pool would replace each other's announcement to Ray"),
        ("learner.min_rate_share", 0.1, "learner.min_rate_share: applies to the schedule `cosine_with_min_lr`"),
        ("reward.overlong_buffer_tokens", 257, "reward.overlong_buffer_tokens: must not exceed rollout.max_tokens"),
        ("prompts.max_rows", 9, "prompts.max_rows: it limits data sets, and a built-in task generates prompts.rows rows"),
        ("critic.normalize", True, "critic: algorithm.advantage.estimator group_norm has no critic"),
        ("algorithm.updates_per_step", 33, "must not exceed prompts.batch_prompts"),
        ("reward.function", "", "name one"),
        ("prompts.path", "x.jsonl", "exactly one of `task` (built in) and `path`"),
        ("prompts.task", "", "exactly one of"),
        ("policy.dtype", "bfloat16", "learner.zero_stage: with policy.dtype bfloat16"),
        ("reward.max_failed_share", 2, "`reward.max_failed_share`"),
        ("algorithm.clip_low", -0.1, "`algorithm.clip_low`"),
        ("functions.keep_alive_s", float("nan"), "`functions.keep_alive_s`"),
        ("evaluate.prompts", 10**12, "`evaluate.prompts`: input should be less than or equal to 1000000"),
        ("prompts.rows", 10**12, "`prompts.rows`: input should be less than or equal to 1000000"),
        ("learner.zero_stage", True, "`learner.zero_stage`: expected a number, not true or false"),
        ("rollout.tensor_parallel", True, "`rollout.tensor_parallel`: expected `auto` or a whole number of at least 1 (got True)"),
        ("rollout.tensor_parallel", 0, "`rollout.tensor_parallel`: expected `auto` or a whole number of at least 1 (got 0)"),
        ("rollout.oversample", True, "`rollout.oversample`: expected `auto` or a number (got True)"),
        ("rollout.oversample", "twice", "`rollout.oversample`: expected `auto` or a number (got 'twice')"),
        ("rollout.oversample", float("nan"), "`rollout.oversample`: expected `auto` or a number (got nan)"),
        ("algorithm.kl", 3, "`algorithm.kl`: expected a section with keys such as `coefficient`, not a value (got 3)"),
    ],
)
def test_wrong_types_ranges_and_combinations(key: str, value: Any, said: str) -> None:
    assert said in refused((key, value))


ONLINE_DPO = {
    "advantage.estimator": "online_dpo",
    "importance_cap": 0,
    **{"kl.coefficient": 0.1, "kl.place": "reward", "kl.estimator": "k1", "kl.limit": None},
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"advantage.estimator": "actor_critic"}, "`algorithm.advantage.estimator`: input should be "),
        ({"advantage.gamma": 0.9}, "algorithm.advantage.gamma: group_norm does not discount, so it must be 1"),
        ({"advantage.estimator": "rloo", "advantage.normalize_std": False}, "which rloo does not do"),
        ({"loss.kind": "gspo"}, "algorithm.loss_mean: gspo is a loss of sequences, so it must be `sequence`"),
        ({"loss.ratio_to": "sampler"}, "algorithm.loss.ratio_to: only gspo uses it"),
        ({"loss.ratio_to": "sampler", "loss.kind": "gspo", "loss_mean": "sequence"}, "set algorithm.importance_cap 0"),
        ({"loss.correction_level": "token"}, "algorithm.importance_cap: must be 0, because algorithm.loss.correction_level"),
        ({"loss.correction_level": "seq", "loss.correction_mode": "clip", "importance_cap": 0}, "so `clip` needs algorithm.loss"),
        ({"loss.correction_level": "token", "loss.correction_gating": "tv", "loss.correction_low": 0.1}, "it must be 0 with tv"),
        ({"loss.correction_high": 2}, "correction_high: applies to a correction, and algorithm.loss.correction_level is off"),
        ({"loss.correction_level": "token", "loss.correction_low": 6}, "loss.correction_low: must not exceed algorithm.loss."),
        ({"loss.dual_clip": 1}, "`algorithm.loss.dual_clip`: input should be greater than 1"),
        ({"kl.target": 0.1}, "algorithm.kl.target: needs an initial algorithm.kl.coefficient above 0"),
        ({"kl.target": 0.1, "kl.coefficient": 0.1, "kl.horizon": 51}, "algorithm.kl.horizon: must exceed a fifth of a step's 256 samples"),
        ({"kl.place": "reward", "kl.unbiased_gradient": True, "kl.coefficient": 0.1}, "algorithm.kl.unbiased_gradient"),
        ({"batch_samples": 8, "updates_per_step": 2}, "algorithm.batch_samples: set either this or algorithm.updates_per_step"),
        ({"advantage.estimator": "on_policy_distill"}, "algorithm.kl: with on_policy_distill a token's reward is the KL to the teacher"),
        (
            {"advantage.estimator": "on_policy_distill", "kl.coefficient": 1.0, "kl.place": "reward", "kl.estimator": "k1"},
            "reference.path: on_policy_distill needs a teacher; name its folder",
        ),
        ({"advantage.estimator": "online_dpo"}, "algorithm.kl: online_dpo compares the policy with a reference"),
        ({**ONLINE_DPO, "epochs": 2}, "algorithm.updates_per_step: online_dpo takes one optimizer step per rollout batch"),
        ({**ONLINE_DPO, "importance_cap": 2.0}, "algorithm.importance_cap: a pair of online_dpo counts the same"),
        ({**ONLINE_DPO, "loss_mean": "sequence"}, "algorithm.loss_mean: online_dpo needs `token`"),
        ({"advantage.lambd": 0.9}, "algorithm.advantage.lambd: only gae uses it, so with group_norm it must be 1"),
        ({"batch_samples": 257}, "algorithm.batch_samples: must not exceed prompts.batch_prompts"),
        ({"remainder": "carry"}, "algorithm.remainder: needs algorithm.batch_samples; set it, or leave this out"),
        (
            {"advantage.estimator": "gae", "advantage.whiten": False, "advantage.normalize_std": False},
            "algorithm.advantage.normalize_std: applies to whitening, which algorithm.advantage.whiten turns off",
        ),
    ],
)
def test_combinations_of_an_algorithm(changes: dict[str, Any], said: str) -> None:
    assert said in refused(*((f"algorithm.{key}", value) for key, value in changes.items()))


def test_top_k_needs_a_correction_and_stop_words_are_texts() -> None:
    off = ("algorithm.importance_cap", 0)
    assert "rollout.top_k: 20 leaves out tokens of the policy, and nothing corrects for it" in refused(("rollout.top_k", 20), off)
    for corrected in ([], [off, ("algorithm.loss.correction_level", "token")]):
        assert Recipe.parse(merged(("rollout.top_k", 20), *corrected)).rollout.top_k == 20
    assert Recipe.parse(merged(off)).rollout.top_k == 0, "off by default, as in recipes from before it"
    for words, read in (("</answer>", ["</answer>"]), (["\n\n", "7"], ["\n\n", "7"]), ([], [])):
        assert Recipe.parse(merged(("rollout.stop", words))).rollout.stop == read


def test_the_shortest_horizon_keeps_the_sign_of_an_adapted_coefficient() -> None:
    changes = {"coefficient": 0.1, "target": 0.1, "horizon": 52}
    recipe = Recipe.parse(merged(*((f"algorithm.kl.{key}", value) for key, value in changes.items())))
    kl, samples = recipe.algorithm.kl, recipe.prompts.batch_prompts * recipe.rollout.samples_per_prompt
    assert kl.target is not None and AdaptiveKL(kl.coefficient, kl.target, kl.horizon).after(0.0, samples).coefficient > 0
    assert AdaptiveKL(kl.coefficient, kl.target, 51).after(0.0, samples).coefficient < 0


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("clip_range", [1, -1], "reward.clip_range: the lower end must not exceed"),
        ("clip_range", [1], "`reward.clip_range"),
        ("overlong_buffer_tokens", 257, "reward.overlong_buffer_tokens: must not exceed rollout.max_tokens"),
        ("stop_properly_penalty", 1.5, "less than or equal to 1"),
        ("overlong_penalty", -1, "greater than or equal to 0"),
    ],
)
def test_reward_shaping_in_range(key: str, value: Any, said: str) -> None:
    assert said in refused((f"reward.{key}", value))


def test_critic_and_schedules() -> None:
    assert "critic: algorithm.advantage.estimator group_norm has no critic" in refused(("critic.learning_rate", 1e-4))
    gae = ("algorithm.advantage.estimator", "gae")
    recipe = Recipe.parse(merged(gae, ("critic.ranks", 2), ("rollout.samples_per_prompt", 1), ("learner.zero_stage", 2)))
    section = recipe.critic_learner
    assert (section.ranks, section.zero_stage, section.schedule) == (2, 2, "cosine_with_min_lr")
    assert (section.decay_all, section.learning_rate, recipe.learner.learning_rate) == (False, 9e-6, 1e-6)
    assert "learner.warmup_steps: applies to the schedule" in refused(("learner.warmup_steps", 3), ("learner.schedule", "linear"))
    assert "learner.warmup_share: the schedule `constant` has no warm-up" in refused(("learner.warmup_share", 0.1))
    assert "`learner.schedule`: input should be" in refused(("learner.schedule", "cosin"))
    many = merged(("run.steps", 7), ("algorithm.epochs", 3), ("algorithm.batch_samples", 100))
    assert Recipe.parse(many).optimizer_steps == 7 * 3 * 3, "256 samples in parts of 100"


def test_the_reference_is_a_function_of_its_own_unless_adapters_are_trained() -> None:
    kl = ("algorithm.kl.coefficient", 0.1)
    assert "reference: algorithm.kl.coefficient is 0" in refused(("reference.ranks", 2))
    assert "reference: lora.rank makes it the policy without its adapters" in refused(kl, ("reference.ranks", 2), ("lora.rank", 4))
    assert Recipe.parse(merged(kl, ("reference.ranks", 2))).has_reference
    assert not Recipe.parse(merged(kl, ("lora.rank", 4))).has_reference and not Recipe.parse(merged()).has_reference


def test_an_estimator_without_groups_takes_single_samples() -> None:
    for name in ("reinforce", "flash_reinforce"):
        Recipe.parse(merged(("rollout.samples_per_prompt", 1), ("algorithm.advantage.estimator", name)))
    assert "rloo compares the responses" in refused(("rollout.samples_per_prompt", 1), ("algorithm.advantage.estimator", "rloo"))


def test_combinations_across_sections() -> None:
    assert "only built-in tasks create their own policy" in refused(("prompts.task", ""), ("prompts.path", "x.jsonl"))
    said = refused(("prompts.task", ""), ("prompts.path", "x.jsonl"), ("policy.path", "m"))
    assert "`task` needs a built-in task" in said
    Recipe.parse(merged(("policy.dtype", "bfloat16"), ("learner.zero_stage", 1)))


def test_a_section_that_is_a_value() -> None:
    with pytest.raises(UserError) as error:
        Recipe.parse({**BASE, "rollout": 3})
    assert str(error.value) == "recipe: `rollout`: expected a section with keys such as `samples_per_prompt`, not a value (got 3)"


# ---- files and overrides ----------------------------------------------------------------------------------------

YAML = "prompts: {task: chain}\nreward: {function: task}\n"


def test_load_names_the_run_after_the_file(tmp_path: Path) -> None:
    assert Recipe.load(write(tmp_path, YAML)).run.name == "my-run"
    assert Recipe.load(write(tmp_path, YAML + "run:\n")).run.name == "my-run"
    assert Recipe.load(write(tmp_path, YAML + "run: {name: other}\n")).run.name == "other"
    assert Recipe.load(write(tmp_path, YAML + "run: {steps: 3}\n"), ["run.name=third"]).run.name == "third"


NAMES = [("my run (2).yaml", "my-run-2-"), (".hidden.yaml", "hidden"), ("größe.yaml", "größe")]


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_any_file_name_makes_a_folder_name(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).write_text(YAML)
    assert Recipe.load(tmp_path / file).run.name == name


def test_overrides_are_yaml(tmp_path: Path) -> None:
    overrides = [
        "rollout.temperature=0.7",
        "algorithm.kl.coefficient=1e-2",
        "learner.betas=[0.8, 0.95]",
        "watch.tensorboard=false",
        "prompts.system=Answer, shortly",
        "cluster.address=",
        "evaluate={prompts: 8}",
        "run.seed=7",
        "run.seed=8",
    ]
    path = write(tmp_path, YAML + "evaluate: {greedy: false}\ncluster: {address: auto}\nrollout:\n")
    recipe = Recipe.load(path, overrides)
    assert recipe.rollout.temperature == 0.7
    assert recipe.algorithm.kl.coefficient == 0.01
    assert recipe.learner.betas == (0.8, 0.95)
    assert recipe.watch.tensorboard is False
    assert recipe.prompts.system == "Answer, shortly"
    assert recipe.cluster.address == ""
    assert (recipe.evaluate.prompts, recipe.evaluate.greedy) == (8, True), "a whole section is replaced"
    assert recipe.run.seed == 8, "the last one counts"


@pytest.mark.parametrize("text", ["off", "no", "2024", "1e3", "2024-01-01", "0123"])
def test_a_name_on_the_command_line_stays_what_it_is(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, YAML)
    keys = ("wandb_project", "mlflow_experiment", "run_name")
    recipe = Recipe.load(path, [f"run.name={text}", *(f"watch.{key}={text}" for key in keys)])
    assert [recipe.run.name, *(getattr(recipe.watch, key) for key in keys)] == [text] * 4
    assert SupervisedRecipe.load(write(tmp_path, "task: sft\ndata: {task: chain}\n"), [f"run.name={text}"]).run.name == text
    path = write(tmp_path, YAML)
    assert GenerationRecipe.read(path, [f"run.name={text}"]).run.name == text
    assert GenerationRecipe.read(None, ["prompts.task=chain", f"run.name={text}"]).run.name == text
    assert Recipe.load(path, [f"run.name='{text}'"]).run.name == text


def test_a_switch_word_is_no_path(tmp_path: Path) -> None:
    """`off` would be taken for a folder or a column of this name, which is not what its user wants."""
    for key in ("watch.mlflow", "save.path", "critic.path", "run.root", "checkpoint.path", "prompts.answer_column"):
        with pytest.raises(UserError, match=rf"`{key}`: expected a text, not the switch `off`"):
            Recipe.load(write(tmp_path, YAML), [f"{key}=off"])
    assert Recipe.load(write(tmp_path, YAML), ["watch.wandb_group=null"]).watch.wandb_group is None


@pytest.mark.parametrize("text", ["End with #### and the number", "# first", "a#b", "'quoted # text'  # comment", '"quoted # text"'])
def test_a_command_line_has_no_comments(tmp_path: Path, text: str) -> None:
    kept = "quoted # text" if "quoted" in text else text
    assert Recipe.load(write(tmp_path, YAML), [f"prompts.system={text}"]).prompts.system == kept


def test_the_system_prompt_of_gsm8k_is_whole() -> None:
    """Without quotes YAML took the rest of the sentence, from ` ####` on, for a comment."""
    recipe = Recipe.load(Path(__file__).parents[1] / "recipes" / "gsm8k.yaml")
    assert recipe.prompts.system.endswith("#### and the final number.")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.temperature", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("rollout.temperature.x=1", "`temperature` is a value"),
        ("rollout.temperature=[", "not valid YAML"),
        ("algorithm.advantage.estimator=grpo", "expected `group_norm`, which is its name here (got 'grpo')"),
        ("rollout.temprature=1", "did you mean `rollout.temperature`"),
        ("kl.coefficient=0.1", "did you mean `algorithm.kl`"),
        ("rollout.temperature=hot", "`rollout.temperature`"),
        ("temperature=1", "did you mean"),
        ("rollout=3", "`rollout`"),
        ("rollout..temperature=1", "unknown key"),
        ("run=3", "`run`"),
        ("run.steps=true", "`run.steps`: expected a number"),
        ("learner.grad_clip=yes", "expected a number"),
    ],
)
def test_wrong_overrides(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        Recipe.load(write(tmp_path, YAML + "rollout: {temperature: 1.0}\n"), [override])
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "expected sections"),
        ("a: [\n", "not valid YAML"),
        ("just words", "expected sections"),
        ("1: 2\n" + YAML, "keys should be strings (got 1)"),
        (YAML + "loss: {kind: ipo}\n", "unknown key `loss`; did you mean `algorithm.loss`"),
        ("run: {name: 'x}\n", "not valid YAML: line 2: while scanning a quoted scalar"),
        (
            YAML + "cluster: {cpus: 2, local_nodes: [{cpus: 1}]}\n",
            "my-run.yaml: cluster.cpus: cluster.local_nodes says how many cores each",
        ),
        (YAML + "cluster: {pool: false, share: 0.5}\n", "my-run.yaml: cluster.share: it counts in the shared pool only"),
        (YAML + "run: {steps: 3, seed: 1, steps: 4}\n", "the key `steps` occurs twice"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=r"recipe .*my-run.yaml: ") as error:
        Recipe.load(path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_one_address_needs_no_list(tmp_path: Path) -> None:
    path = write(tmp_path, "prompts: {task: chain}\n")
    assert Recipe.load(path, ["reward.url=http://127.0.0.1:5000/get_reward"]).reward.url == ["http://127.0.0.1:5000/get_reward"]
    assert Recipe.load(path, ["reward.function=task", "reward.url="]).reward.url == []


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Recipe.load(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="a folder; name the recipe's YAML file"):
        Recipe.load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="not valid YAML"):
        Recipe.load(tmp_path / "binary.yaml")
    with pytest.raises(UserError):
        Recipe.load(write(tmp_path, ""))


AGENT = {"prompts": {"task": "chain"}, "agent": {"path": "agent.py"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": {"function": "task"}}, "reward.function: the agent gives the rewards; leave it out"),
        ({"rollout": {"migrate": "tau"}}, "rollout.migrate: turns of an agent are not moved between engines"),
        ({"agent": {"turn_tokens": 4}, "reward": {"function": "task"}}, "agent.path: name the agent's file"),
        ({"agent": {"path": "agent.py", "timeout_s": 0}}, "`agent.timeout_s`"),
    ],
)
def test_agents_do_not_go_with_everything(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        Recipe.parse({**AGENT, **changes})
    assert said in str(raised.value)


def test_an_episode_is_as_long_as_its_limit() -> None:
    assert Recipe.parse(AGENT).longest_tokens(40) == 40 + 256
    assert Recipe.parse({**AGENT, "agent": {"path": "agent.py", "max_tokens": 99}}).longest_tokens(40) == 99


def test_a_lag_of_0_is_the_synchronous_recipe() -> None:
    """With every key of asynchrony at the value that means none. Runs of equal recipes are the same run."""
    keys = {"max_lag_steps": 0, "partial": "off", "oversample": "auto", "partial_kv": "recompute", "ahead": False}
    assert Recipe.parse(merged(*((f"rollout.{key}", value) for key, value in keys.items()))) == Recipe.parse(merged())


def test_a_lag_needs_importance_weights_and_keeps_no_samples_for_longer() -> None:
    lag = ("rollout.max_lag_steps", 1)
    assert "rollout.max_lag_steps: responses of older weights need" in refused(lag, ("algorithm.importance_cap", 0))
    pairs = Recipe.parse(merged(lag, *((f"algorithm.{key}", value) for key, value in ONLINE_DPO.items())))
    assert pairs.rollout.max_lag_steps == 1 and pairs.algorithm.importance_cap == 0
    assert "algorithm.remainder=carry" in refused(lag, ("algorithm.batch_samples", 8), ("algorithm.remainder", "carry"))
    assert "rollout.max_lag_steps" in refused(("rollout.max_lag_steps", 2))
    assert (
        Recipe.parse(merged(lag, ("algorithm.importance_cap", 0), ("algorithm.loss.correction_level", "token"))).rollout.max_lag_steps == 1
    )


def test_engines_in_8_bits_need_importance_weights_and_a_device_that_has_them() -> None:
    from rlhfless_ray.engine.engine_settings import check_kernels

    int8 = ("rollout.quantization", "int8")
    assert "rollout.quantization: int8 changes what engines sample from" in refused(int8, ("algorithm.importance_cap", 0))
    band = Recipe.parse(merged(int8, ("algorithm.importance_cap", 0), ("algorithm.loss.correction_level", "token")))
    check_kernels(band, "cpu")
    with pytest.raises(UserError, match=r"int8 on GPU needs policy\.dtype bfloat16"):
        check_kernels(band, "gpu")
    with pytest.raises(UserError, match="vLLM on CPU cannot quantise weights to fp8"):
        check_kernels(Recipe.parse(merged(("rollout.quantization", "fp8"))), "cpu")
    served = Recipe.parse(merged(("lora.rank", 4), ("lora.publish", "adapter")))
    check_kernels(served, "cpu")
    narrow = (("lora.rank", 4), ("lora.publish", "adapter"), ("policy.dtype", "bfloat16"), ("learner.zero_stage", 1))
    check_kernels(Recipe.parse(merged(*narrow)), "gpu")
    with pytest.raises(UserError, match=r"lora\.publish: engines on GPU hold adapters in bfloat16 only"):
        check_kernels(served, "gpu")
    assert "`rollout.quantization`: input should be" in refused(("rollout.quantization", "int4"))
    assert Recipe.parse(merged(("rollout.quantization", False))).rollout.quantization == "off"


def test_a_stage_keeps_its_own_learning_rate_beside_other_settings_of_the_learner() -> None:
    tree = {"task": "sft", "data": {"task": "chain"}}
    learners = [SupervisedRecipe.parse({**tree, "learner": section}).learner for section in ({}, {"ranks": 2})]
    assert [learner.learning_rate for learner in learners] == [1e-5, 1e-5]


def test_a_metric_of_checkpoints_needs_evaluations() -> None:
    with pytest.raises(UserError, match=r"checkpoint.best_metric: evaluate.prompts is 0, so there is no evaluation to compare"):
        Recipe.parse(merged(("checkpoint.best_metric", "accuracy_greedy"), ("evaluate.prompts", 0)))
