"""Command lines of batch_inference and interactive_chat, what is made of scored responses, and a conversation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.cli.interactive_chat import Conversation
from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.compat.openrlhf.batch_inference import run_batch
from rlhfless_ray.compat.openrlhf.explain_report import announce
from rlhfless_ray.compat.openrlhf.flags import flags_of, versions_of
from rlhfless_ray.compat.openrlhf.inference import RULES, translate_inference
from rlhfless_ray.compat.openrlhf.inference_table import BATCH, CHAT, GENERATES, LAUNCHERS
from rlhfless_ray.compat.openrlhf.post_processors import processed
from rlhfless_ray.compat.openrlhf.resources import fit_width
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.recipe.mistakes import known_keys
from tests.conftest import command_here

LEAST = ["--pretrain", "m", "--dataset", "rows.jsonl", "--output_path", "out.jsonl"]


def test_every_flag_of_every_version_has_a_rule() -> None:
    for launcher in LAUNCHERS:
        names = {f"--{rule.name}" for rule in RULES[launcher]}
        found = versions_of(launcher)
        assert (found[0], found[-1]) == ("0.8.0", "0.9.5")
        assert all(flags_of(version, launcher).keys() <= names for version in found)


def test_every_key_is_one_of_the_recipe_or_the_launchers() -> None:
    keys = known_keys(GenerationRecipe)
    assert not [k for rule in RULES[BATCH] for k in rule.keys if k not in keys and not k.startswith("batch_inference.")]


@pytest.mark.parametrize("task", GENERATES)
def test_defaults_make_a_recipe(task: str) -> None:
    for version in versions_of(BATCH):
        found = translate_inference(BATCH, ["--eval_task", task, *LEAST, "--elastic.dialect", version])
        assert found.refusal() is None and found.problem() is None
        recipe = found.recipe()
        assert recipe is not None and not recipe.scores
        assert (recipe.rollout.max_tokens, recipe.prompts.max_prompt_tokens, recipe.prompts.overlong) == (1024, 1024, "cut_left")
        assert (recipe.rollout.temperature, recipe.rollout.samples_per_prompt, recipe.run.seed) == (1.0, 1, 1234)
        assert recipe.prompts.prompt_column == "input" and recipe.prompts.max_rows is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--best_of_n", "4", "--tp_size", "2"], {"rollout.samples_per_prompt": 4, "rollout.tensor_parallel": 2}),
        (["--iter", "3", "--rollout_batch_size", "16"], {"batch_inference.rows": [48, 64]}),
        (["--enable_csft", "--csft_prompt", " <rm_score>: 4.50 "], {"batch_inference.prompt_suffix": "<rm_score>: 4.50 "}),
        (["--apply_chat_template", "--input_key", "q"], {"prompts.template": "chat", "prompts.prompt_column": "q"}),
        (["--input_template", "Q: {}"], {"prompts.input_template": "Q: {}"}),
        (["--dataset", "a,b", "--dataset_probs", "0.3,0.7"], {"prompts.paths": ["a", "b"], "prompts.probabilities": [0.3, 0.7]}),
        (["--greedy_sampling"], {"rollout.temperature": 1.0}),
        (["--max_samples", "2000000"], {"prompts.max_rows": 2000000}),
    ],
)
def test_flags_become_settings(flags: list[str], expected: dict[str, Any]) -> None:
    found = translate_inference(BATCH, ["--eval_task", "generate_vllm", *LEAST, *flags])
    assert {key: found.settings.get(key) for key in expected} == expected


def test_each_task_reads_its_own_flags() -> None:
    greedy = ["--greedy_sampling", "--post_processor", "rs"]
    found = {task: translate_inference(BATCH, ["--eval_task", task, *LEAST, *greedy]) for task in (*GENERATES, "rm")}
    status = {task: {flag: what for flag, what, _ in one.flags} for task, one in found.items()}
    assert status["generate_vllm"]["--greedy_sampling"] == "no effect" and status["generate"]["--greedy_sampling"] == "honoured"
    assert found["generate"].settings["rollout.temperature"] == 0.0
    drawn = translate_inference(BATCH, ["--eval_task", "generate", *LEAST])
    assert "(top_k)" in drawn.notes[-1] and "(top_k)" not in " ".join([*found["generate"].notes, *found["generate_vllm"].notes])
    assert drawn.settings["rollout.top_k"] == 50, "transformers' default"
    assert "rollout.top_k" not in {**found["generate"].settings, **found["generate_vllm"].settings, **found["rm"].settings}
    assert status["rm"]["--post_processor"] == "honoured" and status["generate"]["--post_processor"] == "no effect"
    for flag, value, other in (("--csft_prompt", "x", ["--enable_csft"]), ("--rollout_batch_size", "4", ["--iter", "0"])):
        for more, what in (([], "no effect"), (other, "honoured")):
            one = translate_inference(BATCH, ["--eval_task", "generate", *LEAST, flag, value, *more])
            assert {flag: status for flag, status, _ in one.flags}[flag] == what
    assert found["rm"].settings["batch_inference.processor"] == "rs" and found["rm"].recipe() is None


@pytest.mark.parametrize(("config", "top_k"), [({"top_k": 20}, 20), ({"top_k": None}, 0), ({"top_k": 0}, 0), ({"top_p": 0.8}, 50)])
def test_generate_draws_from_the_models_own_top_k(tmp_path: Path, config: dict[str, Any], top_k: int) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    found = translate_inference(BATCH, ["--eval_task", "generate", *LEAST, "--pretrain", str(tmp_path)])
    assert found.settings["rollout.top_k"] == top_k and (f"the {top_k} likeliest" if top_k else "all of the vocabulary") in found.notes[-1]
    own = translate_inference(BATCH, ["--eval_task", "generate", *LEAST, "--pretrain", str(tmp_path), "--elastic.rollout.top_k", "7"])
    recipe = own.recipe()
    assert recipe is not None and recipe.rollout.top_k == 7


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (LEAST, "--eval_task: choose generate_vllm, generate or rm"),
        (["--eval_task", "generate", *LEAST[2:]], "--pretrain: name the model"),
        (["--eval_task", "rm", *LEAST[:4]], "--output_path: name the file to write"),
        (["--eval_task", "generate", *LEAST, "--repetition_penalty", "1.1"], "--repetition_penalty: penalties of repeated tokens"),
        (["--eval_task", "rm", *LEAST, "--post_processor", "best"], "--post_processor: choose rs, csft, iter_dpo"),
        (["--eval_task", "rm", *LEAST, "--reward_template", "{reward}"], "--reward_template: it needs {input} and {reward}"),
        (["--eval_task", "rm", *LEAST, "--use_ms"], "--use_ms: the ModelScope hub"),
        (["--eval_task", "rm", *LEAST, "--dataset_probs", "x"], "--dataset_probs: expected numbers separated by commas"),
        (["--eval_task", "rm", *LEAST, "--dataset_probs", "0.5,0.5"], "--dataset_probs: 2 probabilities for 1 data sets"),
        (["--eval_task", "generate", *LEAST, "--iter", "-1"], "--iter: count from 0"),
        (["--eval_task", "generate", *LEAST, "--iter", "0", "--rollout_batch_size", "0"], "--rollout_batch_size: must be at least 1"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(flags: list[str], named: str) -> None:
    assert named in str(translate_inference(BATCH, flags).refusal())


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--temperature", "0"), ("--temperature", "nan"), ("--top_p", "1.5"), ("--max_len", "0"), ("--repetition_penalty", "-1")],
)
def test_a_conversation_with_impossible_sampling_is_refused(flag: str, value: str) -> None:
    assert f"{flag}: must be" in str(translate_inference(CHAT, ["--pretrain", "m", flag, value]).refusal())
    if flag == "--temperature":
        assert translate_inference(CHAT, ["--pretrain", "m", flag, value, "--greedy_sampling"]).refusal() is None


def test_invalid_values_and_own_settings_name_the_flag() -> None:
    error = translate_inference(BATCH, ["--eval_task", "generate", *LEAST, "--top_p", "2"]).problem()
    assert "--top_p: " in str(error)
    with pytest.raises(UserError, match=r"--elastic.rollout.top_p: OpenRLHF's --top_p sets this"):
        translate_inference(BATCH, ["--eval_task", "generate", *LEAST, "--elastic.rollout.top_p", "0.5"])
    with pytest.raises(UserError, match=r"--elastic.rollout.max_actors: no such setting"):
        translate_inference(BATCH, ["--eval_task", "rm", *LEAST, "--elastic.rollout.max_actors", "1"])


ROWS = [
    {"input": "a", "output": "x", "reward": 1.0},
    {"input": "b", "output": "u", "reward": 2.0},
    {"input": "a", "output": "y", "reward": 3.0},
    {"input": "a", "output": "z", "reward": -2.0},
    {"input": "a", "output": "w", "reward": 3.0},
]


def test_processors() -> None:
    assert processed(ROWS, "") == ROWS
    assert processed(ROWS, "rs") == [ROWS[2], ROWS[1]]
    first, second = processed(ROWS, "iter_dpo")
    assert first == {"prompt": "a", "chosen": "y", "chosen_reward": 3.0, "rejected": "z", "rejected_reward": -2.0}
    assert second["chosen"] == second["rejected"] == "u"
    assert [row["input"] for row in processed(ROWS, "csft")][:2] == ["a <rm_score>: 1.00 ", "b <rm_score>: 2.00 "]
    mean = sum(row["reward"] for row in ROWS) / 5
    deviation = math.sqrt(sum((row["reward"] - mean) ** 2 for row in ROWS) / 4)
    found = processed(ROWS, "csft", reward_template="[{reward}] {input}", normalize=True)
    assert found[0]["reward"] == pytest.approx((1 - mean) / deviation)
    assert found[2]["input"] == f"[{(3 - mean) / deviation:.2f}] a"
    assert [row["reward"] for row in processed(ROWS[:1], "csft", normalize=True)] == [0.0]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the chain task with a scalar head, whose rewards config.json normalises."""
    import torch

    from rlhfless_ray.prompts.builtin_tasks import task
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.weights.model_folder import write_folder
    from rlhfless_ray.weights.tensor_file import save_tensors
    from rlhfless_ray.weights.tiny_model import scratch_policy

    folder = tmp_path_factory.mktemp("reward") / "model"
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "policy": {"hidden_size": 64, "layers": 1}, "reward": {"function": "task"}})
    files = scratch_policy(recipe, task("chain"))
    config = json.loads(bytes(files["config.json"])) | {"mean": 0.5, "std": 2.0}
    head = {"value_head.weight": torch.randn(1, 64, generator=torch.Generator().manual_seed(0))}
    write_folder(folder, {**files, "config.json": json.dumps(config).encode(), "model-head.safetensors": save_tensors(head)})
    return folder


