"""Command lines of Molt's train_rl_ray: every flag has a meaning, and what it is."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.command import replaced
from rlhfless_ray.compat.openrlhf.flags import flags_of, newest
from rlhfless_ray.compat.openrlhf.molt import HINTS, IDLE, MOLTS_OWN, REFUSES, RENAMED, SETTING, flags, translate_molt
from rlhfless_ray.compat.openrlhf.outcomes import HINT, HONOURED, REFUSED
from tests.compat.commands import find
from tests.conftest import command_here

LEAST = [
    "--actor.model_name_or_path",
    "m",
    "--data.prompt_dataset",
    "rows.jsonl",
    "--train.agent_path",
    "agent.py",
    "--vllm.num_engines",
    "1",
]


def settings(*more: str) -> dict[str, Any]:
    return translate_molt([*LEAST, *more], {}).settings


@pytest.mark.parametrize("more", [[], ["--algo.advantage.is_correction_level", "token", "--train.force_sync_mode"]])
def test_partial_rollouts_without_overlap_are_refused_by_molts_flags(more: list[str]) -> None:
    with pytest.raises(UserError, match=r"--train.partial_rollout_enable: .* set --algo.advantage.is_correction_level, and leave"):
        settings("--train.partial_rollout_enable", *more)
    found = settings("--train.partial_rollout_enable", "--algo.advantage.is_correction_level", "token")
    assert found["rollout.partial"] == "continue"


def test_every_flag_is_openrlhfs_or_has_a_meaning() -> None:
    known = flags_of(newest())
    own = {flag for flag in flags() if flag not in known}
    assert len(own) >= 50 and own == {*HINTS, *IDLE, *REFUSES, *SETTING, *RENAMED} - set(known)
    assert all(new in known for new in RENAMED.values())


def test_the_list_of_flags_has_all_of_them() -> None:
    listed = command_here("explain", "--flags", "molt.cli.train_rl_ray").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(flags())


def test_defaults_are_molts() -> None:
    found = translate_molt(LEAST, {})
    assert found.refusal() is None, str(found.refusal())
    recipe = found.recipe()
    assert recipe.algorithm.advantage.estimator == "reinforce" and recipe.algorithm.kl.coefficient == 0
    assert recipe.learner.schedule == "constant" and recipe.learner.gradient_checkpointing is True
    assert recipe.rollout.max_lag_steps == 0 and "take turns" in str(found.notes)
    assert "a command line of Molt" in found.notes[0]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--algo.advantage.estimator", "grpo", "--rollout.n_samples_per_prompt", "4"], {"algorithm.advantage.estimator": "group_norm"}),
        (["--algo.advantage.no_whiten"], {"algorithm.advantage.whiten": False}),
        (["--algo.advantage.is_correction_level", "token"], {"rollout.max_lag_steps": 1, "algorithm.loss.correction_level": "token"}),
        (["--algo.advantage.is_correction_level", "token", "--train.force_sync_mode"], {"rollout.max_lag_steps": None}),
        (["--actor.gradient_checkpoint", "none"], {"learner.gradient_checkpointing": False}),
        (["--fsdp.offload", "optimizer"], {"learner.optimizer_offload": True}),
        (["--actor.loss_mode", "gspo"], {"algorithm.loss.kind": "gspo"}),
        (
            ["--algo.advantage.estimator", "on_policy_distill", "--ref.model_name_or_path", "big"],
            {"algorithm.advantage.estimator": "on_policy_distill", "algorithm.kl.coefficient": 1.0, "reference.path": "big"},
        ),
    ],
)
def test_flags_become_settings(more: list[str], expected: dict[str, Any]) -> None:
    found = settings(*more)
    assert {key: found.get(key) for key in expected} == expected


def test_what_becomes_of_each_is_told() -> None:
    more = [
        "--fsdp.tp_size",
        "4",
        "--train.routing_replay",
        "--algo.advantage.lam",
        "0.9",
        "--vllm.block_size",
        "32",
        "--vllm.dtype",
        "bfloat16",
    ]
    found = translate_molt([*LEAST, *more], {})
    status = {one.flag: one.status for one in found.flags}
    assert set(status) == {token for token in (*LEAST, *more) if token.startswith("--")}
    assert status["--fsdp.tp_size"] == HINT and status["--train.routing_replay"] == REFUSED
    assert status["--actor.model_name_or_path"] == status["--train.agent_path"] == HONOURED
    assert str(found.refusal()) == "--train.routing_replay: replay of routers' choices is not available with agents"


def test_a_teacher_may_be_the_policy_and_its_coefficient_is_not_replaced() -> None:
    line = [*LEAST, "--algo.advantage.estimator", "on_policy_distill", "--ref.model_name_or_path", LEAST[1]]
    assert translate_molt(line, {}).recipe().reference.path == LEAST[1]
    with pytest.raises(UserError, match=r"--algo.kl.init_coef: recipe: algorithm.kl: with on_policy_distill"):
        translate_molt([*line, "--algo.kl.init_coef", "0"], {}).recipe()


@pytest.mark.parametrize(("flag", "value"), MOLTS_OWN.items())
def test_values_that_only_molt_has_are_refused_by_molts_flag(flag: str, value: str) -> None:
    assert str(translate_molt([*LEAST, flag, value], {}).refusal()) == f"{flag}: {value} has no counterpart here yet"


def test_what_molt_would_not_accept_is_named() -> None:
    with pytest.raises(UserError, match=r"train_rl_ray: unrecognized arguments: --ds.zero_stage 3 \(read as Molt\)"):
        translate_molt([*LEAST, "--ds.zero_stage", "3"], {})
    with pytest.raises(UserError, match=r"--ref.model_name_or_path: on_policy_distill needs a teacher"):
        translate_molt([*LEAST, "--algo.advantage.estimator", "on_policy_distill"], {})
    with pytest.raises(UserError, match=r"--train.agent_path: name the agent's file, which gives the rewards"):
        translate_molt(["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"], {})


def test_the_launcher_is_found_and_explained() -> None:
    line = ["python3", "-m", "molt.cli.train_rl_ray", *LEAST]
    assert (find(line).launcher, find(line).flags) == ("train_rl_ray", LEAST)
    assert replaced(line)[2] == "rlhfless_ray.cli.train_rl_ray"
    said = command_here("explain", "--", *line, "--fsdp.tp_size", "2", "--train.rollout_dump_dir", "d")
    assert said.returncode == 2 and "a command line of Molt" in said.stdout
    assert "--train.rollout_dump_dir: samples are in the run folder" in said.stdout and "--fsdp.tp_size 2" in said.stdout
