"""From a command line to a recipe: no flag is lost, nothing that changes the policy is ignored, checks are theirs."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.dialect import Unreadable
from rlhfless_ray.compat.openrlhf.explain_report import as_data, explanation, summary
from rlhfless_ray.compat.openrlhf.flag_table import RULES, rule_of
from rlhfless_ray.compat.openrlhf.flags import newest
from rlhfless_ray.compat.openrlhf.normalise import defaults, targets
from rlhfless_ray.compat.openrlhf.recipe_keys import mistake_in, nested, recipe_keys
from rlhfless_ray.compat.openrlhf.translate import translate
from tests.compat.lines import BASE, DOTTED, GAE, of, status
from tests.compat.reference import VERSIONS, definitions, values_of

# ---------------------------------------------------------------- nothing is lost


@pytest.mark.slow
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
        assert key in recipe_keys() and not mistake_in(key, value)


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
        assert rule.kind in ("exact", "cond", "hint") or rule.kind == "maybe" or rule.reading, rule.name
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
