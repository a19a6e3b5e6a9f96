"""The model card of a trained policy: what it was trained on, how it learned, and what that cost."""

from __future__ import annotations

from rlhfless_ray.report.formatting import finite
from rlhfless_ray.report.run_view import RunView

SHOWN_STEPS = 12  # rows of the curve


def model_card(run: RunView, name: str) -> str:
    """Return the text of README.md, with the hub's metadata at its head."""
    from huggingface_hub import ModelCard, ModelCardData

    settings = run.settings
    policy, prompts = settings.get("policy", {}).get("path"), settings.get("prompts", {})
    data = ModelCardData(base_model=policy or None, library_name="transformers", tags=["rlhfless-ray", "reinforcement-learning"])
    steps = run.steps
    shown = steps[:: max(1, len(steps) // SHOWN_STEPS)]
    if steps and shown[-1] is not steps[-1]:
        shown = [*shown, steps[-1]]
    curve = [f"| {row['step']} | {_number(row.get('reward/mean'))} | {_number(row.get('length/mean'))} |" for row in shown]
    cost = steps[-1].get("cost/total_full_slot_s") if steps else None
    lines = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name.rpartition('/')[2]}",
        f"Trained with [rlhfless-ray](https://pypi.org/project/rlhfless-ray/) in {len(steps)} steps by "
        f"`{settings.get('algorithm', {}).get('advantage', {}).get('estimator', 'group_norm')}`"
        + (f" from `{policy}`" if policy else "")
        + f" on `{prompts.get('path') or prompts.get('task') or ', '.join(prompts.get('paths') or [])}`.",
        "## Curve",
        "| step | mean reward | mean length (tokens) |\n|---|---|---|\n" + "\n".join(curve),
        *([f"The run leased {cost:,.0f} slot-seconds."] if finite(cost) is not None else []),
        "## Recipe",
        f"```yaml\n{run.recipe.rstrip()}\n```",
    ]
    return str(ModelCard("\n\n".join(lines) + "\n"))


def _number(value: float | None) -> str:
    number = finite(value)
    return "" if number is None else f"{number:.3f}"
