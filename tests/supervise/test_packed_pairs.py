"""Pairs and single judged responses whose rows lie end to end: the same losses and gradients as in padded rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn import packing
from rlhfless_ray.learn.micro_batch_tensors import packed
from rlhfless_ray.learn.micro_batches import SHARING_FAMILIES, PromptSharing
from rlhfless_ray.learn.policy_model import TokenLogprobs, TokenValues, as_sampled
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.examples import Example, Examples, cut_rows
from rlhfless_ray.supervise.supervised_rank import SupervisedRank

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
sys.path.append(str(Path(__file__).parents[1] / "learn"))
from families import DENSE, ORDER, VOCABULARY, config
from test_shared_prompts import model_of

PACKING = [family for family in (*ORDER, *DENSE) if config(family).model_type in SHARING_FAMILIES]
TASKS = {"rm": {}, "dpo": {"loss": {"nll_coefficient": 0.3}}, "kto": {"loss": {"desirable_weight": 1.3}}}
ALL_AT_ONCE = 8192  # tokens of a micro-batch
Passed = tuple[dict[str, float], dict[str, torch.Tensor]]
LENGTHS = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=7)


def reward_model_of(family: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    shape = config(family)
    shape.num_labels = 1
    torch.manual_seed(0)
    return as_sampled(AutoModelForSequenceClassification.from_config(shape))


def has_reward_model(family: str) -> bool:
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    return type(config(family)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def examples_of(task: str, lengths: list[tuple[int, int, int]], same_context: bool, seed: int) -> Examples:
    """Rows with a prompt and two responses of these lengths. rm: the token after each is trained, as `row_reader` makes it."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt, *responses in lengths:
        context = rng.integers(2, VOCABULARY, prompt).tolist()
        row = []
        for number, length in enumerate(responses):
            own = context if same_context or not number else rng.integers(2, VOCABULARY, prompt).tolist()
            tokens, mask = [*own, *rng.integers(2, VOCABULARY, length).tolist()], None
            if task == "rm":
                tokens, mask = [*tokens, 1], np.arange(length + 1) == length
            row.append(Example(tokens, prompt, mask))
        rows.append(row)
    return Examples.of(rows, rng.integers(2, size=len(rows)))


class Stage:
    """A rank of one process, without an engine."""

    def __init__(self, task: str, family: str) -> None:
        self.task, model = task, (reward_model_of(family) if task == "rm" else model_of(family)).double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # others have no float64
        self.model, self.module = model, (TokenValues if task == "rm" else TokenLogprobs)(model)

    def passes(self, examples: Examples, micro_batch_tokens: int, packs: bool) -> Passed:
        """Metrics of a batch of all rows, and the gradients."""
        tree = {"task": self.task, "data": {"task": "chain"}, "learner": {"micro_batch_tokens": micro_batch_tokens}, **TASKS[self.task]}
        work = SupervisedRank(SupervisedRecipe.parse(tree), 1)
        work.sharing = PromptSharing.of(self.model)
        work.packs_rows = packs and work._has_packing([self.model])
        assert work.packs_rows == packs
        work.trainer.engine, work.trainer.backward = self.module, lambda loss: loss.backward()
        work.references = {0: -np.random.default_rng(1).random(len(examples.lengths))}
        self.model.zero_grad()
        metrics, *_ = work._passes(examples.batch(rows := np.arange(len(examples))), examples, rows, 0, learn=True)
        return metrics, {name: x.grad.clone() for name, x in self.model.named_parameters() if x.grad is not None}


def members() -> Iterator[Any]:
    """Every task with every family. Log-probabilities of DPO and KTO come from the same module, so `make test` tries one of them with a
    family, in turn."""
    for number, family in enumerate(PACKING):
        for task in TASKS:
            if task != "rm" or has_reward_model(family):
                yield pytest.param((task, family), marks=[pytest.mark.long] if task == ("dpo", "kto")[number % 2] else [])


@pytest.fixture(scope="module", params=members())
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(*request.param)


