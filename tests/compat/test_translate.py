"""From a command line to a recipe: no flag is lost, nothing that changes the policy is ignored, checks are theirs."""

import json
from importlib.metadata import version

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf import resources
from rlhfless_ray.compat.openrlhf.dialect import Unreadable
from rlhfless_ray.compat.openrlhf.explain_report import as_data, explanation, summary
from rlhfless_ray.compat.openrlhf.flag_table import RULES, rule_of
from rlhfless_ray.compat.openrlhf.flags import newest
from rlhfless_ray.compat.openrlhf.normalise import defaults, targets
from rlhfless_ray.compat.openrlhf.recipe_keys import is_valid, nested, recipe_keys
from rlhfless_ray.compat.openrlhf.resources import fit, openrlhf_gpus, slots_of
from rlhfless_ray.compat.openrlhf.translate import translate
from rlhfless_ray.recipe import Recipe
from tests.compat.reference import VERSIONS, definitions, values_of

BASE = "--pretrain /m --prompt_data /d.jsonl --remote_rm_url /r.py --vllm_num_engines 8 --advantage_estimator rloo --n_samples_per_prompt 4"
GAE = BASE.replace("rloo", "gae")
DOTTED = (
    "--actor.model_name_or_path /m --data.prompt_dataset /d.jsonl --reward.remote_url /r.py --vllm.num_engines 8 "
    "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4"
)


RULE_KEYS = {key for rule in RULES for key in rule.keys}


def of(line):
    return translate(line.split(), {})


def status(found, flag):
    (outcome,) = [outcome for outcome in found.flags if outcome.flag == flag]
    return outcome.status


# ---------------------------------------------------------------- nothing is lost


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.sampled_from(VERSIONS), st.data())
def test_every_flag_given_ends_in_exactly_one_list(version, data):
    known = definitions(version)
    base = (BASE if "--pretrain" in known else DOTTED).split()
    flags = data.draw(st.lists(st.sampled_from(sorted(set(known) - set(base))), max_size=10, unique=True))
    tokens = [*base]
    for flag in flags:
        tokens += [flag, *data.draw(values_of(known[flag]))]
    try:
        found = translate(tokens, {})
    except (UserError, Unreadable) as stop:
        assert "--" in str(stop)  # a flag is named
        return
    given_flags = {token for token in tokens if token.startswith("--")}
    lists = [[o.flag for o in found.with_status(s)] for s in ("honoured", "hint", "no effect", "refused")]
    assert sorted(flag for one in lists for flag in one) == sorted(given_flags)
    for flag in given_flags:
        kinds = {rule_of()[name].kind for name in targets(flag) if name in rule_of()}
        allowed = {"no effect"}
        allowed |= {"honoured", "refused"} if kinds & {"exact", "cond"} else set()
        allowed |= {"hint", "refused"} if "hint" in kinds else set()
        allowed |= {"honoured", "hint", "refused"} if "maybe" in kinds else set()
        allowed |= {"refused"} if kinds & {"error", "absent"} else set()
        assert status(found, flag) in allowed
    json.dumps(as_data(found)), explanation(found), summary(found)
    for key, value in found.settings.items():
        assert key in recipe_keys() and is_valid(key, value)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_what_is_honoured_and_not_the_default_changes_the_recipe(data):
    """Every exact flag: a value other than its default changes the settings, unless the flag has no effect on that line."""
    plain = translate(DOTTED.split(), {})
    known = definitions(newest())
    exact = sorted(f"--{rule.name}" for rule in RULES if rule.kind in ("exact", "cond"))
    flag = data.draw(st.sampled_from([f for f in exact if f not in DOTTED]))
    words = data.draw(values_of(known[flag]))
    try:
        found = translate([*DOTTED.split(), flag, *words], {})
    except (UserError, Unreadable):
        return
    name = flag[2:]
    if found.values[name] == defaults(newest(), {})[name] or status(found, flag) == "no effect":
        return
    if name in ("ckpt.save_steps", "critic.freezing_steps", "data.max_samples", "ckpt.max_mem"):
        return  # some of their values mean what leaving them out means
    if name in ("data.input_template", "actor.loss_agg_mode", "rollout.vllm_generate_batch_size", "logger.tensorboard_dir"):
        return
    assert found.settings != plain.settings or found.refused, words


def test_the_table_names_keys_of_the_recipe():
    for rule in RULES:
        assert set(rule.keys) <= set(recipe_keys()), rule.name
        assert rule.kind in ("exact", "cond", "hint") or rule.reading is not None, rule.name
        assert rule.kind != "exact" or rule.keys, rule.name


@pytest.mark.parametrize("line", [BASE, DOTTED, GAE, DOTTED + " --algo.kl.use_loss --ds.lora.rank 8 --train.enable_ema"])
def test_rules_set_only_keys_that_they_name(line):
    found = of(line)
    for rule in RULES:
        assert set(rule.settings(found.values)) <= set(rule.keys), rule.name


# ---------------------------------------------------------------- what the recipe becomes


