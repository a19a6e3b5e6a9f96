"""A real reward model for the built-in task `chain`: a sequence classifier that learns to tell right responses from wrong ones.

It begins with the policy's own body and sees supervised responses, many of them with mistakes of ours, and what the policy itself says
at several temperatures, labelled by the verifier. It is told of every sum whether it is right, and at the end whether the response is
(Lightman et al. 2023, arXiv 2305.20050, section 2, call this process supervision: it needs far fewer examples); its score is that at
the end. It is served as a user's reward model is: a folder, `reward.model_path`. It never sees a held-out prompt.
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

from rlhfless_ray.prompts.builtin_tasks import Chain, Row, running_sums
from rlhfless_ray.weights.load_policy import cache_folder, load_tokenizer
from rlhfless_ray.weights.model_folder import read_folder, write_folder

VERSION = 3  # of what is done here, for the cache
LEARNING_RATE, BATCH, BUCKET = 1e-3, 32, 16
OWN = 0.5  # of the responses are the policy's own
TEMPERATURES = (0.7, 1.0, 1.0, 1.3, 1.6)  # they are sampled at
LONGEST, AT_ONCE = 96, 256  # tokens of such a response; how many are sampled together


@dataclass(frozen=True)
class RewardModelTraining:
    """`folder`: of the model. On held-out prompts: the share of pairs of a right and a wrong response of which the right one has the
    higher score, among `supervised` responses, among those with mistakes of ours, which look the same (`spoilt`), and among the
    policy's own."""

    folder: Path
    steps: int
    supervised: float
    spoilt: float
    own: float


@dataclass(frozen=True)
class Response:
    """`pieces`: its tokens as text, without the end token; `ended`: whether that followed, or the response was cut off."""

    pieces: list[str]
    ended: bool = True

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def _slip(sums: list[int], rng: np.random.Generator) -> list[int]:
    """Return the sums with one wrong, usually propagated to those after it."""
    at, by = rng.integers(len(sums)), int(rng.integers(1, 10))
    last = len(sums) if rng.random() < 0.8 else at + 1
    return [(value + by) % 10 if at <= k < last else value for k, value in enumerate(sums)]


def response(row: Row, rng: np.random.Generator) -> Response:
    """As the supervised ones, or with a mistake of ours: a sum goes wrong, a key is passed over, the answer is another one, its mark is
    missing or there twice, something follows it, a part is missing or repeated, or it is cut off."""
    look = running_sums(row["prompt"], stride=1)
    keys, sums = look[::2], [int(digit) for digit in look[1::2]]
    answer, ended = str(sums[-1]), True
    text = Chain().example(row, rng)
    kind = rng.random()
    if kind < 0.4:
        looks = []
        for k in range(int(rng.integers(1, 3))):
            one = _slip(sums, rng) if k == 0 or rng.random() < 0.3 else sums
            looks.append("".join(f"{key}{value}" for key, value in zip(keys, one, strict=True)))
        text = ";".join(rng.permutation(looks)) + f"#{rng.choice([one[-1] for one in looks])}"
    elif kind < 0.5 and len(keys) > 1:
        at = int(rng.integers(len(keys)))
        operands = np.diff([int(row["prompt"][0]), *sums]) % 10
        left = np.delete(operands, at)
        ran = [(int(row["prompt"][0]) + int(total)) % 10 for total in np.cumsum(left)]
        text = "".join(f"{key}{value}" for key, value in zip(keys[:at] + keys[at + 1 :], ran, strict=True)) + f"#{ran[-1]}"
    elif kind < 0.56:
        text = f"{look}#{rng.integers(10)}"
    elif kind < 0.6:
        text = f"#{rng.integers(10)}"
    elif kind < 0.64:
        text = f"{look}{rng.choice(['', '##', '#;', ';#;', '#' + answer + '#'])}{answer}"
    elif kind < 0.68:
        text += str(rng.choice([answer, ";", "#", look[:2], f";{look}", f"#{answer}"]))
    elif kind < 0.74:
        at = int(rng.integers(len(text)))
        text = text[:at] + text[at + int(rng.integers(1, 5)) :] if rng.random() < 0.5 else text[:at] + text[max(0, at - 2) :]
    elif kind < 0.78:
        text, ended = text[: int(rng.integers(1, len(text)))], bool(rng.random() < 0.5)
    return Response(list(text), ended)


