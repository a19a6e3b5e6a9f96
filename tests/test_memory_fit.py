"""Settings that are `auto` follow from the memory there is; small models keep the defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from placement import peak_memory
from rlhfless_ray.preflight import memory_check
from rlhfless_ray.preflight.memory_check import DoesNotFit
from rlhfless_ray.preflight.memory_fit import Fit, fit
from rlhfless_ray.preflight.memory_needs import Lengths, Need, Room, gb, megabytes
from rlhfless_ray.preflight.rank_layouts import rank_layouts
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.section import AutoCount
from rlhfless_ray.weights.load_policy import check_kv_cache
from tests.conftest import ROOT
from tests.placement.test_memory import QWEN_05B, QWEN_7B, config
from tests.test_cli_plan import run
from tests.test_memory_check import H100, LAPTOP, folder, recipe

LENGTHS = Lengths(32, 16)
TREE = {"prompts": {"task": "chain"}, "reward": {"function": "task"}}
QWEN_15B = config("qwen2", 1536, 8960, 28, 12, 2, 151_936, tie_word_embeddings=True)


def fitted(room: Room, wanted: Recipe, lengths: Lengths = LENGTHS) -> Fit[RunMemory]:
    return fit(RunMemory.of(wanted, lengths), lambda: room)


def predicted_needs(wanted: Recipe, room: Room, *, engines_keep: bool = False) -> list[Need]:
    return RunMemory.of(wanted, LENGTHS).peaks_with(room, engines_keep=engines_keep)


def node(gigabytes: float) -> Room:
    size = int(gigabytes * 1e9)
    return Room("cpu", 2, size, size, has_driver=True)


def chosen(found: Fit) -> tuple[Any, ...]:
    learner = found.job.recipe.learner
    return learner.micro_batch_tokens, learner.gradient_checkpointing, learner.optimizer_offload


def test_numbers_that_stand_twice_are_equal():
    """Processes without the planner do not import it, and the planner imports no torch."""
    from rlhfless_ray.learn import logprobs

    assert peak_memory.CHUNK_BYTES == logprobs.CHUNK_BYTES
    assert Recipe.parse(TREE).learner.max_micro_batch_tokens == peak_memory.DEFAULT_TOKENS


def test_a_resumed_run_begins_with_the_ranks_that_ran_if_they_still_fit():
    policy = config("qwen2", 128, 384, 3, 4, 4, 100), 700_000
    job = RunMemory.of(Recipe.parse({**TREE, "learner": {"ranks": "auto"}}), LENGTHS, policy=policy)
    found = [list(rank_layouts(job, job.recipe.learner, lambda: node(64), 4, before)) for before in (None, 2, 8)]
    assert found == [[1, 2, 4], [2, 1, 4], [1, 2, 4]]


def test_each_number_of_ranks_has_its_own_division(tmp_path):
    """7B in bfloat16 at ZeRO 1 fits no H100, whatever the micro-batch. Ranks begin where a division fits, and each number has its own."""
    wanted = recipe(folder(tmp_path / "7b", QWEN_7B), learner={"ranks": "auto", "zero_stage": "auto", "tensor_parallel": "auto"})
    assert "tensor_parallel: auto" in wanted.to_yaml()
    memory_check.check(RunMemory.of(wanted, LENGTHS), lambda: H100)
    found = fitted(H100, wanted).job
    layouts = rank_layouts(found, wanted.learner, lambda: H100, 8)
    assert next(iter(layouts)) == int(found.recipe.learner.ranks) > 1 and isinstance(found.recipe.learner.ranks, AutoCount)
    for ranks, layout in layouts.items():
        given = {"ranks": ranks, "tensor_parallel": layout.tensor_parallel, "zero_stage": layout.zero_stage}
        assert not fitted(H100, recipe(tmp_path / "7b", learner=given)).note
    assert len({layout.zero_stage for layout in layouts.values()}) > 1


def test_tensor_parallelism_is_more_than_1_where_the_given_stage_does_not_fit(tmp_path):
    wanted = recipe(
        folder(tmp_path / "7b", QWEN_7B), policy={"dtype": "float32"}, learner={"tensor_parallel": "auto", "ranks": 2, "zero_stage": 0}
    )
    memory_check.check(RunMemory.of(wanted, LENGTHS), lambda: H100)
    large, small = fitted(Room("gpu", 8, 280_000_000_000), wanted), fitted(H100, wanted)
    assert [one.job.recipe.learner.tensor_parallel for one in (large, small)] == [1, 2]
    assert large.reason == "" and small.reason.startswith("learner.tensor_parallel=2 (auto: with 1 an update needs more memory, or slower")


def test_a_family_without_tensor_parallelism_falls_back_and_says_so():
    wanted = Recipe.parse({**TREE, "learner": {"tensor_parallel": "auto", "ranks": 2}})
    found = fit(RunMemory.of(wanted, LENGTHS, policy=(config("olmo2", 128, 384, 3, 4, 4, 100), 700_000)), lambda: node(64))
    assert found.job.recipe.learner.tensor_parallel == 1
    assert found.reason.startswith("learner.tensor_parallel=1 (auto: models of type olmo2 are not tested with it; those of gemma3_text,")


def test_a_small_policy_keeps_the_defaults_without_a_look_at_the_memory():
    wanted = Recipe.parse(TREE)
    policy = config("qwen2", 128, 384, 3, 4, 4, 100), 700_000
    found = fit(RunMemory.of(wanted, LENGTHS, policy=policy), lambda: pytest.fail("asked"))
    assert chosen(found) == (8192, False, False) and found.reason == found.note == ""
    assert (wanted.learner.max_micro_batch_tokens, wanted.learner.recomputes_activations) == (8192, False), "also before it is decided"
    decided = {"learner": {"micro_batch_tokens": 8192, "gradient_checkpointing": False}, "rollout": {"kv_cache_mb": 217}}
    assert found.job.recipe == Recipe.parse({**TREE, **decided})


def test_smaller_micro_batches_come_before_recomputing(tmp_path):
    wanted = recipe(folder(tmp_path / "05b", QWEN_05B), rollout={"max_tokens": 128})
    found = [fitted(node(size), wanted) for size in (48, 28, 20, 16)]
    assert [chosen(one) for one in found] == [(8192, False, False), (4096, False, False), (2048, False, False), (4096, True, False)]
    assert found[0].reason == "" and found[1].reason == (
        "learner.micro_batch_tokens=4096 (auto: with the defaults the learner's update would take about 24.2 GB, more than 85% of 28.0 GB)"
    )
    assert megabytes(found[0].needs)["learner"] > megabytes(found[1].needs)["learner"] > 9000 and "engines" in megabytes(found[0].needs)
    step_mb = found[1].step_mb(engines=2)
    assert (
        step_mb["engines"] == 2 * megabytes(found[1].needs)["engines"]
        and step_mb["total"] == max(need.bytes for need in found[1].needs) / 1e6
    )
    assert "learner 16.8 GB (at least 8.9), one engine 2.8 GB; learner.micro_batch_tokens" in found[1].statement({"learner": 8900}, "cpu")


def test_a_run_that_has_a_part_of_the_memory_chooses_its_settings_for_it(tmp_path):
    """Settings only: whether the run fits at all is decided by all of the memory, which runs of different sizes need in unequal parts."""
    wanted = recipe(folder(tmp_path / "05b", QWEN_05B), rollout={"max_tokens": 128})
    half = wanted.with_settings({"cluster.memory_share": 0.5})
    assert chosen(fitted(node(48), half)) == chosen(fitted(node(24), wanted)) != chosen(fitted(node(48), wanted))
    assert fitted(node(48), half).reason.endswith("more than 42% of 48.0 GB (cluster.memory_share=0.5))")
    least = fitted(node(20), half)
    assert chosen(least)[1] and least.note == "" and not fitted(H100, half).reason


def test_engines_work_beside_an_update_with_a_lag_only(tmp_path):
    wanted = recipe(folder(tmp_path / "05b", QWEN_05B), rollout={"max_tokens": 128})
    lagging = wanted.model_copy(update={"rollout": wanted.rollout.model_copy(update={"max_lag_steps": 1})})
    cases = [(wanted, 2), (lagging, 2), (lagging, 3)]
    assert [_engines_in_update(one, slots) for one, slots in cases] == [0, 1, 2], "with a lag the learner holds one of the slots"


def _engines_in_update(wanted: Recipe, slots: int) -> float:
    """The number of engines that a predicted update has beside it."""
    needs = predicted_needs(wanted, replace(LAPTOP, slots=slots))
    update = next(need for need in needs if need.who == "the learner's update")
    return dict(update.parts)["in engines"] / next(need.bytes for need in needs if need.who == "an engine")


def test_published_weights_count_once_where_the_learner_reads_them(tmp_path):
    """The ranks of a large policy have none of their own beside those in the object store, see `TrainerRank.read_published`."""
    model = folder(tmp_path / "05b", QWEN_05B)
    weights = 2 * RunMemory.of(recipe(model)).models["policy"].parameters

    def counted(**learner: Any) -> tuple[int, int]:
        """The learner's weights in its update, and in one of its ranks."""
        wanted = recipe(model, learner=learner)
        needs = {need.who: dict(need.parts) for need in predicted_needs(wanted, LAPTOP)}
        return needs["the learner's update"]["weights"], needs["a learner rank"]["weights"]

    assert counted(zero_stage=1) == counted(zero_stage=2, ranks=2) == (0, weights)
    assert counted(zero_stage=3) == (weights, weights), "a rank of stage 3 gathers its weights from its own memory"


