"""Mean and best rewards of evaluations against loops over hand-made samples."""

from __future__ import annotations

import numpy as np
import pytest

from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.evaluation import choose_sampling, compute_accuracies, compute_mean_and_best, compute_source_metrics
from rlhfless_ray.step.requests import make_evaluation_requests
from rlhfless_ray.types import Completion, Prompt, SampleId, Scored
from tests.run_files import step_requests


def sample(reward: float | None, tokens: int = 3, finish: str = "stop", prompt: int = 0) -> Scored:
    done = Completion(0, np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), finish, 0)
    return Scored(Prompt(prompt, "p", (1,)), SampleId(prompt, 1, 0), done, reward=reward)


def test_pass1_is_the_mean_and_passk_the_best_of_each_prompt() -> None:
    rewards = [[0.0, 1.0, 0.5], [0.0, 0.0, 0.25], [None, None, None], [None, 1.0, 0.0]]
    found = compute_mean_and_best([sample(r) for group in rewards for r in group], 3)
    known = [[r for r in group if r is not None] for group in rewards]
    known = [group for group in known if group]
    assert found == (pytest.approx(np.mean([np.mean(g) for g in known])), pytest.approx(np.mean([max(g) for g in known])))
    assert compute_mean_and_best([sample(None)] * 4, 2) is None


def test_sampled_and_greedy_responses_are_told_apart() -> None:
    sampled, greedy = [sample(r) for r in (0.0, 1.0, 0.0, 0.0)], [sample(1.0, 9, "length"), sample(0.0)]
    found = compute_accuracies(sampled + greedy, {"sampled": (0.6, 2), "greedy": (0.0, 1)})
    assert found == {
        "eval/length_mean": 4.0,
        "eval/truncated_share": pytest.approx(1 / 6),
        "eval/samples": 6.0,
        "eval/failed": 0.0,
        "eval/accuracy_sampled": 0.25,
        "eval/pass2": 0.5,
        "eval/accuracy_greedy": 0.5,
    }
    assert compute_source_metrics("gsm8k", sampled, 2) == {
        "eval/gsm8k/length_mean": 3.0,
        "eval/gsm8k/truncated_share": 0.0,
        "eval/gsm8k/pass1": 0.25,
        "eval/gsm8k/pass2": 0.5,
    }


def test_requests_of_an_evaluation_lie_prompt_by_prompt() -> None:
    tree = {
        "prompts": {"task": "chain"},
        "reward": {"function": "task"},
        "evaluate": {"temperature": 0.5, "samples_per_prompt": 2},
        "rollout": {"max_tokens": 8, "max_total_tokens": 10, "stop": "</a>", "top_k": 9, "top_p": 0.9},
    }
    recipe = Recipe.parse(tree)
    asked = choose_sampling(recipe)
    assert asked == {"sampled": (0.5, 2), "greedy": (0.0, 1)}
    prompts = [Prompt(7, "p", (1,)), Prompt(9, "q", (1, 2, 3, 4))]
    found = make_evaluation_requests(recipe, prompts, list(asked.values()))
    assert [r.key for r in found] == list(range(6)) and [r.temperature for r in found] == [0.5] * 4 + [0.0] * 2
    assert [len(r.token_ids) for r in found] == [1, 1, 4, 4, 1, 4] and [r.max_tokens for r in found] == [8, 8, 6, 6, 8, 6]
    assert len({r.seed for r in found[:4]}) == 4 and len({r.id for r in found}) == 6
    assert {(r.stop, r.top_k, r.top_p) for r in found} == {(("</a>",), 9, 0.9)}
    assert {(r.stop, r.top_k, r.top_p) for r in step_requests(recipe, 1, prompts)} == {(("</a>",), 9, 0.9)}
