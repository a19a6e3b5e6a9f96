"""Command lines of the launchers that train on rows: every flag of every version has a meaning, and what it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.cli.supervised_launcher import _train, start
from rlhfless_ray.common.errors import Stopped, UserError
from rlhfless_ray.compat.openrlhf.command import replaced
from rlhfless_ray.compat.openrlhf.explain_report import list_flags
from rlhfless_ray.compat.openrlhf.flags import flags_of, versions, versions_of
from rlhfless_ray.compat.openrlhf.starters import OWN_VARIABLES, process_place
from rlhfless_ray.compat.openrlhf.supervised import _newest, translate_supervised
from rlhfless_ray.compat.openrlhf.supervised_table import OLDER_NAMES, RULES, TASKS
from rlhfless_ray.compat.openrlhf.translate_launch import translate_launch
from rlhfless_ray.recipe.mistakes import known_keys
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.supervise.find_checkpoints import CHECKPOINTS, PROGRESS
from tests.compat.commands import find
from tests.conftest import command_here

LEAST = ["--dataset", "rows.jsonl", "--pretrain", "folder", "--bf16"]
NEEDED = {"train_kd": ["--teacher_model", "big"], "train_prm": ["--placeholder_token", "+"], "train_kto": ["--output_key", "a"]}
"""Flags beside `LEAST` without which a launcher does not train."""


def test_three_launchers_were_given_up() -> None:
    for launcher in TASKS:
        found = versions_of(launcher)
        assert found[0] == "0.8.0" and found[-1] == ("0.9.5" if launcher in NEEDED else "0.11.2")


def test_every_flag_of_every_version_has_a_rule() -> None:
    names = {rule.name for rule in RULES}
    for launcher in TASKS:
        for version in versions():
            assert {_newest(flag[2:]) for flag in flags_of(version, launcher)} <= names, (launcher, version)


def test_every_key_is_one_of_the_recipe() -> None:
    keys = known_keys(SupervisedRecipe)
    assert not [key for rule in RULES for key in rule.keys if key not in keys]


@pytest.mark.parametrize("launcher", TASKS)
def test_defaults_of_every_version_make_a_recipe(launcher: str) -> None:
    for version in versions_of(launcher):
        dotted = "--data.dataset" in flags_of(version, launcher)
        line = ["--data.dataset", "rows.jsonl", "--model.model_name_or_path", "folder"] if dotted else LEAST
        if not dotted and "--bf16" not in flags_of(version, launcher):
            line = line[:-1]
        line = [*line, *NEEDED.get(launcher, [])]
        if launcher == "train_sft":
            line = [*line, "--data.output_key" if dotted else "--output_key", "answer"]
        found = translate_supervised(launcher, [*line, "--elastic.dialect", version], {})
        assert found.refusal() is None and found.version == version
        recipe = found.recipe()
        assert recipe.task == TASKS[launcher] and recipe.policy.dtype == "bfloat16" and recipe.learner.zero_stage == 2
        assert recipe.data.batch_rows == 128 and recipe.data.contract == "openrlhf" and recipe.data.remainder == "carry"
        assert recipe.learner.betas == (0.9, 0.95) and recipe.learner.schedule == "cosine_with_min_lr"
        assert recipe.run.schedule_end == ("last_step" if (launcher, version) == ("train_sft", "0.11.2") else "whole_batches")
        assert recipe.learner.min_rate_share == 0.1 and recipe.learner.warmup_share == 0.03 and recipe.save.path == "./ckpt"
        expected = {
            "train_sft": (5e-6, 2, 2048),
            "train_rm": (9e-6, 1, 512),
            "train_dpo": (1e-5, 1, 512),
            "train_kto": (1e-5, 1, 2048),
            "train_kd": (5e-6, 1, 2048),
            "train_prm": (1e-6, 1, 2048),
        }[launcher]
        assert (recipe.learner.learning_rate, recipe.run.epochs, recipe.data.max_tokens) == expected


def settings(launcher: str, *more: str) -> dict[str, Any]:
    return translate_supervised(launcher, [*LEAST, *NEEDED.get(launcher, []), *more], {}).settings


@pytest.mark.parametrize(
    ("launcher", "flags", "expected"),
    [
        ("train_sft", ["--pretrain_mode"], {"data.train_on": "all", "data.response_column": ""}),
        (
            "train_sft",
            ["--multiturn", "--apply_chat_template", "--input_key", "messages"],
            {"data.train_on": "assistant", "data.template": "chat", "data.prompt_column": "messages"},
        ),
        ("train_sft", ["--input_template", "Q: {}\nA:"], {"data.input_template": "Q: {}\nA:"}),
        ("train_sft", ["--dataset", "a,b@c", "--dataset_probs", "0.2,0.8"], {"data.paths": ["a", "b@c"], "data.probabilities": [0.2, 0.8]}),
        ("train_sft", ["--save_steps", "50", "--ckpt_path", "c"], {"checkpoint.every_steps": 50, "checkpoint.path": "c"}),
        ("train_sft", ["--save_hf_ckpt"], {"checkpoint.every_steps": 0, "checkpoint.save_hf": None}),
        ("train_dpo", ["--save_steps", "5", "--save_hf_ckpt"], {"checkpoint.every_steps": 5, "checkpoint.save_hf": True}),
        ("train_rm", ["--save_steps", "5", "--disable_ds_ckpt"], {"checkpoint.every_steps": 0, "checkpoint.resumable": None}),
        (
            "train_sft",
            ["--save_steps", "5", "--disable_ds_ckpt", "--save_hf_ckpt"],
            {"checkpoint.every_steps": 5, "checkpoint.save_hf": True, "checkpoint.resumable": False},
        ),
        ("train_sft", ["--max_norm", "0"], {"learner.grad_clip": 0, "run.schedule_end": "whole_batches"}),
        ("train_sft", ["--eval_steps", "7", "--eval_dataset", "e"], {"evaluate.every_steps": 7, "evaluate.path": "e"}),
        ("train_rm", ["--margin_loss"], {"data.margin_column": "margin"}),
        ("train_rm", ["--eval_steps", "9"], {"evaluate.every_steps": 9, "evaluate.each_epoch": True, "evaluate.train_share": 0.01}),
        ("train_rm", ["--eval_dataset", "e"], {"evaluate.path": "e", "evaluate.train_share": None}),
        ("train_rm", ["--elastic.evaluate.rows", "5"], {"evaluate.rows": 5, "evaluate.train_share": None}),
        ("train_rm", [], {"data.margin_column": "", "data.prompt_column": "", "loss.kind": "sigmoid"}),
        ("train_rm", ["--loss", "logexp", "--value_head_prefix", "value"], {"loss.kind": "logexp", "loss.value_head": "value"}),
        ("train_dpo", ["--ipo", "--beta", "0.3", "--label_smoothing", "0.1"], {"loss.kind": "ipo", "loss.beta": 0.3}),
        ("train_dpo", ["--ref_pretrain", "other", "--nll_loss_coef", "0.2"], {"reference.path": "other", "loss.nll_coefficient": 0.2}),
        ("train_dpo", ["--ref_pretrain", "folder"], {"reference.path": ""}),
        (
            "train_dpo",
            ["--lora_rank", "8", "--lora_alpha", "32", "--target_modules", "q_proj", "v_proj"],
            {"lora.rank": 8, "lora.alpha": 32, "lora.target_modules": ["q_proj", "v_proj"]},
        ),
        (
            "train_kto",
            ["--desirable_loss_weight", "1.5", "--undesirable_loss_weight", "0.5", "--label_key", "good", "--beta", "0.2"],
            {"loss.desirable_weight": 1.5, "loss.undesirable_weight": 0.5, "data.label_column": "good", "loss.beta": 0.2},
        ),
        ("train_kto", [], {"data.prompt_column": "input", "data.response_column": "a", "data.label_column": "label", "loss.beta": 0.01}),
        ("train_kd", ["--kd_coef", "0.7"], {"teacher.path": "big", "loss.teacher_weight": 0.7, "data.response_column": "output"}),
        ("train_kd", ["--teacher_offload", "--pretrain_mode"], {"loss.teacher_weight": 0.4, "data.train_on": "all"}),
        (
            "train_prm",
            ["--reward_tokens", "+", "-", "--input_key", "text", "--label_key", "labels", "--flash_attn"],
            {"data.placeholder_token": "+", "data.reward_tokens": ["+", "-"], "data.prompt_column": "text", "data.label_column": "labels"},
        ),
        ("train_prm", [], {"data.reward_tokens": None, "data.prompt_column": "input"}),
        ("train_dpo", ["--elastic.learner.ranks", "4"], {"learner.ranks": 4}),
        ("train_dpo", [], {"data.max_rows": 1000000}),
        ("train_dpo", ["--max_samples", "2000000"], {"data.max_rows": 2000000}),
        ("train_sft", ["--input_template", "no gap"], {"data.input_template": None}),
        ("train_dpo", ["--tokenizer_chat_template", "{{ x }}"], {"data.chat_template": None}),
        ("train_dpo", ["--tokenizer_chat_template", "{{ x }}", "--apply_chat_template"], {"data.chat_template": "{{ x }}"}),
    ],
)
def test_flags_become_settings(launcher: str, flags: list[str], expected: dict[str, Any]) -> None:
    found = settings(launcher, *flags)
    assert {key: found.get(key) for key in expected} == expected
    if expected.get("loss.kind") == "ipo":
        assert "loss.label_smoothing" not in found


@pytest.mark.parametrize(
    ("launcher", "flags", "named"),
    [
        ("train_sft", [*LEAST, "--load_in_4bit"], "--load_in_4bit: quantising weights"),
        ("train_sft", [*LEAST, "--aux_loss_coef", "0.01"], "--aux_loss_coef: the router's auxiliary loss"),
        ("train_sft", ["--pretrain", "x", "--bf16"], "--dataset: name the data set"),
        ("train_sft", [*LEAST, "--dataset_probs", "0.5,x"], "--dataset_probs: expected numbers separated by commas"),
        ("train_sft", [*LEAST, "--dataset", "a,b", "--dataset_probs", "1"], "--dataset_probs: 1 probabilities for 2 data sets"),
        ("train_sft", [*LEAST, "--ring_attn_size", "2"], "--ring_attn_size: OpenRLHF requires --packing_samples with it"),
        ("train_kd", LEAST, "--teacher_model: name the teacher"),
        ("train_prm", LEAST, "--placeholder_token: name the token that ends each step"),
        ("train_dpo", ["--data.dataset", "x", "--model.model_name_or_path", "y", "--optim", "muon"], "--optim: the optimizer muon"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(launcher: str, flags: list[str], named: str) -> None:
    assert named in str(translate_supervised(launcher, flags, {}).refusal())


@pytest.mark.parametrize(
    ("launcher", "flags", "more"),
    [
        ("train_sft", ["--lora_alpha", "8"], ["--lora_rank", "4"]),
        ("train_sft", ["--wandb_project", "p"], ["--use_wandb", "x"]),
        ("train_sft", ["--ckpt_path", "c"], ["--save_steps", "5"]),
        ("train_dpo", ["--tokenizer_chat_template", "t"], ["--apply_chat_template"]),
        ("train_dpo", ["--eval_split", "train"], ["--eval_dataset", "e"]),
        ("train_dpo", ["--lr_scheduler", "linear", "--min_lr_ratio", "0.2"], ["--lr_scheduler", "cosine_with_min_lr"]),
    ],
)
def test_a_flag_that_needs_another_has_no_effect_alone(launcher: str, flags: list[str], more: list[str]) -> None:
    line = [*LEAST[:-1], *flags]  # without --bf16, which has an effect in older versions only
    statuses = [{o.flag: o.status for o in translate_supervised(launcher, [*line, *other], {}).flags} for other in ([], more)]
    assert [status[flags[-2]] for status in statuses] == ["no effect", "honoured"]
    assert translate_supervised("train_sft", [*LEAST, "--disable_ds_ckpt"], {}).refusal() is None


def test_notes_are_true_for_the_version() -> None:
    for version in versions_of("train_sft"):
        dotted = "--data.dataset" in flags_of(version, "train_sft")
        line = ["--data.dataset", "d", "--model.model_name_or_path", "m"] if dotted else LEAST[:-1]
        notes = " ".join(translate_supervised("train_sft", [*line, "--elastic.dialect", version], {}).notes)
        assert ("a mean of the means of its micro-batches" in notes) == (versions().index(version) < versions().index("0.10.4"))
    notes = " ".join(translate_supervised("train_dpo", LEAST[:-1], {}).notes)
    assert "OpenRLHF 0.9.1 and older accept this command too and keep the dtype of the model's folder" in notes
    assert not translate_supervised("train_dpo", LEAST, {}).notes
    assert not translate_supervised("train_dpo", [*LEAST[:-1], "--param_dtype", "bf16"], {}).notes


def test_notes_are_true_for_the_template() -> None:
    notes = translate_supervised("train_sft", [*LEAST, "--input_template", "no gap"], {}).notes
    assert "--input_template: the template has no {}, so it is not used" in notes
    assert "in bash write $'\\n'" in " ".join(translate_supervised("train_sft", [*LEAST, "--input_template", "{}\\n"], {}).notes)


@pytest.mark.parametrize("launcher", [launcher for launcher in TASKS if launcher != "train_prm"])
def test_an_abbreviation_never_becomes_another_flag_of_an_older_version(launcher: str) -> None:
    line = [*LEAST, *NEEDED.get(launcher, []), "--lr", "1e-5"]
    with pytest.raises(UserError, match=r"ambiguous option: --lr could match .*; write the full name"):
        translate_supervised(launcher, line, {})
    if launcher in ("train_rm", "train_dpo", "train_kto"):  # until 0.8.4 they had one flag that begins so
        assert translate_supervised(launcher, [*line, "--elastic.dialect", "0.8.4"], {}).settings["learner.warmup_share"] == 1e-5


def test_unknown_flags_and_versions_are_named() -> None:
    with pytest.raises(
        UserError,
        match=r"train_sft of OpenRLHF 0.9.1: unrecognized arguments: --beta\n--beta: no flag of train_sft .*, but one of train_dpo",
    ):
        translate_supervised("train_sft", [*LEAST, "--beta", "1"], {})
    with pytest.raises(
        UserError, match=r"\n--actor.model_name_or_path: .* one of train_ppo_ray .*; did you mean --model.model_name_or_path \("
    ):
        translate_supervised("train_sft", ["--data.dataset", "d", "--actor.model_name_or_path", "m"], {})
    with pytest.raises(UserError, match=r"train_sft of OpenRLHF 0.11.2: --elastic.dialect: 0.1 is none of the versions 0.8.0, .*, 0.11.2"):
        translate_supervised("train_sft", [*LEAST, "--elastic.dialect", "0.1"], {})
    with pytest.raises(UserError, match=r"--elastic.data.batch_rows: OpenRLHF's --train_batch_size sets this"):
        translate_supervised("train_sft", [*LEAST, "--elastic.data.batch_rows", "1"], {})


def test_own_settings_need_no_section_with_other_launchers_either() -> None:
    found = translate_supervised("train_sft", [*LEAST, "--elastic.lease_deadline_s", "5"], {})
    assert found.settings["functions.lease_deadline_s"] == found.own["functions.lease_deadline_s"] == 5


def test_flags_of_several_versions_are_read_together() -> None:
    dotted = ["--model.model_name_or_path", "m", "--data.output_key", "a", "--ckpt.output_dir", "o", "--data.max_len", "64"]
    line = [*dotted, "--dataset", "d.jsonl", "--train_batch_size", "4", "--bf16"]
    found = translate_supervised("train_sft", line, {})
    assert found.version == "0.11.2" and found.refusal() is None
    wanted = {"data.path": "d.jsonl", "data.batch_rows": 4, "policy.path": "m", "policy.dtype": "bfloat16"}
    assert {key: found.settings[key] for key in wanted} == wanted and found.owners["data.batch_rows"] == "--train_batch_size"
    with pytest.raises(UserError, match=r"--train_batch_size: --train.batch_size is the same setting with another value"):
        translate_supervised("train_sft", ["--train.batch_size", "8", *line], {})
    with pytest.raises(UserError, match=r"unrecognized arguments: --dataset"):
        translate_supervised("train_sft", [*line, "--elastic.dialect", "0.11.2"], {})


def test_invalid_values_name_the_flag() -> None:
    with pytest.raises(UserError, match=r"--adam_betas: .*`learner.betas.1`: input should be less than 1"):
        translate_supervised("train_sft", [*LEAST, "--output_key", "a", "--adam_betas", "0.9", "1.5"], {}).recipe()
    with pytest.raises(UserError, match=r"--elastic.learner.ranks: `\{\[` is not valid YAML"):
        translate_supervised("train_sft", [*LEAST, "--elastic.learner.ranks", "{["], {})
    with pytest.raises(UserError, match=r"--train_batch_size: .*data.batch_rows"):
        translate_supervised("train_sft", [*LEAST, "--output_key", "a", "--train_batch_size", "0"], {}).recipe()


@given(st.lists(st.sampled_from(sorted({*OLDER_NAMES, *(r.name for r in RULES)})), max_size=6, unique=True), st.sampled_from(sorted(TASKS)))
def test_any_flags_are_translated_or_refused_in_words(flags: list[str], launcher: str) -> None:
    known = flags_of("0.8.11", launcher)
    tokens = list(LEAST)
    for flag in flags:
        spec = known.get(f"--{flag}")
        if spec is not None and flag not in ("dataset", "pretrain", "bf16"):
            default = spec.choices[0] if spec.choices else spec.default or 1
            value = [str(int(default) if spec.type == "int" else default)] if spec.takes_value else []
            if flag == "reward_tokens":
                value = ["+", "-"]
            if spec.nargs == 2:
                value = ["0.9", "0.99"]
            tokens += [f"--{flag}", *value]
    found = translate_supervised(launcher, tokens, {})
    statuses = {flag: status for flag, status, _ in found.flags}
    assert all(token in statuses for token in tokens if token.startswith("--"))
    assert all(why for _, _, why in found.flags)


def test_deepspeed_and_torchrun_only_tell_the_number_of_ranks() -> None:
    rest = ["--bf16", "--max_epochs", "1"]
    for head, ranks in [
        (["deepspeed", "--module"], []),
        (["deepspeed", "--num_gpus", "4", "--module"], ["--elastic.learner.ranks", "4"]),
        (["deepspeed", "--include", "localhost:0,1", "--module"], ["--elastic.learner.ranks", "2"]),
        (["deepspeed", "--include=one:0,1@two:2,3,4", "--module"], ["--elastic.learner.ranks", "5"]),
        (["torchrun", "--nproc_per_node=8", "--nnodes=2", "-m"], ["--elastic.learner.ranks", "16"]),
        (["torchrun", "--nproc_per_node", "gpu", "-m"], []),
    ]:
        command = [*head, "openrlhf.cli.train_sft", *rest]
        assert replaced(command) == [sys.executable, "-m", "rlhfless_ray.cli.train_sft", *ranks, *rest]
        assert find(command).flags == find(["env", "A=1", *command]).flags == [*ranks, *rest]
        inference = [*head, "openrlhf.cli.batch_inference", *rest]
        assert replaced(inference) == [sys.executable, "-m", "rlhfless_ray.cli.batch_inference", *rest]
    for starter in ("python -m torch.distributed.run --nproc_per_node 3 -m", "accelerate launch --num_processes 3 --num_machines 2 -m"):
        assert find([*starter.split(), "openrlhf.cli.train_sft", *rest]).flags == ["--elastic.learner.ranks", "3", *rest]
    assert translate_supervised("train_sft", LEAST, {"RANK": "0", "WORLD_SIZE": "8"}).settings["learner.ranks"] == 8


def test_explain_counts_the_ranks_that_the_launcher_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfless_ray.compat.openrlhf.translate_launch.visible_gpus", lambda: 4)
    for command, ranks in (("deepspeed --module", 4), ("python -m", 4), ("deepspeed --num_gpus 2 --module", 2)):
        found = translate_launch(find([*command.split(), "openrlhf.cli.train_sft", *LEAST]))
        assert found is not None and found.settings["learner.ranks"] == ranks


@pytest.mark.parametrize(
    ("before", "names"),
    [
        ("mpirun -n 4 --bind-to core", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
        ("mpirun --allow-run-as-root -x PATH -np 4", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
        ("/opt/mpich/bin/mpiexec -n 4", ("PMI_RANK", "PMI_SIZE")),
        ("srun --mpi=pmix -n 4", ("PMIX_RANK", "SLURM_STEP_NUM_TASKS")),
    ],
)
def test_of_the_processes_that_mpi_starts_the_first_runs_all_ranks(
    before: str, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    command = [*before.split(), "python3", "-m", "openrlhf.cli.train_sft", *LEAST]
    assert replaced(command) == [*before.split(), "python3", "-m", "rlhfless_ray.cli.train_sft", *LEAST]
    told = [] if before.startswith("srun") else ["--elastic.learner.ranks", "4"]
    assert find(command).flags == [*told, *LEAST]
    monkeypatch.setattr("rlhfless_ray.cli.guarded.guarded", lambda action: action())
    ran: list[list[str]] = []
    for rank in range(4):
        monkeypatch.setenv(names[0], str(rank))
        monkeypatch.setenv(names[1], "4")
        start("train_sft", ran.append, LEAST)
        assert translate_supervised("train_sft", LEAST).settings["learner.ranks"] == 4
    assert ran == [LEAST]
    assert all(OWN_VARIABLES.fullmatch(name) for name in names if not name.startswith("SLURM"))


def test_a_batch_job_alone_tells_no_ranks() -> None:
    assert process_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}) == (0, None)


@pytest.mark.parametrize("launcher", [*TASKS, "batch_inference", "interactive_chat"])
def test_the_list_of_flags_has_those_of_every_version(launcher: str) -> None:
    listed = list_flags(launcher).split()
    assert not [flag for version in versions_of(launcher) for flag in flags_of(version, launcher) if flag not in listed]
    (hub,) = (line for line in list_flags(launcher).splitlines() if line.startswith("--use_ms"))
    assert "not supported yet" in hub, "its value is refused"


@pytest.mark.parametrize(("launcher", "flag"), [("train_sft", "--bf16"), ("batch_inference", "--bf16"), ("train_rl_ray", "--fsdp.tp_size")])
def test_help_lists_the_flags(launcher: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def end(action: Any) -> None:
        action()

    monkeypatch.setattr("rlhfless_ray.cli.guarded.guarded", end)
    start(launcher, lambda _: pytest.fail("it starts"), ["--pretrain", "m", "--help"])
    assert flag in capsys.readouterr().out


def test_explain_shows_the_recipe(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text(f"set -x\ndeepspeed --module openrlhf.cli.train_sft {' '.join(LEAST)} --output_key a --packing_samples\n")
    said = command_here("explain", "--", "bash", str(script))
    assert said.returncode == 0 and "dialect     train_sft of OpenRLHF" in said.stdout and "task: sft" in said.stdout
    found = json.loads(command_here("explain", "--json", "--", "bash", str(script)).stdout)
    assert found["runs"] and {"flag": "--packing_samples", "status": "no effect"}.items() <= found["flags"][-1].items()
    script.write_text(script.read_text().replace("--packing_samples", "--load_in_4bit"))
    assert command_here("explain", "--", "bash", str(script)).returncode == 2


def test_explain_tells_of_every_launch_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "stages.sh"
    line = f"python -m openrlhf.cli.train_{{}} {' '.join(LEAST)}"
    script.write_text(f"{line.format('sft')} --output_key a\n{line.format('dpo')}\n{line.format('rm')} --load_in_4bit\n")
    said = command_here("explain", "--", "bash", str(script))
    assert said.returncode == 2 and "dialect     train_sft" in said.stdout
    assert said.stdout.endswith(
        "also starts train_dpo, which would run\n"
        "also starts train_rm, which would not run: --load_in_4bit: quantising weights when they are loaded has no counterpart here\n"
    )
    found = json.loads(command_here("explain", "--json", "--", "bash", str(script)).stdout)["also_starts"]
    assert [(one["launcher"], one["runs"]) for one in found] == [("train_dpo", True), ("train_rm", False)]


@pytest.mark.parametrize("signal_number", [None, 15])
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("status", ["done", "stopped"])
def test_a_run_is_continued_as_in_openrlhf(
    signal_number: int | None, saves: bool, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was finished without --save_steps has left no checkpoint in OpenRLHF: the next one begins from the start."""
    run, resumed = RunFolder(tmp_path / "runs" / "train_sft"), []
    for folder in (run.path, tmp_path / "ckpt" / "train_sft" / "checkpoint_1", run.path / CHECKPOINTS / "checkpoint_1"):
        folder.mkdir(parents=True)
        (folder / PROGRESS).write_text('{"steps": 4}')
    (run.path / "status.json").write_text(json.dumps({"status": status}))

    def run_supervised(recipe: SupervisedRecipe, *, resume: bool, resume_changed: bool) -> RunFolder:
        assert not resume_changed
        resumed.append(resume)
        if signal_number is not None:
            stop = Stopped(signal_number)
            stop.resumable = True
            raise stop
        return run

    monkeypatch.setattr("rlhfless_ray.supervise.run_supervised.run_supervised", run_supervised)
    monkeypatch.chdir(tmp_path)
    line = [*LEAST, "--output_key", "a", "--ckpt_path", "ckpt", "--save_path", "saved", *(["--save_steps", "2"] if saves else [])]
    for flags, resumes, said in (
        (["--load_checkpoint"], saves or status == "stopped", "--load_checkpoint"),
        ([], False, "--load_checkpoint" if saves else "rlhfless train runs/train_sft/recipe.yaml --resume"),
    ):
        if signal_number is None:
            _train("train_sft", [*line, *flags])
            assert "model:  runs/train_sft/model\nsaved:  saved\n" in capsys.readouterr().out.replace(f"{tmp_path}/", "")
        else:
            with pytest.raises(Stopped) as caught:
                _train("train_sft", [*line, *flags])
            assert caught.value.continue_with == said
        assert resumed.pop() == resumes