def test_an_engine_counts_its_members_and_its_drafter(tmp_path):
    model = folder(tmp_path / "05b", QWEN_05B)

    def parts(**rollout: Any) -> dict[str, int]:
        wanted = recipe(model, rollout=rollout)
        return dict(next(n for n in predicted_needs(wanted, LAPTOP) if n.who == "an engine").parts)

    plain, wide = parts(), parts(tensor_parallel=2)
    assert wide == {**plain, "imports": 2 * plain["imports"]}
    drafting = parts(speculation="on", drafter_train="on")
    assert drafting == {**plain, "drafter weights": drafting["drafter weights"]} and drafting["drafter weights"] > 2 * 151_936 * 64


def test_what_a_recipe_sets_stays_and_what_it_may_cost_is_said(tmp_path):
    model = folder(tmp_path / "05b", QWEN_05B)
    own = recipe(model, rollout={"max_tokens": 128}, learner={"micro_batch_tokens": 4096})
    assert chosen(fitted(node(17), own)) == (4096, True, False)
    both = recipe(model, rollout={"max_tokens": 128}, learner={"micro_batch_tokens": 8192, "gradient_checkpointing": False})
    found = fitted(node(17), both)
    assert chosen(found) == (8192, False, False) and not found.reason
    assert found.note.startswith("the memory may not be enough: policy.path: the learner's update needs about 24.2 GB (")
    assert found.note.endswith("and this machine has 17.0 GB; it may fit with learner.micro_batch_tokens=2048")