def test_flags_of_every_section_become_its_settings():
    weighted = " --train.async_enable --algo.advantage.is_correction_level token"
    found = of(DOTTED + " --algo.kl.use_loss --algo.kl.estimator k2 --ds.lora.rank 8 --algo.dynamic_filtering_enable" + weighted)
    assert not found.refused
    tree = nested(found.settings)
    assert tree["algorithm"]["advantage"]["estimator"] == "rloo" and tree["algorithm"]["kl"]["place"] == "loss"
    assert tree["lora"]["rank"] == 8 and tree["algorithm"]["filter_range"] == [0, 1] and tree["rollout"]["max_lag_steps"] == 1
    assert tree["reward"] == {
        "function": "/r.py:reward_func", "contract": "openrlhf", "clip_range": [-10, 10], "overlong_buffer_tokens": None,
        "stop_properly_penalty": None, "timeout_s": 180.0,
    }  # fmt: skip
    assert tree["learner"]["schedule"] == "cosine_with_min_lr" and tree["learner"]["min_rate_share"] == 0.1
    assert found.settings["learner.betas"] == [0.9, 0.95] and "critic" not in tree


def test_a_critic_brings_its_own_settings():
    found = of(GAE + " --critic_learning_rate 3e-6 --max_norm 2 --save_value_network --value_clip 0.3")
    critic = nested(found.settings)["critic"]
    assert critic["path"] == "/m" and critic["learning_rate"] == 3e-6 and critic["grad_clip"] == 2 and critic["save"]
    assert critic["value_clip"] == 0.3 and critic["schedule"] == "cosine_with_min_lr"
    assert status(of(BASE + " --critic_learning_rate 3e-6"), "--critic_learning_rate") == "no effect"


def test_what_is_not_supported_yet_is_refused_by_name():
    larger = " --async_train --vllm_generate_batch_size 4096 --elastic.dialect 0.10.1"
    found = of(BASE + larger + " --temperature 0.7")
    (refused,) = found.with_status("refused")
    assert refused.flag == "--vllm_generate_batch_size" and "partial rollouts" in refused.why
    assert status(found, "--temperature") == "honoured" and found.settings["rollout.temperature"] == 0.7
    assert status(of(BASE + " --vllm_generate_batch_size 8 --elastic.dialect 0.10.1"), "--vllm_generate_batch_size") == "honoured"
    assert "--vllm_generate_batch_size" in str(found.refusal())
    assert status(of(DOTTED + " --use_ms"), "--use_ms") == "refused"


def test_a_default_that_cannot_be_followed_is_refused_too():
    (missing,) = of(BASE + " --elastic.dialect 0.9.0").missing
    assert missing.flag == "--bf16 (default checkpoint)" and "give --bf16" in missing.why


def test_a_hint_outside_its_range_is_refused_too():
    found = of(BASE + " --vllm_gpu_memory_utilization 7")
    assert status(found, "--vllm_gpu_memory_utilization") == "refused"
    assert "`rollout.gpu_memory_share` does not take 7.0" in str(found.refusal())


@pytest.mark.parametrize("flag", ["--load_in_4bit", "--max_images_per_prompt 2 --packing_samples", "--freeze_visual_encoder"])
def test_what_is_outside_is_refused_when_it_is_set(flag):
    found = of(BASE + " " + flag)
    assert status(found, flag.split()[0]) == "refused"
    assert status(of(BASE + " --max_images_per_prompt 0"), "--max_images_per_prompt") == "no effect"


def test_weight_decay_spares_biases_and_norms_as_there():
    wanted = of(BASE + " --l2 0.1").settings
    assert (wanted["learner.weight_decay"], wanted["learner.decay_all"]) == (0.1, False)
    assert "learner.decay_all" not in of(BASE).settings


def test_several_data_sets():
    line = BASE.replace("/d.jsonl", "/a.jsonl,org/b@sub") + " --prompt_data_probs 0.4,0.6"
    wanted = of(line).settings
    assert wanted["prompts.paths"] == ["/a.jsonl", "org/b@sub"] and wanted["prompts.probabilities"] == [0.4, 0.6]
    assert translate([*BASE.split(), "--prompt_data", "/a.jsonl, org/b@sub"], {}).settings["prompts.paths"] == wanted["prompts.paths"]
    assert "prompts.path" not in wanted and of(BASE).settings["prompts.path"] == "/d.jsonl"


def test_both_lengths():
    assert of(BASE + " --prompt_max_len 100 --generate_max_len 60").settings["prompts.max_prompt_tokens"] == 100
    assert of(BASE + " --prompt_max_len 100 --generate_max_len 60 --max_len 400").settings["prompts.max_prompt_tokens"] == 100
    wanted = of(BASE + " --max_len 300 --max_new_tokens 60").settings
    assert (wanted["prompts.max_prompt_tokens"], wanted["rollout.max_tokens"]) == (240, 60) and "rollout.max_total_tokens" not in wanted
    wanted = of(BASE + " --max_len 300").settings
    assert wanted["rollout.max_total_tokens"] == 300 and wanted["prompts.max_prompt_tokens"] == 299


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"algorithm.importance_cap": 0.0}),
        ("--enable_vllm_is_correction --vllm_is_truncated_threshold 3", {"algorithm.importance_cap": 3.0}),
        ("--enable_vllm_is_correction", {"algorithm.importance_cap": 0.0, "algorithm.loss.correction_mode": "clip",
                                         "algorithm.loss.correction_low": 0.5}),
    ],
)  # fmt: skip
def test_importance_correction(flags, expected):
    wanted = of(f"{BASE} {flags}").settings
    assert {key: wanted[key] for key in expected} == expected


