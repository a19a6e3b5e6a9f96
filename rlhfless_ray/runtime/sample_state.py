"""Samples as JSON-serialisable values, for checkpoints."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rlhfless_ray.types import Completion, Prompt, Sample

PLAIN = ("sample", "text", "reward", "error", "score", "extra_logs", "turns")  # a sample's fields that JSON can hold


def as_json(sample: Sample) -> dict[str, Any]:
    completion = asdict(sample.completion)
    completion |= {name: completion[name].tolist() for name in ("token_ids", "logprobs")}
    mask = None if sample.action_mask is None else sample.action_mask.tolist()
    return {"row": sample.prompt.index, "completion": completion, "action_mask": mask, **{name: getattr(sample, name) for name in PLAIN}}


def from_json(row: dict[str, Any], prompts: list[Prompt]) -> Sample:
    """Restore a sample exactly: JSON's decimals preserve float32. `prompts`: by row."""
    fields = row["completion"]
    fields |= {
        "token_ids": np.array(fields["token_ids"], np.int32),
        "logprobs": np.array(fields["logprobs"], np.float32),
        "versions": tuple((version, tokens) for version, tokens in fields["versions"]),
    }
    mask = None if row["action_mask"] is None else np.array(row["action_mask"], bool)
    sample = Sample(prompts[row["row"]], completion=Completion(**fields), action_mask=mask, **{name: row[name] for name in PLAIN})
    return replace(sample, turns=tuple((who, text) for who, text in sample.turns))
