"""Charts of a supervised stage: loss, accuracy, rewards and speed, of training and of held-out rows."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless_ray.report.charts import Chart, Row, lines


def loss(rows: Sequence[Row]) -> Chart | None:
    return _chart(rows, "supervised-loss", "Loss", "Mean of a step's rows, and of the held-out rows.", "loss")


def accuracy(rows: Sequence[Row]) -> Chart | None:
    note = (
        "Share of pairs whose chosen response has the higher reward; with KTO, of responses that are on the right side; "
        "of a process reward model, of steps whose own reward token is the likeliest."
    )
    return _chart(rows, "supervised-accuracy", "Accuracy", note, "accuracy")


def rewards(rows: Sequence[Row]) -> Chart | None:
    """Draw the rewards of chosen and rejected responses, and their difference."""
    data = lines(
        rows,
        [
            ("learn/chosen_reward", "chosen", "@rollout", "solid"),
            ("learn/rejected_reward", "rejected", "@learn", "solid"),
            ("learn/margin", "difference", "@muted", "dot"),
        ],
    )
    note = "For a reward model these are its values, otherwise beta times the log-ratio of policy and reference."
    return Chart("supervised-rewards", "Rewards", note, data) if data else None


def speed(rows: Sequence[Row]) -> Chart | None:
    data = lines(rows, [("tokens/per_s", "tokens per second", "@rollout", "solid")])
    return (
        Chart("supervised-speed", "Tokens per second", "All tokens of a step's sequences, by the seconds of its update.", data)
        if data
        else None
    )


def _chart(rows: Sequence[Row], name: str, title: str, note: str, key: str) -> Chart | None:
    data = lines(rows, [(f"learn/{key}", "training", "@rollout", "solid"), (f"eval/{key}", "held out", "@learn", "solid")])
    return Chart(name, title, note, data) if data else None