@pytest.mark.parametrize(
    "line",
    [
        f"{BASE} --policy_loss_type gspo --enable_vllm_is_correction",
        f"{BASE} --bf16 --policy_loss_type gspo --enable_vllm_is_correction --vllm_is_truncated_threshold 2",
        f"{BASE} --policy_loss_type gspo --enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis",
        f"{DOTTED} --actor.policy_loss_type gspo --algo.advantage.is_correction_level token --algo.advantage.is_correction_gating tv "
        "--algo.advantage.is_correction_threshold 0.1",
    ],
)
def test_gspo_corrects_by_its_ratio(line):
    found = of(line)
    correction = {key: value for key, value in found.settings.items() if "correction" in key or "ratio_to" in key}
    assert correction == {"algorithm.loss.ratio_to": "sampler"} and found.settings["algorithm.importance_cap"] == 0
    assert not found.refused and found.problem() is None


def test_evaluation_that_is_never_asked_for():
    wanted = of(BASE + " --eval_dataset /e --eval_temperature 1").settings
    assert wanted["evaluate.prompts"] == 0 and "evaluate.path" not in wanted and "evaluate.temperature" not in wanted
    wanted = of(BASE + " --eval_dataset /e --eval_steps 5").settings
    assert (wanted["evaluate.path"], wanted["evaluate.every_steps"], wanted["evaluate.temperature"]) == ("/e", 5, 0.6)
    assert "evaluate.prompts" not in wanted


def test_one_optimizer_step_per_rollout_batch_is_said_so():
    assert of(BASE + " --rollout_batch_size 32 --train_batch_size 128").settings["algorithm.updates_per_step"] == 1
    assert of(BASE + " --rollout_batch_size 32 --train_batch_size 64").settings["algorithm.batch_samples"] == 64


# ---------------------------------------------------------------- our own settings


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("", {"algorithm.updates_per_step": 1}),
        ("--train_batch_size 64", {"algorithm.batch_samples": 64}),
        ("--train_batch_size 96", {"algorithm.batch_samples": 96, "algorithm.remainder": "carry"}),
        ("--train_batch_size 640", {"algorithm.batch_samples": 640, "algorithm.remainder": "carry"}),
        ("--train_batch_size 96 --use_dynamic_batch", {"algorithm.batch_samples": 96, "algorithm.remainder": "drop"}),
    ],
)
def test_samples_that_fill_no_optimizer_step(more, wanted):
    """Four rollouts of 256 make ten steps of 96 there, and so they do here (see test_carry.py)."""
    found = of(BASE + " --rollout_batch_size 64 --train_batch_size 256 " + more)
    keys = ("algorithm.updates_per_step", "algorithm.batch_samples", "algorithm.remainder")
    assert {key: found.settings[key] for key in keys if key in found.settings} == wanted
    recipe = found.recipe()
    told = [note for note in found.notes if "does not divide" in note]
    assert bool(told) == ("algorithm.remainder" in wanted)
    if "remainder" in str(wanted):
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": 8, "episodes": 2})})
        # max_steps of ppo_trainer.py with 256 prompts and 2 episodes: 1024 // 96 * 2; dynamic batches: what is really stepped
        assert recipe.optimizer_steps == {"640": 2, "96": 20}[more.split()[1]] if "dynamic" not in more else 16


def test_a_batch_that_dynamic_batches_never_fill_is_refused():
    found = of(BASE + " --rollout_batch_size 64 --train_batch_size 640 --use_dynamic_batch")
    with pytest.raises(UserError, match="--train_batch_size"):
        found.recipe()


@pytest.mark.parametrize(
    ("version", "steps", "frozen"),
    [  # ppo_train of each version, asked for the first steps in which it trains the actor
        *((v, n, max(n, 0)) for v in ("0.8.0", "0.9.0") for n in (-1, 0, 1, 2)),
        *((v, n, n + 1) for v in ("0.9.1", "0.9.2", "0.10.1") for n in (-1, 0, 1, 2)),
    ],
)
@pytest.mark.parametrize("base", [BASE, GAE])
def test_frozen_steps_are_counted_as_the_version_counts_them(base, version, steps, frozen):
    found = of(f"{base} --freezing_actor_steps {steps} --elastic.dialect {version}")
    assert found.settings.get("critic.freeze_policy_steps", 0) == frozen and status(found, "--freezing_actor_steps") == "honoured"
    assert found.recipe().critic.freeze_policy_steps == frozen
    (told,) = [note for note in found.notes if "never learns" in note] or [None]
    assert (told is None) == (frozen == 0)
    assert told is None or ("nothing else" in told) == (base == BASE)


def test_the_newest_dialect_counts_frozen_steps_from_0():
    assert of(DOTTED + " --critic.freezing_steps 3").settings["critic.freeze_policy_steps"] == 4


@pytest.mark.parametrize(
    ("flags", "rewarded", "valued"), [("", True, True), ("--remote_rm_url /r.py", None, True), ("--advantage_estimator rloo", True, None)]
)
def test_rewards_and_values_are_normalized_together(flags, rewarded, valued):
    base = "--pretrain /m --prompt_data /d.jsonl --reward_pretrain /rm --vllm_num_engines 8 --n_samples_per_prompt 4 --normalize_reward "
    found = of(base + flags)
    assert (found.settings.get("reward.normalize"), found.settings.get("critic.normalize")) == (rewarded, valued)
    assert status(found, "--normalize_reward") == "honoured"
    found.recipe()