def test_where_nothing_fits_the_run_is_refused_with_what_would(tmp_path):
    wanted = recipe(folder(tmp_path / "05b", QWEN_05B), rollout={"max_tokens": 128})
    with pytest.raises(DoesNotFit) as error:
        fitted(node(12), wanted)
    said = str(error.value)
    assert said.startswith("policy.path: the learner's update needs about 12.4 GB (5.9 GB optimizer state, 2.0 GB gradients, ")
    tried = "learner.micro_batch_tokens=512 and learner.gradient_checkpointing=true"
    assert f"also with {tried}; it may fit with lora.rank=16" in said
    assert "\n" not in said


def test_the_zero_stage_is_the_lowest_that_fits_and_keeps_the_other_settings(tmp_path):
    policy = folder(tmp_path / "7b", QWEN_7B)
    large = Room("gpu", 8, 180_000_000_000)
    for room, ranks in ((large, 1), (large, 2), (H100, 2), (H100, 4), (H100, 8)):
        auto = fitted_or_none(room, recipe(policy, learner={"zero_stage": "auto", "ranks": ranks}))
        given = [fitted_or_none(room, recipe(policy, learner={"zero_stage": stage, "ranks": ranks})) for stage in (1, 2, 3)]
        whole = [one for one in given if one is not None and not one.reason]
        if auto is not None and whole:
            assert auto.job == whole[0].job, "no setting has another value than its default"
        assert (auto is None) == all(one is None for one in given)
        if auto is not None and auto.job.recipe.learner.zero_stage > 1:
            assert auto.reason.startswith(f"learner.zero_stage={auto.job.recipe.learner.zero_stage} (auto: with 1 an update needs more")
    least = fitted(H100, recipe(policy, learner={"zero_stage": "auto", "ranks": 2}))
    assert least.job.recipe.learner.zero_stage > 1, "stage 1 would need recomputing and micro-batches of 512 tokens"


def fitted_or_none(room: Room, wanted: Recipe) -> Fit[RunMemory] | None:
    try:
        return fitted(room, wanted)
    except DoesNotFit:
        return None


