"""Charts of a supervised stage: loss, accuracy, rewards and speed, of training and of held-out rows."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless_ray.report.charts import Chart, Row, lines

ACCURACY = (
    "Share of pairs whose chosen response has the higher reward; with KTO, of responses that are on the right side; "
    "of a process reward model, of steps whose own reward token is the likeliest."
)
REWARDS = (
    ("learn/chosen_reward", "chosen", "@rollout", "solid"),
    ("learn/rejected_reward", "rejected", "@learn", "solid"),
    ("learn/margin", "difference", "@muted", "dot"),
)


def learning(rows: Sequence[Row]) -> list[Chart]:
    """Return the stage's charts, without those that it has no data for."""
    reward = "For a reward model these are its values, otherwise beta times the log-ratio of policy and reference."
    speed = "All tokens of a step's sequences, by the seconds of its update."
    speeds = lines(rows, [("tokens/per_s", "tokens per second", "@rollout", "solid")])
    charts = (
        Chart("supervised-loss", "Loss", "Mean of a step's rows, and of the held-out rows.", _both(rows, "loss")),
        Chart("supervised-accuracy", "Accuracy", ACCURACY, _both(rows, "accuracy")),
        Chart("supervised-rewards", "Rewards", reward, lines(rows, REWARDS)),
        Chart("supervised-speed", "Tokens per second", speed, speeds),
    )
    return [chart for chart in charts if chart.data]


def _both(rows: Sequence[Row], key: str) -> list[Row]:
    """Return the lines of a metric of training and of held-out rows."""
    return lines(rows, [(f"learn/{key}", "training", "@rollout", "solid"), (f"eval/{key}", "held out", "@learn", "solid")])