def test_normalizing_without_reward_model_and_critic_has_no_effect():
    assert status(of(BASE + " --normalize_reward"), "--normalize_reward") == "no effect"


@pytest.mark.parametrize(
    ("flags", "mean", "own"),
    [
        ("", "token", None),
        ("--actor.loss_agg_mode seq-mean-token-mean", "sequence", "token"),
        ("--actor.policy_loss_type gspo", "sequence", "token"),
    ],
)
def test_kl_loss_and_entropy_bonus_are_means_of_tokens_in_every_version(flags, mean, own):
    found = of(f"{DOTTED} {flags}").settings
    assert (found["algorithm.loss_mean"], found.get("algorithm.regularization_mean")) == (mean, own)


@pytest.mark.parametrize(
    ("version", "whitened", "cut"), [("0.8.0", 1, 0), ("0.8.4", 1, 0), ("0.8.5", 0, 0), ("0.8.6", 0, 1), ("0.9.10", 0, 1)]
)
def test_old_versions_whiten_rloo_and_do_not_cut_the_kl(version, whitened, cut):
    found = of(f"{BASE} --no_advantage_std_norm --elastic.dialect {version}")
    assert found.settings.get("algorithm.advantage.whiten") == (True if whitened else None)
    assert status(found, "--no_advantage_std_norm") == ("honoured" if whitened else "no effect")
    recipe = found.recipe()
    assert (recipe.algorithm.advantage.whitens, recipe.algorithm.advantage.normalize_std) == (bool(whitened), not whitened)
    assert recipe.algorithm.kl.limit == (10.0 if cut else None)


def test_what_other_versions_mean_by_the_same_flags_is_said():
    notes = of(BASE + " --freezing_actor_steps 2").notes
    assert any("0.8.0 to 0.9.0" in note and "critic.freeze_policy_steps 2" in note for note in notes)
    assert any("0.8.0 to 0.8.4" in note and "algorithm.advantage.whiten True" in note for note in notes)
    assert any("0.8.0 to 0.8.5" in note and "algorithm.kl.limit None" in note for note in notes)
    assert not any("means" in note for note in of(BASE + " --freezing_actor_steps 2 --elastic.dialect 0.9.2").notes)


@pytest.mark.parametrize(
    ("flags", "limit", "feedback"),
    [
        ("--data.max_len 64", 64, None),
        ("--data.max_len 64 --rollout.max_new_tokens 60", None, None),
        ("--data.max_len 64 --train.agent_func_path /a.py", 64, True),
    ],
)
def test_the_overlong_penalty_has_their_limit(flags, limit, feedback):
    found = of(f"{DOTTED} --reward.overlong_buffer_len 16 {flags}")
    keys = ("reward.overlong_limit_tokens", "reward.overlong_feedback")
    assert tuple(found.settings.get(key) for key in keys) == (limit, feedback)
    assert found.recipe().reward.overlong_buffer_tokens == 16


def test_what_becomes_of_long_prompts_is_said_unless_the_line_says_it():
    told = "tokens end the run before it starts"
    assert any(told in note for note in of(BASE).notes)
    assert not any(told in note for note in of(BASE + " --elastic.prompts.overlong cut_left").notes)


def test_the_first_token_ends_nothing_in_any_version():
    assert of(BASE).recipe().rollout.min_tokens == of(DOTTED).recipe().rollout.min_tokens == 1
    assert of(BASE + " --elastic.rollout.min_tokens 0").recipe().rollout.min_tokens == 0


def test_our_own_settings_go_to_the_recipe():
    found = of(BASE + " --elastic.prefer 0.3 --elastic.keep_alive_s=7 --elastic.rollout.min_actors 2 --elastic.run.root /runs")
    assert found.tree["objective"]["prefer"] == 0.3 and found.tree["functions"]["keep_alive_s"] == 7
    assert found.tree["rollout"]["min_actors"] == 2 and found.tree["run"]["root"] == "/runs"
    assert [outcome.flag for outcome in found.flags] == [t for t in BASE.split() if t.startswith("--")]
    assert of(BASE + " --elastic.knee").tree["objective"]["knee"] is True
    for word in ("on", "off"):  # which YAML takes for true and false
        ours = of(BASE + f" --param_dtype bf16 --prefix.kv {word} --elastic.reference.ranks 3").recipe()
        assert (ours.rollout.prefix_kv, ours.reference.ranks) == (word, 3)
    assert of(BASE + " --lora_rank 4 --elastic.lora.publish merged").tree["lora"]["publish"] == "merged"
    assert of(BASE + " --elastic.rollout.max_actors 3").tree["rollout"]["max_actors"] == 3  # a hint is not owned


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--elastic.prefr 1", "did you mean --elastic.prefer?"),
        ("--elastic.rollout.temperature 1", "OpenRLHF's --rollout.temperature sets this"),
        ("--elastic.learner.learning_rate 1", "OpenRLHF's --actor.adam.lr sets this"),
        ("--elastic.dialect", "name a version"),
        ("--elastic.prefer [", "not valid YAML"),
        ("--prefix.kb on", "did you mean --prefix.kv?"),
    ],
)
def test_mistakes_in_our_own_settings(flag, said):
    with pytest.raises(UserError) as caught:
        of(f"{BASE} {flag}")
    assert said in str(caught.value) and flag.split()[0] in str(caught.value)


