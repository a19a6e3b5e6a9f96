"""Run by the Python that has the public SDK, see `test_service`: a supervised loop and an RL loop. Prints losses and rewards as JSON."""

import json
import sys

import tinker
from tinker import types

TOKENS = [2, 3, 4, 5, 6, 7]  # of the supervised sequence
WANTED = 4  # the token that the RL loop rewards


def sequence(tokens, logprobs=None, advantage=None, prompt=1):
    """A datum: the first `prompt` tokens are context."""
    n = len(tokens) - 1
    trained = [float(i >= prompt - 1) for i in range(n)]
    inputs = {"target_tokens": tokens[1:]}
    if logprobs is None:
        inputs["weights"] = [one / sum(trained) for one in trained]
    else:
        inputs["logprobs"] = [0.0] * (prompt - 1) + logprobs
        inputs["advantages"] = [advantage * one for one in trained]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main(model):
    service = tinker.ServiceClient()
    print(service.get_server_capabilities().supported_models, file=sys.stderr)
    training = service.create_lora_training_client(base_model=model, rank=8)
    losses = []
    for _ in range(24):
        done = training.forward_backward([sequence(TOKENS), sequence(TOKENS[:4])], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=3e-2))
        losses.append(done.result().metrics["loss:sum"])
        step.result()
    saved = training.save_state("supervised").result().path
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    rewards = []
    for _ in range(8):
        sampler = again.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints([2, 3])
        sampled = sampler.sample(prompt, num_samples=32, sampling_params=types.SamplingParams(max_tokens=4, seed=1)).result().sequences
        gains = [one.tokens.count(WANTED) / len(one.tokens) for one in sampled]
        mean = sum(gains) / len(gains)
        rewards.append(mean)
        data = [sequence([2, 3, *one.tokens], list(one.logprobs), gain - mean, prompt=2) for one, gain in zip(sampled, gains, strict=True)]
        again.forward_backward(data, "importance_sampling").result()
        again.optim_step(types.AdamParams(learning_rate=5e-2)).result()
    print(json.dumps({"losses": losses, "rewards": rewards, "saved": saved}))


main(sys.argv[1])
