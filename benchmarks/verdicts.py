"""A real reward model for the built-in task `chain`: a sequence classifier that learns to tell right responses from wrong ones.

It begins with the policy's own body and sees supervised responses, some of them with a slip of the pen that is carried on. It is
told of every sum whether it is right, and at the end whether the response is (Lightman et al. 2023, arXiv 2305.20050, section 2, call
this process supervision: it needs far fewer examples); its score is that at the end. It is served as a user's reward model is: a
folder, `reward.model_path`. It never sees a held-out prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhfless_ray.policy_files import cache_folder, load_tokenizer
from rlhfless_ray.prompts.chain import Chain, written
from rlhfless_ray.prompts.tasks import Row
from rlhfless_ray.weights.folder import read_folder, write_folder

VERSION = 2  # of what is done here, for the cache
LEARNING_RATE, BATCH, BUCKET = 1e-3, 32, 16
SLIPPED, GUESSED, CUT = 0.45, 0.05, 0.05  # of the responses: a sum goes wrong, another answer is given, the end is missing


@dataclass(frozen=True)
class Verdicts:
    """`folder`: of the model. On held-out prompts: the share of pairs of a right and a wrong response of which the right one has the
    higher score, among `supervised` responses, and among those with mistakes of ours, which look the same (`spoilt`)."""

    folder: Path
    steps: int
    supervised: float
    spoilt: float


def response(row: Row, rng: np.random.Generator) -> str:
    """As the supervised ones, or with one of the mistakes above."""
    drawn = rng.random()
    if drawn < SLIPPED:
        look = written(row["prompt"], stride=1)
        sums = [int(digit) for digit in look[1::2]]
        at, by = rng.integers(len(sums)), rng.integers(1, 10)
        sums[at:] = [(value + int(by)) % 10 for value in sums[at:]]
        return "".join(f"{key}{value}" for key, value in zip(look[::2], sums, strict=True)) + f"#{sums[-1]}"
    text = Chain().example(row, rng)
    if drawn < SLIPPED + GUESSED:
        return f"{text[:-1]}{rng.integers(10)}"
    return text[: rng.integers(1, len(text))] if drawn < SLIPPED + GUESSED + CUT else text


@dataclass(frozen=True)
class Labelled:
    """`tokens` of prompt, response and end. `places`: the last token, and before it those of the sums; `right`: of each."""

    tokens: list[int]
    places: list[int]
    right: list[float]


def labelled(rows: list[Row], texts: list[str], tokenizer: Any) -> list[Labelled]:
    """Of each row and its response. Each character of a response is one token."""
    found = []
    for row, text in zip(rows, texts, strict=True):
        prompt = row["prompt"]
        ids = tokenizer(prompt + text, add_special_tokens=False)["input_ids"]
        first = len(ids) - len(text)
        look = written(prompt, stride=1)
        wanted = {**dict(zip(look[::2], look[1::2], strict=True)), "#": row["answer"]}
        sums = [i for i in range(1, len(text)) if text[i].isdigit() and text[i - 1] in wanted]
        right = [float(text[i] == wanted[text[i - 1]]) for i in sums]
        found.append(Labelled([*ids, tokenizer.eos_token_id], [len(ids), *(first + i for i in sums)], [Chain().verify(text, row), *right]))
    return found


def scores(model: Any, responses: list[Labelled]) -> list[Tensor]:
    """The head's values at the places of each."""
    width = max(len(one.tokens) for one in responses)
    ids = torch.tensor([[*one.tokens, *[0] * (width - len(one.tokens))] for one in responses])
    values = model.score(model.model(input_ids=ids, use_cache=False).last_hidden_state).squeeze(2)
    return [row[one.places] for row, one in zip(values, responses, strict=True)]


def learned(files: dict[str, bytes], steps: int, seed: int) -> dict[str, bytes]:
    """A reward model's folder, made of a policy's. config.json has mean and deviation of its values (`reward.normalize`)."""
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(files, False)
    rng = np.random.default_rng([seed, 11])
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), files)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=max(2, steps), pct_start=0.1)
    done = 0
    while done < steps:
        rows = Chain().rows(BATCH * BUCKET, int(rng.integers(2**62)), "train")
        found = labelled(rows, [response(row, rng) for row in rows], tokenizer)
        order = np.argsort([len(one.tokens) for one in found], kind="stable")  # batches of like lengths
        for part in rng.permutation(np.array_split(order, BUCKET))[: steps - done]:
            mine = [found[i] for i in part]
            given = scores(model, mine)
            ends, places = torch.stack([one[0] for one in given]), torch.cat([one[1:] for one in given])
            loss = _judged(ends, [one.right[0] for one in mine]) + _judged(places, [x for one in mine for x in one.right[1:]])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            done += 1
    values = at_the_end(model, found)
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        made = read_folder(Path(name))
    config = {**json.loads(made["config.json"]), "mean": float(values.mean()), "std": float(values.std())}
    return {**made, "config.json": json.dumps(config, indent=1).encode()}


def _judged(values: Tensor, right: list[float]) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(values, torch.tensor(right))


@torch.no_grad()
def at_the_end(model: Any, responses: list[Labelled]) -> np.ndarray:
    """The scores, (n,)."""
    given = [one for i in range(0, len(responses), BATCH) for one in scores(model, responses[i : i + BATCH])]
    return np.array([float(one[0]) for one in given])


def in_order(values: np.ndarray, right: np.ndarray) -> float:
    """Share of the pairs of a right and a wrong response, (n,) values and 0 or 1, of which the right one has the higher value; ties
    count half."""
    good, bad = values[right > 0][:, None], values[right <= 0][None, :]
    return float(np.mean((good > bad) + 0.5 * (good == bad)))


def verdicts(files: dict[str, bytes], key: str, steps: int, seed: int = 0) -> Verdicts:
    """The reward model to a policy's files, from the cache where it is there; `key` names the policy."""
    from transformers import AutoModelForSequenceClassification

    name = hashlib.sha256(json.dumps([VERSION, key, steps, seed, torch.__version__]).encode()).hexdigest()[:16]
    kept = cache_folder() / "reward_models" / name
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=kept.parent, prefix=".making-"))
        write_folder(temporary, learned(files, steps, seed))
        try:
            os.rename(temporary, kept)
        except OSError:  # somebody else made it meanwhile
            shutil.rmtree(temporary)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(kept), load_tokenizer(files, False)
    rng, rows = np.random.default_rng([seed, 12]), Chain().rows(256, seed, "heldout")
    found = []
    for write in (Chain().example, response):
        responses = labelled(rows, [write(row, rng) for row in rows], tokenizer)
        found.append(in_order(at_the_end(model, responses), np.array([one.right[0] for one in responses])))
    return Verdicts(kept, steps, *found)