def test_the_launcher_refuses_in_one_sentence() -> None:
    said = command_here("--pretrain", "nowhere", "--dataset", "rows.jsonl", "--bf16", "--output_key", "a", module="tests.compat.sft_main")
    assert said.returncode == 2 and "nowhere" in said.stderr and said.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("launcher", "flags", "why"),
    [
        ("train_sft", [], ""),
        ("train_dpo", [], ""),
        ("train_dpo", ["--ref_pretrain", "elsewhere"], "the config.json of `elsewhere` is not on this machine"),
        ("train_sft", ["--elastic.learner.ranks", "3"], "2 does not divide the number of ranks, 3"),
        ("train_sft", ["--elastic.learner.ranks", "4"], ""),
        ("train_sft", ["--elastic.learner.tensor_parallel", "1"], "--elastic.learner.tensor_parallel decides here"),
        ("train_sft", ["--lora_rank", "4", "--lora_dropout", "0.1"], "dropout of adapters is drawn for whole sequences"),
    ],
)
def test_sequence_parallelism_is_honoured_where_the_model_allows_it(tmp_path: Path, launcher: str, flags: list[str], why: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_attention_heads": 4}))
    line = ["--dataset", "rows.jsonl", "--pretrain", str(tmp_path), "--bf16", "--ring_attn_size", "2", "--packing_samples", *flags]
    found = translate_supervised(launcher, line, {}, ranks=2)
    (outcome,) = [one for one in found.flags if one.flag == "--ring_attn_size"]
    assert outcome.status == ("hint" if why else "honoured") and why in outcome.why and found.refusal() is None
    assert found.recipe().learner.sequence_parallel == (1 if why else 2)


WHOLE = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("launcher", "flags", "why"),
    [
        ("train_sft", [], ""),
        ("train_dpo", ["--ref_pretrain", "elsewhere"], ""),
        ("train_rm", ["--lora_rank", "4"], ""),
        ("train_prm", ["--placeholder_token", "+"], ""),
        ("train_kd", ["--teacher_model", "elsewhere"], "the config.json of `elsewhere` is not on this machine"),
        ("train_sft", ["--elastic.learner.ranks", "3"], "2 does not divide the number of ranks, 3"),
        ("train_sft", ["--elastic.run.min_ranks", "1"], ""),
        ("train_sft", ["--zero_stage", "3"], "ZeRO stages 0 to 2"),
        ("train_sft", ["--ring_attn_size", "2", "--packing_samples"], "ranks share sequences instead"),
    ],
)
def test_tensor_parallelism_is_honoured_where_the_model_allows_it(tmp_path: Path, launcher: str, flags: list[str], why: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WHOLE))
    line = ["--dataset", "rows.jsonl", "--pretrain", str(tmp_path), "--bf16", "--ds_tensor_parallel_size", "2", *flags]
    found = translate_supervised(launcher, line, {}, ranks=2)
    (outcome,) = [one for one in found.flags if one.flag == "--ds_tensor_parallel_size"]
    assert outcome.status == ("hint" if why else "honoured") and why in outcome.why and found.refusal() is None
    recipe = found.recipe()
    assert (recipe.learner.tensor_parallel, recipe.min_ranks) == ((1, 1) if why else (2, 1))
