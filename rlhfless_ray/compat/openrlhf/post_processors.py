"""Convert the scored responses of batch_inference to rows for SFT, conditional SFT and DPO."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rlhfless_ray.common.json_types import JsonObject

Row = JsonObject  # input, output, reward
REWARD_TEMPLATE = "{input} <rm_score>: {reward} "  # arXiv 2308.12050


def processed(rows: list[Row], name: str, *, reward_template: str | None = None, normalize: bool = False) -> list[Row]:
    """Apply a processor of OpenRLHF: `rs`, `csft` or `iter_dpo`; any other name returns the rows."""
    if name == "rs":
        return best(rows)
    if name == "csft":
        return conditioned(rows, reward_template or REWARD_TEMPLATE, normalize)
    return pairs(rows) if name == "iter_dpo" else rows


def best(rows: Iterable[Row]) -> list[Row]:
    """Rejection sampling: return the row with the highest reward for each input, the first one of several."""
    best_rows: dict[str, Row] = {}
    for row in rows:
        if row["input"] not in best_rows or row["reward"] > best_rows[row["input"]]["reward"]:
            best_rows[row["input"]] = {key: row[key] for key in ("input", "output", "reward")}
    return list(best_rows.values())


def conditioned(rows: list[Row], template: str, normalize: bool) -> list[Row]:
    """Conditional SFT: put the reward, with two decimals, into each input.

    `normalize`: to mean 0 and deviation 1 over all rows. Equal rewards become 0.
    """
    rewards = np.array([row["reward"] for row in rows], np.float64)
    if normalize:
        deviation = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        rewards = (rewards - rewards.mean()) / (deviation or 1.0)
    return [
        {**row, "input": template.replace("{reward}", f"{reward:.2f}").replace("{input}", row["input"]), "reward": float(reward)}
        for row, reward in zip(rows, rewards, strict=True)
    ]


def pairs(rows: Iterable[Row]) -> list[Row]:
    """Iterative DPO: return the outputs with the highest and the lowest reward for each input.

    As in OpenRLHF an input whose outputs all have the same reward is a pair of its first output with itself.
    """
    pair_of: dict[str, Row] = {}
    for row in rows:
        output, reward = row["output"], row["reward"]
        pair = pair_of.get(row["input"])
        if pair is None:
            pair_of[row["input"]] = {
                "prompt": row["input"],
                "chosen": output,
                "chosen_reward": reward,
                "rejected": output,
                "rejected_reward": reward,
            }
        elif reward > pair["chosen_reward"]:
            pair |= {"chosen": output, "chosen_reward": reward}
        elif reward < pair["rejected_reward"]:
            pair |= {"rejected": output, "rejected_reward": reward}
    return list(pair_of.values())
