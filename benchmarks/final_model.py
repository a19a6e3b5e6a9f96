"""Does a run's final `model/` load in transformers and in vLLM, and do both score the same with it?

    python -m benchmarks.final_model RUN_FOLDER

Greedy answers to the run's held-out prompts, by each library's own generation, with none of the runtime's engine code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import read_metrics
from rlhfless_ray import Recipe

TOLERANCE = 0.01  # of the prompts: rounding may turn a near tie of two tokens


@dataclass(frozen=True)
class FinalModel:
    """Accuracies are mean rewards over the held-out prompts."""

    prompts: int
    transformers_accuracy: float
    vllm_accuracy: float
    run_accuracy: float | None  # the run's own last greedy evaluation, None where it made none
    same_answers: float  # share of prompts that both libraries answered token for token alike

    @property
    def scores_the_same(self) -> bool:
        runs = [self.transformers_accuracy, self.vllm_accuracy, *([] if self.run_accuracy is None else [self.run_accuracy])]
        return max(runs) - min(runs) <= max(TOLERANCE, 1.5 / max(1, self.prompts))


def check_final_model(run: Path) -> FinalModel:
    """Each library answers in a process of its own. Raises RuntimeError when one cannot load the model or fails."""
    answers = {library: _answers(run, library) for library in ("transformers", "vllm")}
    recipe, prompts = heldout(run)
    from rlhfless_ray.runtime.load_reward import load_reward
    from rlhfless_ray.weights.load_policy import load_tokenizer
    from rlhfless_ray.weights.model_folder import read_folder

    tokenizer = load_tokenizer(read_folder(run / "model"), recipe.policy.trust_remote_code)
    reward = load_reward(recipe).build(recipe.reward.timeout_s)
    accuracy = {}
    for library, ids in answers.items():
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        accuracy[library] = float(np.mean([reward(p.text, t, p.row) for p, t in zip(prompts, texts, strict=True)]))
    same = np.mean([a == b for a, b in zip(answers["transformers"], answers["vllm"], strict=True)])
    return FinalModel(len(prompts), accuracy["transformers"], accuracy["vllm"], _own_accuracy(run), float(same))


def heldout(run: Path) -> tuple[Recipe, list[Any]]:
    """The run's recipe and its held-out prompts, tokenized by the final model's tokenizer."""
    from rlhfless_ray.prompts.load_prompts import load_prompts
    from rlhfless_ray.weights.load_policy import load_tokenizer
    from rlhfless_ray.weights.model_folder import read_folder

    recipe = Recipe.load(run / "recipe.yaml")
    tokenizer = load_tokenizer(read_folder(run / "model"), recipe.policy.trust_remote_code)
    return recipe, load_prompts(recipe, tokenizer).heldout


def _own_accuracy(run: Path) -> float | None:
    rows = read_metrics(run)
    found = [row["eval/accuracy_greedy"] for row in rows if row.get("eval/accuracy_greedy") is not None]
    return float(found[-1]) if found else None


def _answers(run: Path, library: str) -> list[list[int]]:
    """Response token ids of every held-out prompt, end-of-sequence removed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.final_model", str(run), "--answer-with", library], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{library} could not answer with {run.name}/model: {done.stderr.strip()[-2000:]}")
    answers: list[list[int]] = json.loads(done.stdout.strip().splitlines()[-1])
    return answers


def _with_transformers(model: Path, prompts: list[list[int]], max_tokens: int, stops: list[int]) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for first in range(0, len(prompts), 64):
        part = prompts[first : first + 64]
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in part])  # padding on the left, where generation wants it
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
        with torch.no_grad():
            out = policy.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, eos_token_id=stops or None, pad_token_id=0
            )
        answers += [_until_stop(row, stops) for row in out[:, width:].tolist()]
    return answers


def _with_vllm(model: Path, prompts: list[list[int]], max_tokens: int, stops: list[int]) -> list[list[int]]:
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ[name] = value
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        max_model_len=max(map(len, prompts)) + max_tokens,
        block_size=32,
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stops, detokenize=False)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    return [_until_stop(list(output.outputs[0].token_ids), stops) for output in outputs]


def _until_stop(ids: list[int], stops: list[int]) -> list[int]:
    return ids[: next((i for i, token in enumerate(ids) if token in stops), len(ids))]


def main() -> None:
    run = Path(sys.argv[1])
    if "--answer-with" not in sys.argv:
        found = check_final_model(run)
        print(json.dumps({**asdict(found), "scores_the_same": found.scores_the_same}, indent=1))
        raise SystemExit(0 if found.scores_the_same else 1)
    recipe, prompts = heldout(run)
    stops = json.loads((run / "model" / "generation_config.json").read_text()).get("eos_token_id")
    stops = [] if stops is None else [stops] if isinstance(stops, int) else stops
    answer = {"transformers": _with_transformers, "vllm": _with_vllm}[sys.argv[sys.argv.index("--answer-with") + 1]]
    ids = answer(run / "model", [list(p.token_ids) for p in prompts], recipe.rollout.max_tokens, stops)
    print(json.dumps(ids), flush=True)
    os._exit(0)  # vLLM's exit hooks linger


if __name__ == "__main__":
    main()