def check_equal(one: Passed, other: Passed) -> None:
    (metrics, gradients), (metrics_found, gradients_found) = one, other
    assert metrics_found == pytest.approx(metrics, rel=1e-6, abs=1e-6)
    assert gradients.keys() == gradients_found.keys()
    for name, gradient in gradients_found.items():
        limit = 1e-6 * max(1.0, float(gradients[name].abs().max()))
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=limit, msg=name)


@example([(14, 12, 12)], 8, False, 0)  # one pair, whose rows are longer than a micro-batch
@example([(14, 12, 3), (6, 5, 7)], 8, True, 0)
@given(LENGTHS.filter(lambda rows: len(rows) > 1), st.integers(40, 120), st.booleans(), st.integers(0, 2**20))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_packing_changes_nothing(stage: Stage, lengths: list[tuple[int, int, int]], tokens: int, same_context: bool, seed: int) -> None:
    """For every family, also beyond the sliding windows of some, and with prompts that both responses share."""
    examples = examples_of(stage.task, lengths, same_context, seed)
    attention = stage.model.config.get_text_config()._attn_implementation
    stage.model.set_attn_implementation(attention.removeprefix("packed_"))
    expected = stage.passes(examples, ALL_AT_ONCE, packs=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CALL_WORK", -1e12)  # packed even where it saves nothing
        check_equal(expected, stage.passes(examples, tokens, packs=True))


@pytest.mark.parametrize("task", TASKS)
def test_padded_rows_in_small_micro_batches_change_nothing(task: str) -> None:
    stage, examples = Stage(task, PACKING[0]), examples_of(task, [(6, 12, 3), (14, 5, 7), (1, 3, 4), (13, 5, 11)], True, 0)
    expected = stage.passes(examples, ALL_AT_ONCE, packs=False)
    for tokens in (8, 60):
        check_equal(expected, stage.passes(examples, tokens, packs=False))


@given(LENGTHS, st.integers(20, 200), st.integers(1, 3), st.booleans())
@settings(max_examples=80, deadline=None)
def test_packed_pairs_stay_together_and_keep_the_budget(
    lengths: list[tuple[int, int, int]], most: int, ranks: int, same_context: bool
) -> None:
    examples = examples_of("dpo", lengths, same_context, 0)
    batch, seen = examples.batch(np.arange(len(examples))), []
    together = np.arange(len(batch)).reshape(-1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CALL_WORK", -1e12)
        cuts = [cut_rows(batch, together, 8192, PromptSharing(64), rank, ranks, packed_tokens=most) for rank in range(ranks)]
    assert all(cut.is_packed for cut in cuts) and len({len(cut.micro_batches) for cut in cuts}) == 1
    for rows in (rows for cut in cuts for rows in cut.micro_batches if rows):
        numbers = np.concatenate(rows)
        assert sorted(numbers) == sorted(np.concatenate([together[i] for i in np.unique(numbers // 2)]))
        assert same_context or all(len(row) == 1 for row in rows)
        tensors = packed(batch, rows, torch.device("cpu"))
        assert tensors["ids"].numel() <= most or len(np.unique(numbers // 2)) == 1
        assert ("segments" in tensors) == any(len(row) > 1 for row in rows)
        seen += tensors["flat"].tolist()
    assert sorted(seen) == list(range(int(batch.response_lengths.sum())))


def test_pairs_share_their_prompt_in_packed_rows_where_that_saves_a_tenth() -> None:
    for prompt, rows_of_each in ((40, 1), (1, 2)):
        examples = examples_of("dpo", [(prompt, 9 + i, 30) for i in range(6)], same_context=True, seed=0)
        batch = examples.batch(np.arange(6))
        cut = cut_rows(batch, np.arange(12).reshape(-1, 2), 8192, PromptSharing(4096), packed_tokens=512)
        (rows,) = cut.micro_batches
        assert cut.is_packed and len(rows) == 6 * rows_of_each
        assert packed(batch, rows, torch.device("cpu"))["ids"].numel() == 6 * prompt * rows_of_each + int(batch.response_lengths.sum())