def test_rewards_are_those_of_the_model_at_the_end(
    tmp_path: Path, reward_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    from rlhfless_ray.reward.reward_server import TextScorer

    rows = [{"input": "1A1=", "output": "a2#2"}, {"input": "1A1=", "output": "#2"}, {"input": "2B1C1=", "output": ""}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["--eval_task", "rm", "--pretrain", str(reward_model), "--dataset", str(tmp_path / "rows.jsonl")]
    found = translate_inference(BATCH, [*line, "--output_path", str(tmp_path / "new" / "out.jsonl"), "--max_len", "64"])
    found.settings["policy.dtype"] = "float32"
    written = [json.loads(text) for text in run_batch(found).read_text().splitlines()]
    assert [(row["input"], row["output"]) for row in written] == [("1A1=", "a2#2"), ("1A1=", "#2")]
    assert "1 rows without a prompt or a response" in capsys.readouterr().out
    tokenizer, model = AutoTokenizer.from_pretrained(reward_model), AutoModel.from_pretrained(reward_model, dtype=torch.float32)
    head = load_file(reward_model / "model-head.safetensors")["value_head.weight"]
    for row in written:
        ids = tokenizer(f"{row['input']}{row['output']} {tokenizer.eos_token}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            value = (model(input_ids=ids).last_hidden_state[0, -1] @ head[0]).item()
        assert row["reward"] == pytest.approx((value - 0.5) / 2.0, rel=1e-4)
    monkeypatch.setattr(TextScorer, "rewards_of", lambda self, tokens: [0.0, float("nan")])
    with pytest.raises(RunError, match=r"rows.jsonl, line 2: the reward model gave nan, not a finite number"):
        run_batch(found)


def test_the_same_command_again_keeps_rewards(tmp_path: Path, reward_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhfless_ray.compat.openrlhf import batch_inference
    from rlhfless_ray.reward.reward_server import TextScorer

    rows = [{"input": f"{number}A1=", "output": "a2#2"} for number in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["--eval_task", "rm", "--pretrain", str(reward_model), "--dataset", str(tmp_path / "rows.jsonl")]
    found = translate_inference(BATCH, [*line, "--output_path", str(tmp_path / "out.jsonl"), "--max_len", "64"])
    asked, score = list[int](), TextScorer.rewards_of

    def stops(scorer: TextScorer, tokens: list[Any]) -> list[float]:
        asked.append(len(tokens))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return score(scorer, tokens)

    monkeypatch.setattr(batch_inference, "REWARDS_AT_ONCE", 2)
    monkeypatch.setattr(TextScorer, "rewards_of", stops)
    with pytest.raises(KeyboardInterrupt):
        run_batch(found)
    part = tmp_path / "out.jsonl.part"
    part.write_bytes(part.read_bytes()[:-9])  # killed while it wrote the fourth
    again = run_batch(found).read_text()
    assert asked == [2, 2, 1, 2, 1] and not part.exists(), "the torn batch is computed again as a whole"
    assert run_batch(found).read_text() == again and len(again.splitlines()) == 5
    assert asked[5:] == [2, 2, 1], "rewards of a command that came to its end were kept"


def test_mistakes_found_before_the_start_name_flag_and_row(tmp_path: Path, reward_model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1A1="}\n')
    line = ["--eval_task", "rm", "--pretrain", str(reward_model), "--dataset", str(tmp_path / "rows.jsonl")]
    with pytest.raises(UserError, match=r"^--dataset, --input_key: .*rows.jsonl, line 1: no column `input`, only `question`"):
        run_batch(translate_inference(BATCH, [*line, "--output_path", str(tmp_path / "out.jsonl")]))
    (tmp_path / "empty.jsonl").write_text('{"input": "1A1=", "output": ""}\n{"input": "", "output": "#2"}\n')
    empty = [*line[:-1], str(tmp_path / "empty.jsonl"), "--output_path", str(tmp_path / "out.jsonl")]
    with pytest.raises(UserError, match="--dataset: all 2 rows are without a prompt or a response"):
        run_batch(translate_inference(BATCH, empty))
    with pytest.raises(UserError, match=r"empty.jsonl, line 2: the prompt is empty; fix or remove the row"):
        run_batch(translate_inference(BATCH, [*empty, "--eval_task", "generate"]))
    with pytest.raises(UserError, match="--max_samples: must be at least 1"):
        announce(translate_inference(BATCH, [*empty, "--max_samples", "0"]))
    with pytest.raises(UserError, match=r"--output_path .*: it is a folder; name a file"):
        run_batch(translate_inference(BATCH, [*line, "--output_path", str(tmp_path)]))
    with pytest.raises(UserError, match=r"--output_path .*: cannot be written to"):
        run_batch(translate_inference(BATCH, [*line, "--output_path", str(tmp_path / "rows.jsonl" / "out.jsonl")]))


def test_rows_beyond_the_data_set_are_named(tmp_path: Path, reward_model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input": "1A1="}\n')
    line = ["--eval_task", "generate", "--pretrain", str(reward_model), "--dataset", str(tmp_path / "rows.jsonl"), "--iter", "1"]
    with pytest.raises(UserError, match="--iter: it begins at row 2049, but --dataset has 1 rows"):
        run_batch(translate_inference(BATCH, [*line, "--output_path", str(tmp_path / "out.jsonl")]))


class _Tokenizer:
    chat_template = "here"

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return "|".join(f"{turn['role'][0]}:{turn['content']}" for turn in turns) + "|a:"


def test_a_conversation_goes_on_until_it_is_cleared(tmp_path: Path) -> None:
    settings = translate_inference(CHAT, ["--pretrain", "m", "--apply_chat_template"]).settings
    chat = Conversation(settings, _Tokenizer())
    assert chat.ask("hi") == "u:hi|a:"
    chat.answer("yes")
    assert chat.ask("so") == "u:hi|a:yes|u:so|a:"
    chat.take_back()  # a prompt that is too long
    assert chat.ask("no") == "u:hi|a:yes|u:no|a:"
    chat.clear()
    assert chat.ask("new") == "u:new|a:"
    (tmp_path / "start.txt").write_text("Once")
    line = ["--pretrain", "m", "--ta_prompt", str(tmp_path / "start.txt"), "--enable_csft"]
    plain = Conversation(translate_inference(CHAT, line).settings, _Tokenizer())
    assert plain.ask("hi") == "Once\nUser: hi\nAssistant: <rm_score>: 5.00 "
    plain.answer("yes")
    assert plain.ask("so").endswith("5.00 yes\nUser: so\nAssistant: <rm_score>: 5.00 ")
    (tmp_path / "start.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"start.txt: 'utf-8' codec can't decode byte 0xff"):
        Conversation(translate_inference(CHAT, line).settings, _Tokenizer())
    with pytest.raises(UserError, match="--ta_prompt nowhere: No such file"):
        Conversation(translate_inference(CHAT, ["--pretrain", "m", "--ta_prompt", "nowhere"]).settings, _Tokenizer())


def test_a_conversation_begins_with_the_tokenizers_first_token() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "?": 1, "hi": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    settings = translate_inference(CHAT, ["--pretrain", "m", "--input_template", "{}"]).settings
    assert Conversation(settings, PreTrainedTokenizerFast(tokenizer_object=words)).tokens("hi").tolist() == [[0, 2]]


@pytest.mark.parametrize("template", ["{x} {}", "{} {}", "{} {"])
def test_a_template_into_which_nothing_can_be_put_is_refused(template: str) -> None:
    refusal = translate_inference(CHAT, ["--pretrain", "m", "--input_template", template]).refusal()
    assert "--input_template: the template must hold one {}" in str(refusal)


def test_engines_are_as_wide_as_the_machine_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PPO's launcher: OpenRLHF's scripts name GPUs, which cores are not."""
    line = ["--eval_task", "generate_vllm", *LEAST, "--tp_size", "4"]
    for gpus, width in (("0,1,2,3", 4), ("0,1", 2), ("", 1)):
        found = translate_inference(BATCH, line)
        monkeypatch.setattr("rlhfless_ray.compat.openrlhf.resources.visible_gpus", lambda _, gpus=gpus: len(gpus[::2]))
        assert (fit_width(found.settings, {}) == "") == (width == 4) and found.settings["rollout.tensor_parallel"] == width
    assert fit_width(found.settings | {"rollout.tensor_parallel": 4}, {"RAY_ADDRESS": "head:6379"}) == ""
    said = command_here("explain", "--", "python", "-m", "openrlhf.cli.batch_inference", *line, "--elastic.functions.slot", "cpu")
    assert said.returncode == 0 and "4 devices per engine (slots are CPU cores): an engine takes 1" in said.stdout


def test_explain_shows_what_is_refused() -> None:
    said = command_here("explain", "--json", "--", "deepspeed", "--module", "openrlhf.cli.batch_inference", "--eval_task", "rm", *LEAST)
    assert said.returncode == 0 and json.loads(said.stdout)["recipe"]["batch_inference"]["task"] == "rm"
    said = command_here("explain", "--", "python", "-m", "openrlhf.cli.interactive_chat", "--pretrain", "m", "--load_in_4bit")
    assert said.returncode == 2 and "--load_in_4bit: quantising weights" in said.stdout