def test_an_automatic_zero_stage_is_0_or_with_bfloat16_1_where_all_fits():
    policy = config("qwen2", 128, 384, 3, 4, 4, 100), 700_000
    for dtype, stage in (("float32", 0), ("bfloat16", 1)):
        wanted = Recipe.parse({**TREE, "policy": {"dtype": dtype}, "learner": {"zero_stage": "auto", "ranks": 2}})
        assert "zero_stage: auto" in wanted.to_yaml()
        found = fit(RunMemory.of(wanted, LENGTHS, policy=policy), lambda: node(64))
        assert found.job.recipe.learner.zero_stage == stage and not found.reason


def test_a_gpu_gets_offload_where_it_is_auto(tmp_path):
    wanted = recipe(folder(tmp_path / "7b", QWEN_7B), learner={"optimizer_offload": "auto", "ranks": 2})
    assert chosen(fitted(Room("gpu", 8, 180_000_000_000), wanted)) == (8192, False, False)
    found = fitted(H100, wanted)
    assert chosen(found)[2] is True and found.step_mb(engines=2) == {}
    assert chosen(fitted(H100, recipe(folder(tmp_path / "05b", QWEN_05B)))) == (8192, False, False)
    unsharded = recipe(tmp_path / "7b", learner={"optimizer_offload": "auto", "zero_stage": 0}, policy={"dtype": "float32"})
    with pytest.raises(DoesNotFit, match="a learner rank needs about"):
        fitted(H100, unsharded)


def test_the_state_of_parked_ranks_is_predicted_in_the_memory_beside_gpus(tmp_path):
    """In bfloat16 at ZeRO 1 each of four ranks takes its weights along, and together they take 12 bytes a parameter of optimizer state."""
    wanted = recipe(folder(tmp_path / "7b", QWEN_7B), learner={"ranks": 4})
    found = {size: fitted(replace(H100, host_bytes=int(size * 1e9)), wanted) for size in (200, 128)}
    for one in found.values():
        need = next(need for need in one.needs if need.on_host)
        assert need.parts == (("in the learner", pytest.approx((4 * 2 + 12) * 7.6156e9, rel=0.01)),)
        assert "engines" not in megabytes(one.needs) and one.step_mb(engines=2) == {}
    assert found[200].note == ""
    said = "the memory may not be enough: policy.path: parked ranks need about 152.3 GB of host memory, and this machine has 128.0 GB"
    assert found[128].note == said


def test_a_billion_and_a_half_with_adapters_fit_a_laptop(tmp_path):
    wanted = recipe(folder(tmp_path / "15b", QWEN_15B), learner={"zero_stage": 1}, lora={"rank": 16}, rollout={"max_tokens": 128})
    found = fitted(LAPTOP, wanted)
    assert found.note == "" and all(need.bytes < LAPTOP.bytes for need in found.needs)


def test_a_critic_counts_beside_the_learner(tmp_path):
    model = folder(tmp_path / "05b", QWEN_05B)
    gae = {"algorithm": {"advantage": {"estimator": "gae"}, "kl": {"coefficient": 0.1}}}
    alone, both = (predicted_needs(r, LAPTOP) for r in (recipe(model), recipe(model, **gae)))
    sizes = {need.who: need.bytes for need in both}
    assert {"a critic rank", "the critic's update", "a reference rank"} <= sizes.keys()
    beside = [{what for what, _ in need.parts} for needs in (alone, both) for need in needs if need.who == "the learner's update"]
    assert "in the critic" not in beside[0] and "in the critic" in beside[1]
    assert sizes["a critic rank"] < sizes["a learner rank"], "it has no logits"