@torch.no_grad()
def own_responses(files: dict[str, bytes], rows: list[Row], temperature: float) -> list[Response]:
    """What the policy says to these prompts, drawn from torch's generator."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(files, False)
    tokenizer.padding_side = "left"
    with tempfile.TemporaryDirectory() as name:
        policy = AutoModelForCausalLM.from_pretrained(write_folder(Path(name), files), dtype=torch.float32).eval()
    found = []
    for start in range(0, len(rows), AT_ONCE):
        prompts = [row["prompt"] for row in rows[start : start + AT_ONCE]]
        asked = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        said = policy.generate(
            input_ids=asked["input_ids"],
            attention_mask=asked["attention_mask"],
            do_sample=True,
            temperature=temperature,
            top_k=0,
            max_new_tokens=LONGEST,
            pad_token_id=tokenizer.pad_token_id,
        )
        for ids in said[:, asked["input_ids"].shape[1] :].tolist():
            length = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
            found.append(Response(tokenizer.convert_ids_to_tokens(ids[:length]), length < len(ids)))
    return found


@dataclass(frozen=True)
class Labelled:
    """`tokens` of prompt, response and end. `places`: the last token, and before it those of the sums; `right`: of each."""

    tokens: list[int]
    places: list[int]
    right: list[float]


def labelled(rows: list[Row], responses: list[Response], tokenizer: Any) -> list[Labelled]:
    """Label each row's response. Truncated responses count as wrong."""
    found = []
    for row, one in zip(rows, responses, strict=True):
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        ids = [*prompt, *tokenizer.convert_tokens_to_ids(one.pieces), *([tokenizer.eos_token_id] if one.ended else [])]
        look, pieces = running_sums(row["prompt"], stride=1), one.pieces
        wanted = {**dict(zip(look[::2], look[1::2], strict=True)), "#": row["answer"]}
        sums = [i for i in range(1, len(pieces)) if pieces[i].isdigit() and pieces[i - 1] in wanted]
        right = [float(pieces[i] == wanted[pieces[i - 1]]) for i in sums]
        verdict = Chain().verify(one.text, row) if one.ended else 0.0
        found.append(Labelled(ids, [len(ids) - 1, *(len(prompt) + i for i in sums)], [verdict, *right]))
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
    own: list[Labelled] = []
    for temperature in TEMPERATURES:
        rows = Chain().rows(int(steps * BATCH * OWN / len(TEMPERATURES)) + 1, int(rng.integers(2**62)), "train")
        own += labelled(rows, own_responses(files, rows, temperature), tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=max(2, steps), pct_start=0.1)
    order, done, took = rng.permutation(len(own)), 0, 0
    while done < steps:
        mine = [own[i] for i in order[took : took + int(BATCH * BUCKET * OWN)]]
        took += len(mine)
        rows = Chain().rows(BATCH * BUCKET - len(mine), int(rng.integers(2**62)), "train")
        found = mine + labelled(rows, [response(row, rng) for row in rows], tokenizer)
        by_length = np.argsort([len(one.tokens) for one in found], kind="stable")  # batches of like lengths
        for part in rng.permutation(np.array_split(by_length, BUCKET))[: steps - done]:
            chosen = [found[i] for i in part]
            given = scores(model, chosen)
            ends, places = torch.stack([one[0] for one in given]), torch.cat([one[1:] for one in given])
            loss = _judged(ends, [one.right[0] for one in chosen]) + _judged(places, [x for one in chosen for x in one.right[1:]])
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


def verdicts(files: dict[str, bytes], key: str, steps: int, seed: int = 0) -> RewardModelTraining:
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
    torch.manual_seed(seed)
    kinds = (
        [Response(list(Chain().example(row, rng))) for row in rows],
        [response(row, rng) for row in rows],
        own_responses(files, rows, 1.0),
    )
    for kind in kinds:
        responses = labelled(rows, kind, tokenizer)
        found.append(in_order(at_the_end(model, responses), np.array([one.right[0] for one in responses])))
    return RewardModelTraining(kept, steps, *found)
