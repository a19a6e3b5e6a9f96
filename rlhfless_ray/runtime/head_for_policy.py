"""`rlhfless drafter`: an EAGLE-3 head for a policy, trained on responses that the policy's engines generate."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.engine.head_config import refusal
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.rollout.train_head import HEAD_WIDTH, head_config, train_head
from rlhfless_ray.runtime.generation import Generation
from rlhfless_ray.weights.model_folder import config_of, write_folder

LEAST_SEQUENCES = 32


def head_for_policy(recipe: GenerationRecipe, out: Path, hidden: int, passes: int, *, resume: bool = False) -> Path:
    """Generate responses, train a head on them, and return the head's folder `out`.

    hidden: width of the head, 0 for that of the policy. passes: over the responses.

    Raises:
        UserError: For mistakes in the recipe, for a policy that no head can read, and for a width that no head can have.
    """
    if hidden % HEAD_WIDTH:
        raise UserError(f"--hidden: {hidden} is no multiple of {HEAD_WIDTH}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out: {out} is there already; name a new folder")
    with Generation(recipe, resume=resume) as run:
        policy = config_of(run.inputs.files)
        config = head_config(policy, hidden or (policy.get("text_config") or policy)["hidden_size"])
        if why := refusal(config, policy):
            raise UserError(f"policy.path: no head can be trained: {why}")
        for _ in run:
            pass
    count = recipe.rollout.samples_per_prompt
    samples = [sample for prompt in run.inputs.prompts.train for sample in run.responses.samples(prompt, count)]
    if len(samples) < LEAST_SEQUENCES:
        raise UserError(f"prompts.rows: {len(samples)} responses are too few to train a head on; generate at least {LEAST_SEQUENCES}")
    with TemporaryDirectory(prefix="rlhfless-head-") as scratch:
        folder = write_folder(Path(scratch) / "policy", run.inputs.files)
        said = [[*sample.prompt.token_ids, *sample.completion.token_ids.tolist()] for sample in samples]
        return write_folder(out, train_head(folder, config, said, passes))
