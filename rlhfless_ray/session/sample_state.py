"""Convert samples to JSON types and back, for checkpoints."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId, Scored

OLDER = -2  # begun_step of samples in checkpoints of older versions
UNSCORED: JsonObject = {"reward": None, "error": None, "score": None, "extra_logs": {}}


def as_json(sample: Sample) -> JsonObject:
    completion = asdict(sample.completion)
    completion |= {name: completion[name].tolist() for name in ("token_ids", "logprobs")}
    del completion["experts"]  # large; after a resume the learner's routers choose for these samples
    mask = None if sample.action_mask is None else sample.action_mask.tolist()
    of_agent: JsonObject = {"observation": [sample.prompt.text, list(sample.prompt.token_ids)]} if sample.turns or sample.id.branch else {}
    score = {name: getattr(sample, name, none) for name, none in UNSCORED.items()}
    own = {"text": sample.text, "action_mask": mask, "turns": sample.turns}
    of_agent |= {"branches": [as_json(branch) for branch in branches]} if (branches := getattr(sample, "branches", ())) else {}
    return {"row": sample.id.row, "id": list(sample.id), "completion": completion, **own, **score, **of_agent}


def from_json(row: JsonObject, prompts: list[Prompt], name: SampleId | None = None) -> Sample:
    """Restore a sample exactly: JSON's decimals preserve float32. `prompts`: by row. `name`: overrides the saved one.

    In older checkpoints samples have no name, but a key that no other sample of their step has.
    """
    saved = row["completion"]
    fields = saved | {
        "token_ids": np.array(saved["token_ids"], np.int32),
        "logprobs": np.array(saved["logprobs"], np.float32),
        "versions": tuple((version, tokens) for version, tokens in saved["versions"]),
        "turns": tuple((tuple(context), tokens, reason) for context, tokens, reason in saved.get("turns", ())),
    }
    prompt = prompts[row["row"]]
    if "observation" in row:  # an agent's first one takes the prompt's place
        prompt = replace(prompt, text=row["observation"][0], token_ids=tuple(row["observation"][1]))
    mask = None if row["action_mask"] is None else np.array(row["action_mask"], bool)
    name = name or (SampleId(*row["id"]) if "id" in row else SampleId(row["row"], OLDER, saved["key"]))
    turns = tuple((who, text) for who, text in row["turns"])
    sample = Sample(prompt, name, Completion(**fields), row["text"], mask, turns)
    score = {name: row[name] for name in UNSCORED}
    branches = tuple(one for branch in row.get("branches", ()) if isinstance(one := from_json(branch, prompts), Scored))
    return sample if score == UNSCORED else Scored(**vars(sample), **score, branches=branches)