def test_a_dialect_can_be_asked_for():
    assert of(BASE).line.version == "0.10.1"
    found = of(BASE + " --elastic.dialect 0.8.1")
    assert found.values["critic.value_clip"] == 0.2 and "policy.dtype" not in found.settings
    with pytest.raises(Unreadable, match="--max_new_tokens"):
        of(BASE + " --max_new_tokens 3 --elastic.dialect 0.9.5")


def test_no_flag_of_theirs_begins_like_ours():
    assert not [flag for version in VERSIONS for flag in definitions(version) if flag.startswith(("--elastic", "--prefix"))]


# ---------------------------------------------------------------- their checks, resources, secrets


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("--n_samples_per_prompt 1", "--n_samples_per_prompt: rloo compares responses"),
        ("--dynamic_filtering --dynamic_filtering_reward_range 1 0", "--dynamic_filtering_reward_range: the first value"),
        ("--eval_dataset /e --remote_rm_url= --reward_pretrain /rm", "--eval_dataset: evaluation needs --remote_rm_url"),
        ("--partial_rollout", "--partial_rollout: needs --async_train"),
        ("--vllm_generate_batch_size 4096", "--vllm_generate_batch_size: more than --rollout_batch_size needs --async_train"),
        ("--colocate_all_models --vllm_num_engines 3", "--colocate_all_models: the actor's GPUs (8)"),
        ("--colocate_actor_ref --ref_num_gpus_per_node 4", "--ref_num_gpus_per_node must be equal (8 and 4)"),
        ("--async_train --vllm_enable_sleep --colocate_all_models", "--vllm_enable_sleep: not with --async_train"),
        ("--dual_clip 0.5", "--dual_clip: must be above 1"),
        ("--input_template {}_{}", "--input_template: the template must hold one {}"),
        ("--input_template {x}{}", "--input_template: the template must hold one {}"),
        ("--rollout_batch_size 1 --micro_rollout_batch_size 4", "fewer than the actor's 8 processes"),
        ("--packing_samples --vllm_num_engines 0", "--vllm_num_engines: packed samples"),
        ("--overlong_buffer_len 5000", "--overlong_buffer_len: must not exceed"),
        ("--prompt_data_probs 0.5,x", "--prompt_data_probs: expected numbers"),
        ("--prompt_data_probs 0.5,0.5", "--prompt_data_probs: 2 probabilities for 1 data sets"),
        ("--prompt_data_probs 0.5", "--prompt_data_probs: must be positive and add up to 1 (got 0.5)"),
        ("--ref_num_nodes 0", "--ref_num_nodes: must be at least 1"),
        ("--advantage_estimator gae --critic_num_gpus_per_node 0", "--critic_num_gpus_per_node: must be at least 1"),
        ("--max_len 100 --max_new_tokens 100", "--max_len: no token is left"),
        ("--remote_rm_url=", "there is no reward"),
        ("--pretrain=", "--pretrain: name the model"),
        ("--eval_steps 0", "--eval_steps: must be at least 1, or -1 for never"),
        ("--ring_attn_size 0", "--ring_attn_size: must be at least 1"),
        ("--vllm_num_engines=-2", "--vllm_num_engines: must not be negative"),
        ("--generate_max_len=-4", "--generate_max_len: must be at least 1"),
        ("--micro_train_batch_size 0", "--micro_train_batch_size: must be at least 1"),
        ("--attn_implementation nonsense", "--attn_implementation: `nonsense` is not known; choose from eager, sdpa"),
        ("--grad_accum_dtype fp8", "--grad_accum_dtype: `fp8` is not known"),
        ("--vllm_sync_backend ncl", "--vllm_sync_backend: `ncl` is not known; choose from nccl, gloo"),
    ],
)
def test_their_validations(change, said):
    with pytest.raises(UserError) as caught:
        of(f"{BASE} {change}")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--attn_implementation sdpa",
        "--attn_implementation kernels-community/flash-attn3",
        "--attn_implementation paged|eager",
        "--vllm_sync_backend gloo --grad_accum_dtype fp32",
    ],
)
def test_what_the_libraries_take(flags):
    assert not of(f"{BASE} {flags}").refused


def test_the_tokenizers_class_is_nobodys_choice():
    """transformers 5 drops what --disable_fast_tokenizer hands it."""
    assert int(version("transformers").partition(".")[0]) >= 5
    found = of(f"{BASE} --disable_fast_tokenizer")
    assert not found.refused and [o.status for o in found.flags if o.flag == "--disable_fast_tokenizer"] == ["no effect"]


@pytest.mark.parametrize(
    "flags",
    [
        "--reward_num_nodes 0 --reward_num_gpus_per_node 0",
        "--critic_num_nodes 0 --critic_num_gpus_per_node 0",
        "--ref_num_nodes 0 --ref_num_gpus_per_node 0 --init_kl_coef 0 --colocate_all_models",
        "--async_queue_size 0",
        "--eval_n_samples_per_prompt 0",
        "--max_ckpt_num 0",
        "--max_ckpt_num 0 --save_steps 5 --disable_ds_ckpt",
        "--prompt_data_probs 1.0",
        "--prompt_data_probs 1",
    ],
)
def test_a_count_of_what_is_not_there_may_be_anything(flags):
    found = of(f"{BASE} {flags}")
    assert not found.refused and found.problem() is None


