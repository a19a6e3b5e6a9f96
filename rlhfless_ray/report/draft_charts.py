"""Charts of speculative decoding by step: accepted and rejected drafted tokens, and the training of a drafter."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless_ray.report.charts import Chart, Row, lines
from rlhfless_ray.report.formatting import duration, total


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
    names = [("text", "accepted, from text", "@rollout", "solid"), ("vain", "drafted in vain", "@muted", "dot")]
    if any(row["model"] for row in shown):
        names.insert(1, ("model", "accepted, from the drafter", "@learn", "solid"))
    data = lines(shown, names, width=1.8, hovertemplate="%{y:.2f} tokens")
    saved_s = total(rows, "rollout/drafts_saved_s") or 0.0
    note = (
        "Tokens of an engine's decode step that were drafted, besides the one that it draws for each sequence. By the fitted step times "
        f"drafts {'saved' if saved_s >= 0 else 'cost'} {duration(abs(saved_s))} of engines' time."
    )
    return Chart("drafts", "Drafted tokens", note, data, {"yaxis": {"title": "tokens per engine step", "rangemode": "tozero"}})


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
