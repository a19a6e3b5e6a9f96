"""Command lines that most tests of the translation begin with."""

from __future__ import annotations

from rlhfless_ray.compat.openrlhf.translate import Translation, translate

BASE = "--pretrain /m --prompt_data /d.jsonl --remote_rm_url /r.py --vllm_num_engines 8 --advantage_estimator rloo --n_samples_per_prompt 4"
GAE = BASE.replace("rloo", "gae")
DOTTED = (
    "--actor.model_name_or_path /m --data.prompt_dataset /d.jsonl --reward.remote_url /r.py --vllm.num_engines 8 "
    "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4"
)


def of(line: str) -> Translation:
    return translate(line.split(), {})


def status(found: Translation, flag: str) -> str:
    (outcome,) = [outcome for outcome in found.flags if outcome.flag == flag]
    return outcome.status