def test_the_dotted_validations():
    with pytest.raises(UserError, match="clip needs --algo.advantage.is_correction_level token".replace(".", r"\.")):
        of(DOTTED + " --algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode clip")
    with pytest.raises(UserError, match="takes an upper bound only"):
        of(DOTTED + " --algo.advantage.is_correction_level token --algo.advantage.is_correction_gating tv")
    with pytest.raises(UserError, match="takes HIGH or LOW HIGH"):
        of(DOTTED + " --algo.advantage.is_correction_threshold 1 2 3")


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        (BASE + " --colocate_all_models", 8),
        (BASE, 8 + 8 + 8),
        (BASE + " --init_kl_coef 0", 8 + 8),
        (BASE + " --colocate_actor_ref", 8 + 8),
        (BASE + " --colocate_all_models --async_train", 8 + 8),
        (GAE + " --vllm_tensor_parallel_size 2", 8 + 8 + 16 + 8),
        (GAE.replace("--remote_rm_url /r.py", "--reward_pretrain /rm") + " --colocate_critic_reward", 8 + 8 + 8 + 8),
    ],
)
def test_gpus_that_openrlhf_would_hold(line, gpus):
    assert openrlhf_gpus(of(line).values) == gpus == slots_of(of(line)).openrlhf_gpus


def test_an_engine_gets_the_devices_that_there_are(monkeypatch):
    line = BASE + " --vllm_tensor_parallel_size 4"
    for gpus, width, told in ((0, 1, "slots are CPU cores"), (2, 2, "GPUs of this machine: 2"), (8, 4, "")):
        monkeypatch.setattr(resources, "visible_gpus", lambda environment, gpus=gpus: gpus)
        said = fit(found := of(line), {})
        assert found.settings["rollout.tensor_parallel"] == width and told in said and bool(told) == ("devices per engine" in said)
    assert fit(found := of(line), {"RAY_ADDRESS": "head:6379"}) == "" and found.settings["rollout.tensor_parallel"] == 4
    own = of(BASE + " --elastic.rollout.tensor_parallel 2 --elastic.functions.slot cpu")
    assert "devices per engine" not in fit(own, {}) and own.settings["rollout.tensor_parallel"] == 2


def test_slots_and_a_machine_with_fewer():
    found = of(BASE + " --elastic.rollout.min_actors 2 --elastic.cluster.cpus 3 --elastic.functions.slot cpu")
    assert slots_of(found).at_most == 8
    assert "the command requests 8 ranks of the learner, and 3 slots exist" in fit(found, {})
    assert found.settings["learner.ranks"] == 3 and slots_of(found).at_least in (2, 3)  # 2 once ranks may shrink by themselves
    assert fit(of(BASE), {"RAY_ADDRESS": "auto"}) == ""
    said = fit(own := of(BASE + " --elastic.learner.ranks 8 --elastic.cluster.cpus 3"), {})
    assert said.startswith("the command requests 8 ranks of the reference, and 3 slots exist") and ";" not in said
    assert own.settings["learner.ranks"] == 8 and own.settings["reference.ranks"] == 3
    small = of(GAE + " --actor_num_gpus_per_node 1 --critic_num_gpus_per_node 2")
    assert [small.settings[f"{name}.ranks"] for name in ("learner", "critic", "reference")] == [1, 2, 1], "8 is only a default"
    adapters = of(BASE + " --lora_rank 4 --ref_num_gpus_per_node 2")
    assert "reference.ranks" not in adapters.settings and "reference.ranks" not in of(BASE + " --init_kl_coef 0").settings
    assert any("without its adapters" in outcome.why for outcome in adapters.flags if outcome.flag == "--ref_num_gpus_per_node")


def test_a_login_key_is_in_no_recipe_and_no_explanation():
    key = "wandb_v1_0123456789abcdef-0123456789abcdef01234567"
    found = of(f"{BASE} --use_wandb {key}")
    assert found.secrets == {"WANDB_API_KEY": key} and found.settings["watch.wandb"] == "online"
    for told in (yaml.safe_dump(found.tree), explanation(found), json.dumps(as_data(found)), "\n".join(summary(found))):
        assert key not in told
    assert of(f"{BASE} --use_wandb True").secrets == {}
    with pytest.raises(UserError) as caught:
        of(f"{BASE} --use_wandb {key} --logger.wandb.key x")
    assert "disagree" in str(caught.value) and key not in str(caught.value)


