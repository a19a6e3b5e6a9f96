"""Plain torch learning of a step's tokens: `python -m benchmarks.peers.plain_torch SETTINGS.json`, a part of the ceiling.

The same model, micro-batches, loss and clipping as both systems, with nothing around them. Says `ready` when warmed up; then
for every line on standard input does one update and prints the seconds it took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(settings: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(0)
    answer = settings["max_tokens"]
    samples = len(settings["prompts"]) * settings["group"]
    vocabulary = model.config.vocab_size
    sequences = [
        torch.cat([torch.tensor(ids), torch.randint(vocabulary, (answer,), generator=generator)])
        for ids in settings["prompts"]
        for _ in range(settings["group"])
    ]
    advantages = torch.randn(samples, generator=generator)

    def update() -> float:
        start = time.perf_counter()
        for first in range(0, samples, settings["micro_sequences"]):
            part = sequences[first : first + settings["micro_sequences"]]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)  # on the right: a causal model never looks there
            ends = torch.tensor([len(sequence) for sequence in part])
            columns = ends[:, None] - answer - 1 + torch.arange(answer)
            rows = torch.arange(len(part))[:, None]
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[rows, columns]) / settings["temperature"]
            targets = ids[rows, columns + 1]
            logprobs = torch.log_softmax(logits, dim=-1).gather(2, targets.unsqueeze(2)).squeeze(2)
            ratio = torch.exp(logprobs - logprobs.detach())
            advantage = advantages[first : first + len(part), None]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / (samples * answer)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    update()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(update(), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