def test_a_plan_shows_predictions_and_chosen_settings(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(memory_check, "memory_bytes", lambda gpu: int(24e9))
    monkeypatch.setattr(memory_check, "visible_gpus", lambda: 0)
    tree = recipe(folder(tmp_path / "05b", QWEN_05B)).model_dump(mode="json", exclude_unset=True)
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(tree))
    run(path, "--memory", "rollout.max_tokens=128", "prompts.max_prompt_tokens=32")
    text = capsys.readouterr().out
    assert "Predicted peaks, with prompts of 32 and responses of 128 tokens" in text
    assert all(gb(need.bytes) in text for need in fitted(node(24), Recipe.load(path, ["rollout.max_tokens=128"])).needs)
    assert "learner.micro_batch_tokens=4096 (auto: with the defaults" in text
    run(path, "--memory", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["gradient_checkpointing"] is False
    assert {"a learner rank", "the rollout"} <= {need["what"] for need in told["predicted"]} and told["reason"]


@pytest.mark.parametrize("value", [0, -5, True, 1.5, "many"])
def test_a_value_that_is_neither_tokens_nor_auto_is_one_sentence(tmp_path, value):
    with pytest.raises(Exception, match=r"`learner.micro_batch_tokens`: expected `auto` or a whole number of at least 1 .got") as error:
        recipe(tmp_path, learner={"micro_batch_tokens": value})
    assert "\n" not in str(error.value)
    with pytest.raises(Exception, match=r"`learner.gradient_checkpointing`: expected `auto`, true or false"):
        recipe(tmp_path, learner={"gradient_checkpointing": "sometimes"})


# ---- the KV cache of an engine ----------------------------------------------------------------------------------


def auto_kv(path: Path, **sections: dict[str, Any]) -> Recipe:
    wanted = recipe(path, **{"rollout": {"max_tokens": 480}, "evaluate": {"prompts": 0}, **sections})
    return wanted.with_settings({"rollout.kv_cache_mb": "auto"})


def test_the_kv_cache_of_a_small_policy_holds_a_whole_step_and_no_more():
    wanted = Recipe.load(ROOT / "recipes" / "quickstart.yaml")
    shape = config("qwen2", 128, 384, 3, 4, 4, 100)
    found = fit(RunMemory.of(wanted, Lengths(20), policy=(shape, 700_000)), lambda: pytest.fail("asked"))
    token_bytes = 2 * 3 * 128 * 4  # keys and values of three layers in float32
    blocks = 256 * 6 + 1  # of 32 tokens: six for the 180 tokens of a sequence, and vLLM's own
    assert found.job.recipe.rollout.kv_cache_mb == -(-blocks * 32 * token_bytes // 2**20) == 145
    assert found.kv == "rollout.kv_cache_mb=145 (auto: all 256 sequences of 180 tokens at once)" and found.reason == ""
    check_kv_cache(found.job.recipe, {"config.json": json.dumps(shape).encode()}, 20)


def test_the_kv_cache_takes_what_the_rest_leaves(tmp_path):
    model = folder(tmp_path / "05b", QWEN_05B)
    wanted = auto_kv(model)

    def peak(mb: int, chosen: Recipe, room: Room) -> float:
        """The predicted peak of everything together, with both engines at work, as a share of the memory."""
        both = chosen.with_settings({"rollout.kv_cache_mb": mb, "rollout.min_actors": 2})
        return max(need.bytes for need in predicted_needs(both, room)) / (room.bytes or 1)

    room, plenty = node(17), fitted(node(64), wanted)
    found = fitted(room, wanted)
    size = found.job.recipe.rollout.engine_kv_mb
    assert 256 < size < 1537 and peak(size, found.job.recipe, room) <= 0.85 < peak(size + 1, found.job.recipe, room)
    held = size * 2**20 // (2 * 24 * 2 * 64 * 2 * 512)
    assert f"rollout.kv_cache_mb={size} (auto: {held} of 256 sequences of 512 tokens at once, because more does not" in found.reason
    assert plenty.job.recipe.rollout.kv_cache_mb == 1537 and plenty.kv and plenty.reason == "", "256 sequences of 12 KiB a token"
    few = fitted(node(64), auto_kv(model, rollout={"max_tokens": 480, "max_running": 40}))
    assert few.job.recipe.rollout.kv_cache_mb == 241, "an engine decodes no more than max_running at once"
    assert fitted(node(64), wanted.with_settings({"rollout.kv_cache_mb": 99})).job.recipe.rollout.kv_cache_mb == 99


def test_the_kv_cache_takes_no_more_than_a_tenth_by_itself(tmp_path):
    """Other runs of the machine may do the same."""
    wanted = auto_kv(folder(tmp_path / "05b", QWEN_05B), rollout={"max_tokens": 4000}, lora={"rank": 16})
    for share, tenth in ((1.0, "5.4 GB of 64.0 GB"), (0.5, "2.7 GB of 64.0 GB (cluster.memory_share=0.5)")):
        found = fitted(node(64), wanted.with_settings({"cluster.memory_share": share}))
        grown = 2 * (found.job.recipe.rollout.engine_kv_mb - 256) * 2**20  # by both engines
        assert grown == pytest.approx(0.1 * 0.85 * share * 64e9, rel=0.01)
        assert f"because beyond 256 MB each, engines take at most {tenth})" in found.reason


@pytest.mark.parametrize("fixed", [False, True])
def test_parked_engines_keep_their_memory_only_where_an_update_fits_beside_it(tmp_path, fixed):
    """Also in the first update, before any gap has told how long the next one is."""
    wanted = auto_kv(folder(tmp_path / "05b", QWEN_05B))
    for gigabytes, at_once in ((21, True), (64, False)):
        room = node(gigabytes)
        settings = {"rollout.kv_cache_mb": fitted(room, wanted).job.recipe.rollout.kv_cache_mb} if fixed else {}
        found = fitted(room, wanted.with_settings(settings))
        assert found.give_back_at_once is at_once
        kept = predicted_needs(found.job.recipe, room, engines_keep=True)
        given = predicted_needs(found.job.recipe, room)
        assert room.first_without_room(given, 0.85) is None and (room.first_without_room(kept, 0.85) is not None) is at_once
    assert not fitted(H100, wanted).give_back_at_once


def test_policy_and_critic_learn_at_once_only_where_the_memory_holds_both(tmp_path: Path) -> None:
    """Each alone fits beside the other's parked state."""
    model = folder(tmp_path / "05b", QWEN_05B)
    wanted = auto_kv(model, algorithm={"advantage": {"estimator": "gae"}}, critic={"learning_rate": 1e-5})
    for gigabytes, fits in ((64, True), (34, False)):
        room = node(gigabytes)
        found = fitted(room, wanted)
        assert (found.updates_obstacle == "") is fits, found.updates_obstacle
        needs = {need.who: need for need in found.needs}
        both = found.job.updates_at_once(found.needs)
        assert both is not None and needs["the learner's update"].bytes < both.bytes and room.first_without_room(found.needs, 0.85) is None
        assert both.bytes < needs["the learner's update"].bytes + needs["the critic's update"].bytes
    assert fitted(node(34), auto_kv(model)).updates_obstacle == "", "no critic"
    assert fitted(H100, wanted).updates_obstacle == "", "each has a device"


def test_the_kv_cache_is_no_matter_on_gpus(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(memory_check, "memory_bytes", lambda gpu: int(80e9))
    path = tmp_path / "r.yaml"
    small = auto_kv(folder(tmp_path / "small", config("qwen2", 128, 384, 3, 4, 4, 100)))
    path.write_text(json.dumps(small.model_dump(mode="json", exclude_unset=True)))
    for gpus in (0, 1):
        monkeypatch.setattr(memory_check, "visible_gpus", lambda gpus=gpus: gpus)
        for options in ((), ("--json",)):
            run(path, "--memory", *options)
            assert ("rollout.kv_cache_mb" in capsys.readouterr().out) is (gpus == 0)
        line = fit(RunMemory.of(small, LENGTHS), lambda: pytest.fail("asked")).statement({}, ("cpu", "gpu")[gpus])
        assert ("rollout.kv_cache_mb" in line) is (gpus == 0)


def test_updates_are_chosen_before_kv_is_added(tmp_path):
    """Sequences may wait for each other in an engine; a smaller micro-batch costs every step."""
    model = folder(tmp_path / "05b", QWEN_05B)
    for gigabytes in (18, 20, 24):
        with_default = fitted(node(gigabytes), recipe(model, rollout={"max_tokens": 480}))
        with_auto = fitted(node(gigabytes), auto_kv(model))
        assert chosen(with_auto) == chosen(with_default)


def test_the_kv_cache_shrinks_where_nothing_else_fits(tmp_path):
    model = folder(tmp_path / "05b", QWEN_05B)
    beside = auto_kv(model, rollout={"max_tokens": 480, "max_lag_steps": 1}, lora={"rank": 16})
    least, more = (fitted(node(size), beside) for size in (7.5, 7.9))
    assert (least.job.recipe.rollout.kv_cache_mb, more.job.recipe.rollout.kv_cache_mb) == (16, 256)
    assert "2 of 256 sequences of 512 tokens at once, which is almost no KV cache, because" in least.reason
    with pytest.raises(DoesNotFit):
        fitted(node(7.5), beside.with_settings({"rollout.kv_cache_mb": 256}))
    keys = {"learner.micro_batch_tokens": 512, "learner.gradient_checkpointing": True, "learner.optimizer_offload": False}
    by_hand = beside.with_settings(keys)
    least, more, too_little = (fitted(node(size), by_hand) for size in (7.5, 7.9, 7))
    assert [one.job.recipe.rollout.kv_cache_mb for one in (least, more, too_little)] == [16, 256, 16]
    assert least.note == more.note == "" and too_little.note.startswith("the memory may not be enough: policy.path: the learner's update")