def test_a_setting_that_the_recipe_refuses_is_named_by_its_flag():
    assert "--lr" not in str(of(BASE).problem())
    found = of(BASE + " --rollout_batch_size 8 --train_batch_size 64 --actor_num_gpus_per_node 1 --use_dynamic_batch")
    assert str(found.problem()).startswith("--rollout_batch_size, --train_batch_size, ")
    found = of(BASE + " --temperature 0.5 --elastic.rollout.min_actors 9")
    assert str(found.problem()).startswith("--elastic.rollout.min_actors, --vllm_num_engines: ")
    several = of(BASE + " --prompt_data /d.jsonl,/e.csv")
    assert str(several.by_flag(UserError("prompts.path /e.csv: no such file"))).startswith("--prompt_data: prompts.path /e.csv")
    resumed = UserError("run.steps: runs/x has done 3 steps already, more than 2; raise it, or start without --resume")
    assert str(translate([*BASE.split(), "--load_checkpoint"], {}).by_flag(resumed)).startswith("--load_checkpoint: run.steps: ")
    small = UserError("rollout.kv_cache_mb: 64 hold no whole sequence")
    assert str(several.by_flag(small)).startswith("--elastic.rollout.kv_cache_mb: rollout.kv_cache_mb: ")
    found = of(BASE + " --elastic.prefer 7")
    assert "--elastic.objective.prefer" in str(found.problem())


def test_other_versions_with_other_defaults_are_said():
    notes = " ".join(of(BASE).notes)
    assert "--param_dtype checkpoint (0.8.0 to 0.9.1)" in notes and "--elastic.dialect VERSION" in notes
    assert "--value_clip" not in notes  # there is no critic
    assert "--critic_pretrain" not in " ".join(of(GAE).notes), "the launcher fills it in, in each version"
    assert "run_name" not in " ".join(of(BASE + " --use_tensorboard /tb").notes)  # each has the time in it
    assert "other versions" not in " ".join(of(BASE + " --elastic.dialect 0.9.10").notes)


# ---------------------------------------------------------------- read from the model's folder


