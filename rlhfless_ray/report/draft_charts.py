"""Charts of speculative decoding by step: accepted and rejected drafted tokens, and the training of a drafter."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from rlhfless_ray.report.charts import Chart, Row, bars, lines, rounded
from rlhfless_ray.report.formatting import duration, total

BAND = "rollout/drafts_from_"  # metrics of engine steps of so many sequences and more, see `drafts_by_band`
KINDS = {
    "text": ("accepted, from text", "@rollout"),
    "model": ("accepted, from the drafter", "@learn"),
    "vain": ("drafted in vain", "@muted"),
}
"""What became of drafted tokens → its name and colour."""
BAND_STEPS = re.compile(BAND + r"(\d+)_steps")


def drafts(rows: Sequence[Row]) -> Chart | None:
    """Draw accepted tokens per engine step by source."""
    if not total(rows, "rollout/drafted"):
        return None
    shown = []
    for row in rows:
        steps = row.get("rollout/engine_steps") or 1
        drafted, accepted = row.get("rollout/drafted") or 0, row.get("rollout/drafts_accepted") or 0
        by_model = row.get("rollout/model_drafts_accepted") or 0
        parts = {"text": accepted - by_model, "model": by_model, "vain": drafted - accepted}
        shown.append({"step": row["step"], **{name: value / steps for name, value in parts.items()}})
    kinds = [kind for kind in KINDS if kind != "model" or any(row["model"] for row in shown)]
    names = [(kind, *KINDS[kind], "dot" if kind == "vain" else "solid") for kind in kinds]
    data = lines(shown, names, width=1.8, hovertemplate="%{y:.2f} tokens")
    saved_s = total(rows, "rollout/drafts_saved_s") or 0.0
    note = (
        "Tokens of an engine's decode step that were drafted, besides the one that it draws for each sequence. By the fitted step times "
        f"drafts {'saved' if saved_s >= 0 else 'cost'} {duration(abs(saved_s))} of engines' time."
    )
    return Chart("drafts", "Drafted tokens", note, data, {"yaxis": {"title": "tokens per engine step", "rangemode": "tozero"}})


def drafts_within(rows: Sequence[Row]) -> Chart | None:
    """Draw accepted and rejected tokens per engine step by the sequences of a step, over all rollouts."""
    found = {int(match[1]) for row in rows for key in row if (match := BAND_STEPS.fullmatch(key))}
    bands = [low for low in sorted(found, reverse=True) if total(rows, f"{BAND}{low}_steps")]
    if not bands:
        return None
    ends = {low: high - 1 for low, high in itertools.pairwise(sorted(found))}
    names = [f"{low}" if ends.get(low) == low else f"{low} to {ends[low]}" if low in ends else f"{low} and more" for low in bands]
    data: list[Row] = []
    for what, (name, colour) in KINDS.items():
        values = [rounded((total(rows, f"{BAND}{low}_{what}") or 0.0) / (total(rows, f"{BAND}{low}_steps") or 1.0)) for low in bands]
        if any(values):
            data.append(bars(names, values, name, colour))
    note = "The same by the sequences that an engine's step had: from full rollouts on the left to their tails on the right."
    layout = {"barmode": "stack", "xaxis": {"title": "sequences in the step"}, "yaxis": {"title": "tokens per engine step"}}
    return Chart("drafts-within", "Drafted tokens within a rollout", note, data, layout)


def drafter(rows: Sequence[Row]) -> Chart | None:
    """Draw the acceptance of a trained drafter's tokens, and its distance to the policy."""
    if not total(rows, "drafter/updates"):
        return None
    shown = []
    for row in rows:
        drafted = row.get("rollout/model_drafted")
        share = row["rollout/model_drafts_accepted"] / drafted if drafted else None
        shown.append({"step": row["step"], "share": share, "kl": row.get("drafter/kl")})
    names = [("share", "accepted share of its tokens", "@learn", "solid"), ("kl", "log p of policy − drafter, nats", "@muted", "dot")]
    note = (
        f"{total(rows, 'drafter/updates'):.0f} updates in {duration(total(rows, 'drafter/train_s') or 0.0)}, on slots that engines left. "
        f"Engines drafted with up to {max(int(row.get('drafter/version') or 0) for row in rows)} versions of its weights."
    )
    data = lines(shown, names, width=1.8, hovertemplate="%{y:.3f}")
    return Chart("drafter", "Training of the drafter", note, data, {"yaxis": {"title": "share, nats per token", "rangemode": "tozero"}})
