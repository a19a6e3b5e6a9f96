"""A small policy that has learned real texts by heart to some degree, as a policy after fine-tuning on them."""

from __future__ import annotations

import json
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common.widen import HEAD
from rlhfless_ray.weights.model_folder import read_folder
from rlhfless_ray.weights.tensor_file import Files

ROWS, VOCABULARY, LONGEST_TOKENS = 32, 1024, 300
HIDDEN, LAYERS = 192, 4
LOSS = 0.3  # nats per token of an answer at which training stops: about the entropy per token of instruction-tuned policies
MAX_PASSES = 400


def learned_texts(path: Path) -> tuple[Files, list[tuple[int, ...]], float]:
    """Train a policy of about 2 M parameters on the first rows of a JSONL file with the columns `question` and `answer`.

    Returns its files, the prompts as tokens, and the mean loss of an answer's token in nats.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()[: 4 * ROWS]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((f"{row['question']}\n{row['answer']}" for row in rows), trainer)
    pairs = ((tokenizer.encode(row["question"] + "\n").ids, [*tokenizer.encode(row["answer"]).ids, 1]) for row in rows)
    chosen = list(islice(((q, a) for q, a in pairs if len(q) + len(a) <= LONGEST_TOKENS), ROWS))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // HEAD,
        num_key_value_heads=HIDDEN // HEAD,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    loss = _train(model, chosen)
    with tempfile.TemporaryDirectory(prefix="learned-texts-") as name:
        model.save_pretrained(name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(name)
        return read_folder(Path(name)), [tuple(question) for question, _ in chosen], loss


def _train(model: Qwen2ForCausalLM, pairs: list[tuple[list[int], list[int]]]) -> float:
    """Train until an answer's token has a mean loss of LOSS, and return that loss."""
    tokens, labels = (torch.full((len(pairs), LONGEST_TOKENS), fill) for fill in (0, -100))
    for row, (question, answer) in enumerate(pairs):
        end = len(question) + len(answer)
        tokens[row, :end] = torch.tensor(question + answer)
        labels[row, len(question) : end] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    order, mean = np.random.default_rng(0), 0.0
    for _ in range(MAX_PASSES):
        losses = []
        for part in np.array_split(order.permutation(len(pairs)), 4):
            picked = torch.as_tensor(part)
            longest = int((labels[picked] >= 0).nonzero()[:, 1].max()) + 1
            loss = model(tokens[picked, :longest], labels=labels[picked, :longest]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        mean = float(np.mean(losses))
        if mean <= LOSS:
            break
    return mean
