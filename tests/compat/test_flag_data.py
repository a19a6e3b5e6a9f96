"""The facts that the package carries, against what is known of the published versions."""

import json
from pathlib import Path

import pytest

from rlhfless_ray.compat.openrlhf import flags
from rlhfless_ray.compat.openrlhf.dialect import advice, instead_of
from rlhfless_ray.compat.openrlhf.flag_table import RULES
from rlhfless_ray.compat.openrlhf.normalise import targets


@pytest.mark.parametrize(
    ("version", "count"),
    [("0.8.0", 122), ("0.8.2", 126), ("0.8.11", 136), ("0.9.0", 136), ("0.9.1", 138), ("0.9.3", 139), ("0.9.5", 139), ("0.9.10", 141),
     ("0.10.1", 144), ("0.11.0", 164), ("0.11.2", 167)],
)  # fmt: skip
def test_each_version_has_as_many_flags_as_its_wheel(version, count):
    assert len(flags.flags_of(version)) == count


@pytest.mark.parametrize(
    ("flag", "first", "last"),
    [("--flash_attn", "0.8.0", "0.8.9"), ("--bf16", "0.8.0", "0.9.1"), ("--use_icepop", "0.9.1", "0.9.2"),
     ("--prompt_max_len", "0.8.0", "0.9.7"), ("--pretrain", "0.8.0", "0.10.1"), ("--actor.optim", "0.10.2", "0.11.2"),
     ("--algo.advantage.is_correction_type", "0.10.2", "0.11.1"), ("--local_rank", "0.8.0", "0.11.2")],
)  # fmt: skip
def test_flags_live_as_long_as_they_did(flag, first, last):
    spans = flags.history(flag)
    assert (spans[0].since, spans[-1].until) == (first, last)


def test_defaults_changed_where_they_did():
    def default(flag, version):
        return flags.flags_of(version)[flag].default

    assert (default("--value_clip", "0.8.1"), default("--value_clip", "0.8.2")) == (0.2, 0.5)
    assert (default("--entropy_loss_coef", "0.8.2"), default("--entropy_loss_coef", "0.8.3")) == (0, None)
    assert (default("--micro_train_batch_size", "0.9.10"), default("--micro_train_batch_size", "0.10.0")) == (4, 1)
    assert (default("--max_ckpt_mem", "0.9.8"), default("--max_ckpt_mem", "0.9.9")) == (1e8, float("inf"))
    assert flags.flags_of("0.9.0")["--vllm_is_truncated_threshold"].nargs is None
    assert flags.flags_of("0.9.1")["--vllm_is_truncated_threshold"].nargs == 2
    assert "mis" in flags.flags_of("0.9.3")["--vllm_is_correction_type"].choices
    assert flags.flags_of("0.9.4")["--vllm_is_correction_type"].choices == ("tis", "icepop", "seq-mask-tis")


def test_every_flag_that_ever_was_leads_to_names_of_today():
    today = {flag[2:] for flag in flags.flags_of(flags.newest())}
    nowhere = {flag for flag in flags.all_flags() if not targets(flag)}
    assert nowhere == {"--actor_init_on_gpu", "--ptx_coef", "--perf"}
    for flag in flags.all_flags():
        assert set(targets(flag)) <= today | {"data.prompt_max_len"}


def test_the_table_has_a_row_for_every_flag_and_no_other():
    assert sorted(rule.name for rule in RULES) == sorted(flag[2:] for flag in flags.flags_of(flags.newest()))


def test_every_removed_flag_has_an_advice_that_names_its_versions_and_what_to_write():
    for flag in flags.all_flags():
        if flag in flags.flags_of(flags.newest()):
            continue
        spans = flags.history(flag)
        said = advice(flag)
        assert flag in said and spans[0].since in said and spans[-1].until in said
        for instead in instead_of(flag).split():
            if instead.startswith("--"):
                assert instead in flags.flags_of(flags.newest()), instead


def test_a_flag_of_another_launcher_is_said_to_be_one():
    assert "train_sft (0.10.2 to 0.11.2)" in advice("--data.multiturn")


def test_the_wheel_takes_the_facts_along():
    setup = (Path(__file__).resolve().parents[2] / "setup.cfg").read_text()
    assert "compat/openrlhf/data/*.json" in setup
    for path in (Path(flags.__file__).parent / "data").glob("*.json"):
        source = json.loads(path.read_text())["source"]
        assert " 0.11.2" in source or "molt" in source
