"""Any dialect in the newest names: defaults by version, the flags that became something else, spellings that disagree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.dialect import read
from rlhfless_ray.compat.openrlhf.flags import flags_of, newest
from rlhfless_ray.compat.openrlhf.normalise import canonical, defaults, targets
from tests.compat.reference import FACTS, VERSIONS, definitions, lines, reference_parse

CHANGED_FORM = {"data.max_len", "rollout.max_new_tokens", "ds.attn_implementation", "ds.param_dtype", "ckpt.best_metric_key"}


def means(line, **environment):
    return canonical(read(line.split()), environment)


@pytest.mark.parametrize("version", VERSIONS)
def test_defaults_are_those_of_the_dialect(version):
    found = defaults(version, {})
    assert set(found) == {flag[2:] for flag in flags_of(newest())} | {"data.prompt_max_len"}
    for flag, span in definitions(version).items():
        for name in FACTS["dotted"].get(flag, [flag] if flag in flags_of(newest()) else []):
            name = name[2:]
            if name in CHANGED_FORM or span.get("action") or name.startswith("algo.advantage.is_correction") or name not in found:
                continue
            expected = float("inf") if span.get("default") == "inf" else span.get("default")
            assert found[name] == expected, (flag, name)


@pytest.mark.parametrize(
    ("name", "by_version"),
    [
        ("data.max_len", {"0.9.7": 2048, "0.9.8": 2048}),
        ("data.prompt_max_len", {"0.9.7": 1024, "0.9.8": None}),
        ("rollout.max_new_tokens", {"0.8.0": 1024, "0.9.7": 1024, "0.9.8": None}),
        ("ds.attn_implementation", {"0.8.9": "eager", "0.8.10": "flash_attention_2"}),
        ("ds.param_dtype", {"0.9.1": "checkpoint", "0.9.2": "bf16"}),
        ("ckpt.best_metric_key", {"0.9.8": "none", "0.9.9": ""}),
        ("train.micro_batch_size", {"0.9.10": 4, "0.10.0": 1}),
        ("rollout.micro_batch_size", {"0.9.10": 8, "0.10.0": 1}),
        ("critic.value_clip", {"0.8.1": 0.2, "0.8.2": 0.5}),
        ("actor.entropy_coef", {"0.8.2": 0, "0.8.3": None}),
        ("algo.advantage.is_correction_level", {"0.8.0": "off", "0.9.5": "off", "0.11.2": "off"}),
        ("actor.lr_scheduler", {"0.8.0": "cosine_with_min_lr", "0.8.5": "cosine_with_min_lr"}),
        ("train.async_queue_size", {"0.8.0": 1, "0.9.1": 1}),
    ],
)
def test_quiet_changes_of_defaults(name, by_version):
    for version, value in by_version.items():
        assert defaults(version, {})[name] == value, version


def test_the_queue_depth_was_an_environment_variable_once():
    assert defaults("0.9.0", {"OPENRLHF_ASYNC_QUEUE_SIZE": "4"})["train.async_queue_size"] == 4
    assert defaults("0.9.1", {"OPENRLHF_ASYNC_QUEUE_SIZE": "4"})["train.async_queue_size"] == 1


@pytest.mark.parametrize(
    ("line", "level", "mode", "threshold"),
    [
        ("--enable_vllm_is_correction --bf16 --attn_implementation x", "token", "clip", [0.5, 5.0]),
        ("--enable_vllm_is_correction --vllm_is_truncated_threshold 3", "token", "clip", [0.0, 3.0]),
        ("--enable_vllm_is_correction --use_icepop", "token", "mask", [0.5, 5.0]),
        ("--enable_vllm_is_correction --vllm_is_correction_type mis", "seq", "mask", [0.5, 5.0]),
        ("--enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis", "seq", "mask", [0.5, 5.0]),
        ("--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop", "token", "mask", [0.5, 5.0]),
        ("--use_icepop --vllm_is_correction_type tis", "off", "mask", [0.5, 5.0]),
        ("--algo.advantage.is_correction_level seq --algo.advantage.is_correction_threshold 2", "seq", "mask", [0.0, 2.0]),
    ],
)
def test_importance_correction_through_the_versions(line, level, mode, threshold):
    values = means(line)
    names = [f"algo.advantage.is_correction_{part}" for part in ("level", "mode", "threshold", "gating")]
    assert [values[name] for name in names] == [level, mode, threshold, "ratio"]


def test_one_flag_may_decide_two_settings():
    values = means("--max_norm 3 --l2 0.1 --adam_betas 0.8 0.9 --lr_warmup_ratio 0.5 --ref_reward_offload")
    for model in ("actor", "critic"):
        assert values[f"{model}.max_norm"] == 3 and values[f"{model}.adam.weight_decay"] == 0.1
        assert values[f"{model}.adam.betas"] == [0.8, 0.9] and values[f"{model}.lr_warmup_ratio"] == 0.5
    assert values["ref.offload"] and values["reward.offload"]
    assert values.spelled("critic.max_norm") == "--max_norm"


def test_lengths_before_and_after_they_became_one():
    assert means("--prompt_max_len 100 --generate_max_len 50")["data.max_len"] == 150
    assert means("--prompt_max_len 100 --generate_max_len 50 --max_len 400")["data.max_len"] == 400
    assert means("--generate_max_len 50 --bf16")["data.max_len"] == 1074
    assert means("--max_len 400")["data.prompt_max_len"] is None


def test_two_spellings_of_one_setting_must_agree():
    assert means("--seed 3 --train.seed 3")["train.seed"] == 3
    with pytest.raises(UserError, match=r"--seed and --train.seed: two spellings of one setting disagree \(3 and 4\)"):
        means("--seed 3 --train.seed 4")
    with pytest.raises(UserError, match="two spellings"):
        means("--generate_max_len 10 --max_new_tokens 11")


@settings(deadline=None, max_examples=60)
@given(lines())
def test_what_a_line_says_is_what_its_version_would_see(line):
    """Flags whose form never changed have the value that version's own parser gives them."""
    version, tokens = line
    expected = reference_parse(version, tokens)
    if isinstance(expected, str) or read(tokens).mixed:
        return
    found = read(tokens, version)
    try:
        values = canonical(found, {})
    except UserError as error:  # 0.8.1 took any text for the filtering range
        assert "--dynamic_filtering_reward_range" in str(error)
        return
    for flag in found.given:
        for name in targets(flag):
            if name in CHANGED_FORM or "is_correction" in name or "nesterov" in name or name == "data.prompt_max_len":
                continue
            seen = expected[flags_of(version)[flag].dest]
            seen = [float(x) for x in seen] if name == "algo.dynamic_filtering_range" else seen
            assert values[name] == seen


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(VERSIONS), st.data())
def test_a_setting_that_is_not_given_keeps_its_default(version, data):
    flag = data.draw(st.sampled_from(sorted(f for f, s in definitions(version).items() if s.get("action") == "store_true")))
    values, plain = canonical(read([flag], version), {}), defaults(version, {})
    changed = {name for name in plain if values[name] != plain[name]} - {"logger.wandb.run_name"}
    assert changed <= set(targets(flag))