@pytest.mark.parametrize(
    ("config", "weights", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "F32", "bfloat16"), ({"dtype": "float32"}, "BF16", "float32"), ({}, "BF16", "bfloat16"),
        ({"torch_dtype": None}, "F32", "float32"), ({"torch_dtype": "float16"}, "F32", None), ({}, None, None),
    ],
)  # fmt: skip
def test_without_bf16_the_dtype_is_that_of_the_checkpoint(tmp_path, config, weights, dtype):
    """As --bf16's absence meant until 0.9.1; where nobody tells, or it is one that is not trained in, the line is refused."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if weights:
        header = json.dumps({"__metadata__": {}, "ids": {"dtype": "I64"}, "w": {"dtype": weights}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    found = of(f"{BASE.replace('/m', str(tmp_path), 1)} --elastic.dialect 0.8.5")
    assert found.settings.get("policy.dtype") == dtype
    assert [outcome.flag for outcome in found.refused] == ([] if dtype else ["--bf16 (default checkpoint)"])
    assert bool(weights) or "give --bf16" in found.refused[0].why
    assert status(of(f"{BASE} --bf16 --flash_attn"), "--bf16") == "honoured"


@pytest.mark.parametrize(
    ("flag", "since"),
    [("--adam_offload", "0.8.0"), ("--adam_offload", "0.9.5"), ("--adam_offload", "0.10.1"), ("--ds.adam_offload", "0.11.2")],
)
def test_the_optimizer_is_offloaded_in_every_dialect(flag, since):
    line = DOTTED if "." in flag else BASE
    found = of(f"{line} {flag} --elastic.dialect {since}")
    assert found.settings["learner.optimizer_offload"] is True and found.problem() is None
    assert of(line).settings["learner.optimizer_offload"] is False
    (told,) = [outcome for outcome in found.flags if outcome.flag == flag]
    assert told.status == "hint" and "host memory" in told.why
    stage = "--ds.zero_stage" if "." in flag else "--zero_stage"
    assert of(f"{line} {flag} {stage} 0").settings["learner.zero_stage"] == 1, "DeepSpeed offloads shards only"
    with pytest.raises(UserError, match=r"optimizer_offload: needs a learner.zero_stage of 1, 2 or 3"):
        of(f"{line} {flag} --elastic.learner.zero_stage 0").recipe()


@pytest.mark.parametrize(("line", "stage"), [("--bf16 --zero_stage 0", 1), ("--bf16 --zero_stage 3", 3), ("--bf16", 2)])
def test_bfloat16_without_a_zero_stage_runs_at_stage_1(line, stage):
    found = of(f"{BASE} --flash_attn {line}")
    assert found.settings["learner.zero_stage"] == stage and found.problem() is None


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
    made = Recipe.parse(found.tree).rollout
    assert (made.partial, made.ahead, made.max_lag_steps, made.begun_share) == ("continue", True, lag, begun)


def test_a_generation_batch_that_a_version_does_not_read_begins_no_more_prompts():
    batch = "--rollout_batch_size 128 --train_batch_size 128 --enable_vllm_is_correction --async_train --partial_rollout"
    line = f"--pretrain m --prompt_data d.jsonl --remote_rm_url r.py {batch} --vllm_generate_batch_size 192"
    made = {version: Recipe.parse(of(f"{line} --elastic.dialect {version}").tree).rollout for version in ("0.9.10", "0.10.0")}
    assert [(one.max_lag_steps, one.begun_share) for one in made.values()] == [(1, 1), (2, 1.5)]


@pytest.mark.parametrize("flag", ["--ring_attn_size 2 --packing_samples", "--ds_tensor_parallel_size 2"])
def test_a_divided_learner_is_a_hint(flag):
    assert status(of(BASE + f" {flag}"), flag.split()[0]) == "hint" and not of(BASE + f" {flag}").refused


LLAMA = {"model_type": "llama", "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("line", "config", "why"),
    [
        (BASE, LLAMA, ""),
        (DOTTED, LLAMA, ""),
        (GAE, LLAMA, ""),
        (BASE, None, "is not on this machine"),
        (BASE, {**LLAMA, "model_type": "gemma2"}, "models of type gemma2 are not tested with it"),
        (BASE, {**LLAMA, "num_attention_heads": 6}, "4 does not divide the model's 6 attention heads"),
        (BASE + " --actor_num_gpus_per_node 6", LLAMA, "4 does not divide the number of ranks, 6"),
        (BASE + " --aux_loss_coef 0.1", LLAMA, "routers would see a slice"),
        (BASE + " --lora_rank 4 --lora_dropout 0.1", LLAMA, "dropout of adapters"),
        (BASE + " --ring_attn_size 1", LLAMA, "divides the work on a sequence"),
    ],
)
def test_sequence_parallelism_is_honoured_where_the_model_allows_it(tmp_path, line, config, why):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    dotted = line == DOTTED
    flag = "--ds.ring_attn_size" if dotted else "--ring_attn_size"
    text = line.replace(" /m ", f" {tmp_path} ").replace(
        "--advantage_estimator gae", f"--advantage_estimator gae --critic_pretrain {tmp_path}"
    )
    found = of(text + ("" if flag in line else f" {flag} 4") + (" --ds.packing_samples" if dotted else " --packing_samples"))
    (outcome,) = [one for one in found.flags if one.flag == flag]
    assert outcome.status == ("hint" if why else "honoured") and why in outcome.why and not found.refused
    keys = {"learner.sequence_parallel", *({"critic.sequence_parallel"} if line == GAE else ())}
    assert {key: x for key, x in found.settings.items() if key.endswith("sequence_parallel")} == ({} if why else dict.fromkeys(keys, 4))


LLAMA_MATRICES = {**LLAMA, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("line", "config", "why"),
    [
        (BASE, LLAMA_MATRICES, ""),
        (GAE, LLAMA_MATRICES, ""),
        (BASE, None, "is not on this machine"),
        (BASE, {**LLAMA_MATRICES, "model_type": "olmo2"}, "models of type olmo2 are not tested with it"),
        (BASE, {**LLAMA_MATRICES, "num_key_value_heads": 2}, "4 does not divide the model's 2 KV heads"),
        (BASE + " --actor_num_gpus_per_node 6", LLAMA_MATRICES, "4 does not divide the number of ranks, 6"),
        (BASE + " --zero_stage 3", LLAMA_MATRICES, "ZeRO stages 0 to 2"),
        (BASE + " --ring_attn_size 2 --packing_samples", LLAMA_MATRICES, "ranks share sequences instead"),
    ],
)
def test_tensor_parallelism_is_honoured_where_the_model_allows_it(tmp_path, line, config, why):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    text = line.replace(" /m ", f" {tmp_path} ").replace(
        "--advantage_estimator gae", f"--advantage_estimator gae --critic_pretrain {tmp_path}"
    )
    found = of(text + " --ds_tensor_parallel_size 4" + ("" if "zero_stage" in line else " --zero_stage 2"))
    (outcome,) = [one for one in found.flags if one.flag == "--ds_tensor_parallel_size"]
    assert outcome.status == ("hint" if why else "honoured") and why in outcome.why and not found.refused
    keys = {"learner.tensor_parallel", *({"critic.tensor_parallel"} if line == GAE else ())}
    made = {key: x for key, x in found.settings.items() if key in ("learner.tensor_parallel", "critic.tensor_parallel")}
    assert made == ({} if why else dict.fromkeys(keys, 4))


@pytest.mark.parametrize("flag", ["--ring_attn_size", "--ds_tensor_parallel_size"])
def test_own_settings_of_ranks_take_precedence_over_flags_that_divide_them(tmp_path, flag):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_MATRICES))
    text = f"{BASE.replace(' /m ', f' {tmp_path} ')} {flag} 4 --packing_samples"
    for own in ("learner.ranks 3", "learner.tensor_parallel 2"):
        found = of(f"{text} --elastic.{own}")
        (outcome,) = [one for one in found.flags if one.flag == flag]
        assert outcome.status == "hint" and f"--elastic.{own.split()[0]} decides here" in outcome.why and not found.refused


@pytest.mark.parametrize("flag", ["--ring_attn_size", "--ds_tensor_parallel_size"])
def test_fewer_slots_share_a_copy_or_sequences_among_a_divisor(tmp_path, flag):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_MATRICES))
    shared = f"{flag} 4 --packing_samples --elastic.cluster.cpus 6 --elastic.functions.slot cpu"
    fit(found := of(f"{BASE.replace(' /m ', f' {tmp_path} ')} {shared}"), {})
    key = "learner.sequence_parallel" if "ring" in flag else "learner.tensor_parallel"
    assert (found.settings["learner.ranks"], found.settings[key]) == (6, 2)


def test_a_value_that_nobody_takes_is_not_called_unsupported_yet():
    found = of(BASE + " --actor_learning_rate=-1")
    (why,) = [o.why for o in found.refused if o.flag == "--actor_learning_rate"]
    assert why == "`learner.learning_rate` does not take -1.0"
