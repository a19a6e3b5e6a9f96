"""The learner's routers choose the experts that a batch has, and by themselves where it has none."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.batch import UNKNOWN_EXPERT, Batch, batch_of
from rlhfless_ray.learn.micro_batch_tensors import padded
from rlhfless_ray.learn.model_checks import WITH_ROUTERS, check_routers
from rlhfless_ray.learn.policy_model import TokenLogprobs
from rlhfless_ray.learn.router_replay import RouterReplay
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.agreement import select_batch
from rlhfless_ray.session.sample_state import as_json, from_json
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId
from tests.rollout.families import config

PROMPT, RESPONSES = (5, 6, 7), ([8, 9], [10], [11, 12, 13])
LENGTHS = [len(PROMPT) + len(one) for one in RESPONSES]


def batch_with(experts: list[np.ndarray | None]) -> Batch:
    rows = [(PROMPT, np.array(one, np.int32), np.zeros(len(one), np.float32), 0.0, 0) for one in RESPONSES]
    return Batch.of(rows, experts=experts)


def random_experts(seed: int) -> list[np.ndarray]:
    """Two different experts of four, for each of two routers and for all tokens but the last."""
    rng = np.random.default_rng(seed)
    return [np.argsort(rng.random((length - 1, 2, 4)), -1)[..., :2].astype(np.uint8) for length in LENGTHS]


@pytest.fixture(scope="module", params=WITH_ROUTERS)
def model(request: pytest.FixtureRequest) -> TokenLogprobs:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = AutoModelForCausalLM.from_config(config(request.param))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(4 if parameter.dim() > 1 else 1)
    return TokenLogprobs(made, replays=True)


def logprobs(model: TokenLogprobs, batch: Batch, rows: Any) -> torch.Tensor:
    return model(1.0, **padded(batch, rows, torch.device("cpu")))[0]


def own_experts(model: TokenLogprobs, batch: Batch) -> list[np.ndarray]:
    """The experts that the model's routers choose, for all tokens but each sequence's last."""
    seen: list[torch.Tensor] = []
    routers = [module for module in model.model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _, inputs, output: seen.append(output[2])) for router in routers]
    logprobs(model, batch, np.arange(len(batch)))
    for hook in hooks:
        hook.remove()
    whole = torch.stack(seen, 1).view(len(batch), -1, len(seen), seen[0].shape[-1]).numpy().astype(np.uint8)
    return [row[: length - 1] for row, length in zip(whole, LENGTHS, strict=True)]


def test_the_experts_of_a_batch_are_chosen_with_the_model_s_own_weights(model: TokenLogprobs) -> None:
    rows = np.arange(len(RESPONSES))
    free = logprobs(model, batch_with([None] * 3), rows)
    own = own_experts(model, batch_with([None] * 3))
    assert torch.allclose(logprobs(model, batch_with([one[..., ::-1] for one in own]), rows), free, atol=1e-6), "in another order"
    other = random_experts(1)
    assert (logprobs(model, batch_with(other), rows) - free).abs().max() > 1e-3
    assert all(map(np.array_equal, own_experts(model, batch_with(other)), other))
    assert torch.equal(logprobs(model, batch_with([None] * 3), rows), free), "nothing stays of an earlier pass"
    some = logprobs(model, batch_with([None, other[1], None]), rows)
    others = torch.tensor([0, 1, 3, 4, 5])
    assert torch.allclose(some[others], free[others], atol=1e-5) and abs(some[2] - free[2]) > 1e-3


def test_gradients_reach_the_routers_also_where_activations_are_computed_again(model: TokenLogprobs) -> None:
    found = []
    for recomputes in (False, True):
        if recomputes:
            model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train().zero_grad()
        logprobs(model, batch_with(random_experts(2)), np.arange(3)).sum().backward()
        found.append([p.grad.clone() for name, p in model.named_parameters() if name.endswith(".gate.weight") and p.grad is not None])
    model.model.gradient_checkpointing_disable()
    assert found[0] and all(gradient.abs().max() > 0 for gradient in found[0])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found, strict=True))


def test_a_shared_prompt_has_the_experts_of_its_first_response() -> None:
    experts = random_experts(3)
    batch = batch_with([*experts[:2], None])
    apart, together = (padded(batch, rows, torch.device("cpu"))["experts"].numpy() for rows in (np.arange(3), [np.arange(3)]))
    n = len(PROMPT)
    for row, one in zip(apart, experts[:2], strict=False):
        assert np.array_equal(row[: len(one)], one) and (row[len(one) :] == UNKNOWN_EXPERT).all()
    assert (apart[2] == UNKNOWN_EXPERT).all()
    assert np.array_equal(together[0, :n], experts[0][:n]) and np.array_equal(together[0, n : n + 1], experts[0][n:])
    assert (together[0, n + 1] == UNKNOWN_EXPERT).all(), "the last token of the first response"
    taken = batch.take(np.array([1, 0]))
    assert taken.experts is not None and np.array_equal(taken.experts[: LENGTHS[1] - 1], experts[1])
    assert batch_with([None] * 3).experts is None and "experts" not in padded(batch_with([None] * 3), np.arange(3), torch.device("cpu"))


def test_samples_bring_their_experts_to_the_learner_and_not_into_a_checkpoint() -> None:
    experts = random_experts(4)
    prompt = Prompt(0, "", PROMPT, {})
    samples = [
        Sample(
            prompt,
            SampleId(prompt.index, 1, i),
            Completion(i, np.array(one, np.int32), np.zeros(len(one), np.float32), "stop", 1, experts=experts[i]),
        )
        for i, one in enumerate(RESPONSES)
    ]
    wanted = batch_with(list(experts)).experts
    for batch in (batch_of(samples, len(samples)), select_batch(samples)):
        assert batch is not None and batch.experts is not None and np.array_equal(batch.experts, wanted)
    restored = [from_json(json.loads(json.dumps(as_json(sample))), [prompt]) for sample in samples[:1]]
    assert restored[0].completion.experts is None
    mixed = batch_of([*restored, *samples[1:]], len(samples)).experts
    assert mixed is not None and (mixed[: LENGTHS[0]] == UNKNOWN_EXPERT).all() and np.array_equal(mixed[LENGTHS[0] :], wanted[LENGTHS[0] :])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "qwen2"}, "models of type qwen2 have no routers that are known here; leave it out, or take one of mixtral"),
        ({"model_type": "mixtral", "sliding_window": 64}, "engines keep choices beside the KV of a token, but its layers have a sliding"),
        ({"model_type": "qwen3_moe", "num_experts": 512}, "512 experts are more than 255; set it to false"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, ""),
    ],
)
def test_policies_whose_routers_cannot_be_replayed_are_refused(model: dict[str, Any], message: str) -> None:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "algorithm": {"loss": {"router_replay": True}}}
    recipe = Recipe.parse({**tree, "rollout": {"prefix_kv": "off"}})
    if not message:
        return check_routers(recipe, model)
    with pytest.raises(UserError, match=f"algorithm.loss.router_replay: {message}"):
        check_routers(recipe, model)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "KV pages that an engine gets come without the routers' choices; set rollout.prefix_kv to off"),
        ({"rollout": {"prefix_kv": "off", "partial": "continue", "max_lag_steps": 1, "partial_kv": "keep"}}, "set rollout.partial_kv to"),
        ({"rollout": {"prefix_kv": "off"}, "agent": {"path": "agent.py"}, "reward": {}}, "not available with agents"),
    ],
)
def test_recipes_in_which_choices_would_be_missing_are_refused(more: dict[str, Any], message: str) -> None:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "algorithm": {"loss": {"router_replay": True}}}
    with pytest.raises(UserError, match=f"algorithm.loss.router_replay: .*{message}"):
        Recipe.parse({**tree, **more})


def test_a_model_without_as_many_routers_as_the_engine_recorded_does_not_learn_without_replay(model: TokenLogprobs) -> None:
    with pytest.raises(ValueError, match="Linear has no routers whose choices could be replayed"):
        RouterReplay(torch.nn.Linear(1, 1))
    assert model.replay is not None
    with pytest.raises(ValueError, match="the engine recorded 3 routers, and the learner's model has 2"):
        model.replay.begin_pass(torch.zeros(1, 4, 3, 2, dtype=torch.uint8))
