"""Asynchronous training and partial rollouts, in the versions that have them."""

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from tests.compat.lines import BASE, of, status


@pytest.mark.parametrize(
    ("version", "becomes"),
    [
        ("0.8.1", "without partial rollouts"),
        ("0.9.0", "without partial rollouts"),
        ("0.9.1", "no effect"),
        ("0.9.10", "no effect"),
        ("0.10.0", "needs --async_train"),
    ],
)
def test_a_generation_batch_above_the_rollout_is_checked_by_the_versions_that_check_it(version, becomes):
    line = f"--pretrain m --prompt_data d.jsonl --remote_rm_url r.py --vllm_generate_batch_size 4096 --elastic.dialect {version}"
    try:
        found = of(line)
    except UserError as error:
        assert becomes in str(error)
        return
    outcome = next(o for o in found.flags if o.flag == "--vllm_generate_batch_size")
    assert becomes in f"{outcome.status}: {outcome.why}" and "needs --async_train" not in outcome.why


@pytest.mark.parametrize(
    ("flags", "lag"),
    [
        ("--async_train", 1),
        ("--async_train --async_queue_size 1", 1),
        ("--async_queue_size 3", None),
        ("--async_train --async_queue_size 2", 1),
    ],
)
def test_asynchronous_training_is_a_lag_of_one_step(flags, lag):
    found = of(f"--pretrain m --prompt_data d.jsonl --remote_rm_url r.py --enable_vllm_is_correction --elastic.dialect 0.9.2 {flags}")
    assert found.settings.get("rollout.max_lag_steps") in ((0, None) if lag is None else (lag,))
    assert not found.refused
    longer = any("at most one step old; OpenRLHF allows 2" in note for note in found.notes)
    assert longer == ("--async_train --async_queue_size 2" in flags)


@pytest.mark.parametrize(
    ("flags", "alone", "more"),
    [
        ("--vllm_is_correction_type icepop --elastic.dialect 0.10.1", "no effect", "--enable_vllm_is_correction"),
        ("--use_icepop --elastic.dialect 0.9.2", "no effect", "--enable_vllm_is_correction"),
        ("--lr_warmup_ratio 0.1 --lr_scheduler constant", "no effect", "--lr_scheduler constant_with_warmup"),
    ],
)
def test_a_flag_that_needs_another_has_no_effect_alone(flags, alone, more):
    assert status(of(f"{BASE} {flags}"), flags.split()[0]) == alone
    assert status(of(f"{BASE} {flags} {more}"), flags.split()[0]) == "honoured"


@pytest.mark.parametrize(
    ("version", "switch"),
    [
        ("0.8.1 --bf16", "--enable_vllm_is_correction of 0.9.2 and later"),
        ("0.9.2", "--enable_vllm_is_correction"),
        ("0.10.1", "--enable_vllm_is_correction"),
    ],
)
def test_older_weights_are_trained_on_without_importance_weights_where_openrlhf_does(version, switch):
    """Versions before 0.9.2 have no flag for them, and later ones leave them out by default."""
    line = f"--pretrain m --prompt_data d.jsonl --remote_rm_url r.py --async_train --elastic.dialect {version}"
    found = of(line)
    algorithm = Recipe.parse(found.tree).algorithm
    assert not found.refused and (algorithm.importance_cap, algorithm.loss.correction_level, algorithm.uncorrected_lag) == (0, "off", True)
    assert [note for note in found.notes if note.endswith(f"as in OpenRLHF; {switch} corrects for that")]
    if version != "0.8.1 --bf16":
        assert not Recipe.parse(of(f"{line} {switch}").tree).algorithm.uncorrected_lag


def test_a_batch_kept_its_place_in_the_first_versions():
    found = of("--pretrain m --prompt_data d.jsonl --remote_rm_url r.py --async_train --elastic.dialect 0.8.1")
    assert found.settings["rollout.max_lag_steps"] == 1 and any("; OpenRLHF allows 2" in note for note in found.notes)


@pytest.mark.parametrize(
    ("flags", "lag", "begun"), [("", 1, 1), ("--async_queue_size 3", 3, 3), ("--vllm_generate_batch_size 192", 2, 1.5)]
)
def test_partial_rollouts_begin_beside_the_update(flags, lag, begun):
    batch = "--rollout_batch_size 128 --train_batch_size 128"
    line = f"--pretrain m --prompt_data d.jsonl --remote_rm_url r.py --enable_vllm_is_correction {batch} --elastic.dialect 0.10.1"
    found = of(f"{line} --async_train --partial_rollout {flags}")
    assert not found.refused and any("prefilled again" in note for note in found.notes)
    assert any("engines load new weights later" in note for note in found.notes)
    uncorrected = of(f"{line} --async_train --partial_rollout {flags}".replace("--enable_vllm_is_correction ", ""))
    assert not any("engines load new weights later" in note for note in uncorrected.notes)
    made = Recipe.parse(found.tree).rollout
    assert (made.partial, made.ahead, made.max_lag_steps, made.begun_share) == ("continue", True, lag, begun)


def test_a_generation_batch_that_a_version_does_not_read_begins_no_more_prompts():
    batch = "--rollout_batch_size 128 --train_batch_size 128 --enable_vllm_is_correction --async_train --partial_rollout"
    line = f"--pretrain m --prompt_data d.jsonl --remote_rm_url r.py {batch} --vllm_generate_batch_size 192"
    made = {version: Recipe.parse(of(f"{line} --elastic.dialect {version}").tree).rollout for version in ("0.9.10", "0.10.0")}
    assert [(one.max_lag_steps, one.begun_share) for one in made.values()] == [(1, 1), (2, 1.5)]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--async_queue_size 9", "--async_queue_size: responses would be up to 9 steps old when they are trained, and at most 8 steps"),
        ("--vllm_generate_batch_size 1025", "--vllm_generate_batch_size: responses would be up to 9 steps old"),
        ("--async_queue_size 8 --vllm_generate_batch_size 1024", None),
    ],
)
def test_a_queue_of_more_steps_than_a_token_may_be_old_is_named_once(flags, said):
    line = f"--pretrain m --prompt_data d.jsonl --remote_rm_url r.py --enable_vllm_is_correction --rollout_batch_size 128 {flags}"
    line += " --async_train --partial_rollout --elastic.dialect 0.10.1"
    if said is None:
        assert not of(line).refused
        return
    with pytest.raises(UserError) as found:
        of(line)
    assert str(found.value).startswith(said) and "rollout.max_lag_steps" not in str(found.value)
