"""SYNTHETIC run folders for the tests of `watch/`. Nothing in them was measured: a seeded generator makes up every number.

They follow the schema that the loop writes. `python -m tests.report.synthetic_run FOLDER [STEPS]` writes one to look at.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rlhfless_ray.recipe import Recipe

COLUMNS = (
    "lease", "node", "device", "resource", "kind", "instance", "activity", "step", "from_s", "to_s", "seconds", "slots",
    "memory_mb", "money",
)  # fmt: skip
PRICE_PER_SLOT_S = 0.04 / 3600
GROUP = 8
PROMPTS = 32
SLOTS = 4


class _Ledger:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, slot: int, kind: str, instance: str, activity: str, step: int, from_s: float, to_s: float) -> None:
        if to_s <= from_s:
            return
        slots = 0 if activity == "parked" else 1
        seconds = round(to_s - from_s, 6)
        self.rows.append({
            "lease": "" if activity == "parked" else f"l{step}-{slot}", "node": f"node-{'ab'[slot // 2]}",
            "device": slot % 2, "resource": "cpu", "kind": kind, "instance": instance, "activity": activity, "step": step,
            "from_s": round(from_s, 6), "to_s": round(to_s, 6), "seconds": seconds, "slots": slots,
            "memory_mb": {"rollout": 1830, "learn": 940, "score": 120}.get(kind, 900),
            "money": round(slots * seconds * PRICE_PER_SLOT_S, 9),
        })  # fmt: skip


def write_synthetic_run(
    folder: Path,
    steps: int = 60,
    *,
    seed: int = 0,
    status: str = "done",
    steps_total: int | None = None,
    samples_per_step: int = 64,
    hostile: str = "",
) -> Path:
    """Write a whole run folder; equal arguments give equal bytes. `hostile` is put into one sample, prompt and reason."""
    rng = np.random.default_rng(seed)
    folder = Path(folder)
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    total = steps_total or steps
    recipe = Recipe.parse({
        "run": {"name": "synthetic", "steps": total}, "prompts": {"task": "chain"}, "reward": {"function": "task"},
        "rollout": {"max_actors": SLOTS}, "evaluate": {"every_steps": 10},
    })  # fmt: skip
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    ledger = _Ledger()
    for slot in range(SLOTS):
        ledger.add(slot, "warm_start" if slot < 2 else "rollout", f"rollout-{slot}", "start", 0, 0.3, 9 + rng.uniform(0, 2))
    now = 14.0
    sampled, greedy = 0.37, 0.50
    rows = [{"step": 0, "time_s": now, "eval/accuracy_sampled": sampled, "eval/accuracy_greedy": greedy, "eval/length_mean": 71.0}]
    pool, totals = SLOTS, np.zeros(3)
    previous_end = np.full(SLOTS, 11.5)
    for step in range(1, steps + 1):
        progress = 1 - np.exp(-step / (0.4 * total))
        wanted = int(np.clip(round(2.9 + rng.normal(0, 0.45)), 1, SLOTS)) if step > 1 else pool
        decision = _decision(pool, wanted, hostile if step == 3 else "")
        pool = wanted
        row, now = _step(rng, step, now, pool, progress, total, ledger, previous_end, folder, samples_per_step, hostile)
        row |= decision | _prefix(step, pool)
        totals += (row["cost/busy_slot_s"], row["cost/full_slot_s"], row["cost/money"])
        row["cost/total_busy_slot_s"], row["cost/total_full_slot_s"], row["cost/total_money"] = (round(float(x), 6) for x in totals)
        row["time_left_s"] = round((total - step) * row["step_s"], 2)
        if step % 10 == 0 or step == total:
            row["eval/accuracy_sampled"] = round(0.37 + 0.26 * progress + rng.normal(0, 0.008), 4)
            row["eval/accuracy_greedy"] = round(0.50 + 0.19 * progress + rng.normal(0, 0.006), 4)
            row["eval/length_mean"] = round(71 + 12 * progress, 2)
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "ledger.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(sorted(ledger.rows, key=lambda entry: (entry["from_s"], entry["device"])))
    (folder / "status.json").write_text(json.dumps({
        "status": status, "reason": {"done": "", "failed": "the rollout pool lost its fourth instance"}.get(status, ""),
        "started_at": "2026-03-01T10:00:00+00:00", "ended_at": None if status == "running" else "2026-03-01T10:04:31+00:00",
        "steps_done": steps, "steps_total": total, "machine": "2 nodes with 2 cores each, 24 GB (synthetic)",
        "versions": {"python": "3.11.9", "ray": "2.60.0", "torch": "2.13.0", "vllm": "0.32.0"},
    }))  # fmt: skip
    return folder


def _decision(pool: int, wanted: int, hostile: str) -> dict[str, Any]:
    if wanted > pool:
        more = wanted - pool
        reason = f"{wanted} actors end the rollout {0.08 * more:.2f} s sooner for {0.11 * more:.2f} slot-s more"
        decision = "Grow"
    elif wanted < pool:
        reason = f"the longest response bounds the rollout: {pool - wanted} of {pool} actors would only wait for it"
        decision = "Shrink"
    else:
        decision, reason = "Hold", "no other size is worth its start-up"
    return {"pool/decision": decision, "pool/reason": reason + hostile}


def _prefix(step: int, pool: int) -> dict[str, Any]:
    """Every fourth step has prompts with a header that is long enough."""
    header, own = (1024 if step % 4 == 0 else 64), 80
    distinct, off = header + PROMPTS * own, pool * header + PROMPTS * GROUP * 16
    saved = 2e-4 * (off - distinct) - 0.45
    on = saved > 0
    even = None if pool == 1 else 700.0 / (pool - 1)
    said = "no shared header is long enough to pay"
    if even is not None:
        said = f"pays from a shared header of {even:.0f} tokens, this step's has {header}"
    row = {
        "prefix/on": float(on),
        "prefix/saved_engine_s": round(saved, 4),
        "prefix/break_even_tokens": even,
        "prefix/asked_tokens": PROMPTS * GROUP * (header + own),
        "prefix/off_tokens": off,
        "prefix/distinct_tokens": distinct,
        "prefix/header_tokens": header,
        "rollout/moved": 3 * (pool > 1),
        "rollout/moved_by_pages": 2 * (pool > 1),
        "rollout/move_fallbacks": int(step == 9 and pool > 1),
        "prefix/reason": f"{'on' if on else 'off'}: {2e-4 * off:.3g} engine-s of prefill without it, {2e-4 * off - saved:.3g} with; {said}",
    }
    more = {
        "prefix/computed_tokens": distinct,
        "prefix/loaded_tokens": pool * distinct,
        "prefix/lost": int(step == 8),
        "prefix/measured_saved_engine_s": round(0.9 * saved, 4),
    }
    return row | more if on else row


def _step(
    rng: np.random.Generator, step: int, now: float, pool: int, progress: float, total: int, ledger: _Ledger,
    previous_end: np.ndarray, folder: Path, samples_per_step: int, hostile: str,
) -> tuple[dict[str, Any], float]:  # fmt: skip
    began = now
    difficulty = rng.normal(0, 0.55, PROMPTS)
    lengths = np.exp(np.log(62 + 14 * progress) + difficulty[:, None] + rng.normal(0, 0.3, (PROMPTS, GROUP)))
    lengths = np.clip(lengths.round(), 3, 256).astype(int)
    chance = 1 / (1 + np.exp(1.6 * difficulty[:, None] + 0.6 - 2.1 * progress))
    rewards = (rng.uniform(size=lengths.shape) < chance).astype(float)
    failed = rng.uniform(size=lengths.shape) < (0.012 if step % 17 == 0 else 0.0)
    deviation = rewards.std(axis=1, keepdims=True)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1)
    lease_s = 0.004 * pool + (0.5 if rng.uniform() < 0.04 else 0.0)
    cold = step in (7, total // 2)
    at = now + lease_s
    loads = lengths.reshape(-1)[np.argsort(-lengths.reshape(-1))]
    ends = []
    for slot in range(pool):
        mine = loads[slot::pool]
        work_s = 0.0016 * mine[0] + 2.2e-5 * mine.sum() + abs(rng.normal(0, 0.01))
        if previous_end[slot] < at:
            ledger.add(slot, "rollout", f"rollout-{slot}", "parked", step, previous_end[slot], at)
        fetched = at + (1.9 if cold and slot == 0 else 0.0)
        ledger.add(slot, "rollout", f"rollout-{slot}-b" if cold and slot == 0 else f"rollout-{slot}", "start", step, at, fetched)
        ledger.add(slot, "rollout", f"rollout-{slot}", "transfer", step, fetched, fetched + 0.018)
        ends.append(fetched + 0.018 + work_s)
        ledger.add(slot, "rollout", f"rollout-{slot}", "work", step, fetched + 0.018, ends[-1])
    rollout_end = max(ends)
    for slot in range(pool):
        if slot:
            ledger.add(slot, "rollout", f"rollout-{slot}", "idle", step, ends[slot], min(rollout_end, ends[slot] + 0.03))
        else:
            ledger.add(slot, "rollout", f"rollout-{slot}", "idle", step, ends[slot], rollout_end)
        previous_end[slot] = rollout_end
    score_end = rollout_end + 0.03 + abs(rng.normal(0, 0.008))
    ledger.add(0, "score", "score-0", "work", step, rollout_end, score_end)
    learn_end = score_end + 0.19 + 9e-7 * lengths.sum() + abs(rng.normal(0, 0.015))
    for slot in range(2):
        if slot:
            ledger.add(slot, "learn", "learn-0", "idle", step, score_end, score_end + 0.012)
        ledger.add(slot, "learn", "learn-0", "work", step, score_end + 0.012 * slot, learn_end - 0.02)
        ledger.add(slot, "learn", "learn-0", "transfer", step, learn_end - 0.02, learn_end)
        previous_end[slot] = learn_end
    eval_s = 0.42 if step % 10 == 0 or step == total else 0.0
    for slot in range(2 if eval_s else 0):
        ledger.add(slot, "eval", f"rollout-{slot}", "work", step, learn_end, learn_end + eval_s * (1 - 0.2 * slot))
        ledger.add(slot, "eval", f"rollout-{slot}", "idle", step, learn_end + eval_s * (1 - 0.2 * slot), learn_end + eval_s)
        previous_end[slot] = learn_end + eval_s
    driver_s = 0.012 + abs(rng.normal(0, 0.003))
    now = learn_end + eval_s + driver_s
    mine = [entry for entry in ledger.rows if entry["step"] == step and entry["slots"]]
    full = sum(entry["seconds"] for entry in mine)
    busy = sum(entry["seconds"] for entry in mine if entry["activity"] == "work")
    idle = sum(entry["seconds"] for entry in mine if entry["activity"] == "idle")
    scored = rewards[~failed]
    error = 30 * np.exp(-step / 12) + 13 + rng.normal(0, 1.5)
    row: dict[str, Any] = {
        "step": step, "time_s": now, "step_s": now - began, "version": step, "epoch": step * PROMPTS // 4096,
        "reward/mean": scored.mean(), "reward/std": scored.std(), "reward/failed": int(failed.sum()),
        "length/mean": lengths.mean(), "length/p50": np.quantile(lengths, 0.5), "length/p90": np.quantile(lengths, 0.9),
        "length/p99": np.quantile(lengths, 0.99), "length/max": int(lengths.max()),
        "length/truncated_share": float((lengths >= 256).mean()),
        "forecast/mae_tokens": error,
        "forecast/spearman": None if step == 1 else 0.78 - 0.5 * np.exp(-step / 9) + rng.normal(0, 0.02),
        "forecast/bias_tokens": rng.normal(-2, 3), "pool/rollout_actors": pool,
        "plan/rollout_s": (rollout_end - at) * (1 + rng.normal(0, 0.07)),
        "plan/cost_slot_s": busy * (1 + rng.normal(0, 0.05)),
        "phase/lease_s": lease_s, "phase/rollout_s": rollout_end - began, "phase/score_s": score_end - rollout_end,
        "phase/learn_s": learn_end - score_end - 0.02, "phase/publish_s": 0.02, "phase/driver_s": driver_s,
        "phase/eval_s": eval_s,
        "cost/busy_slot_s": busy, "cost/full_slot_s": full, "cost/idle_share": idle / full,
        "cost/money": full * PRICE_PER_SLOT_S,
        "tokens/generated": int(lengths.sum()), "tokens/trained": int(lengths[~failed].sum()),
        "tokens/per_s": lengths.sum() / (now - began),
        "learn/loss": rng.normal(0, 0.01), "learn/policy_loss": rng.normal(0, 0.01), "learn/kl": 0.0,
        "learn/entropy": 0.9 - 0.35 * progress + rng.normal(0, 0.01), "learn/clip_share": 0.0,
        "learn/importance_mean": 1 + rng.normal(0, 2e-5), "learn/importance_capped_share": 0.0,
        "learn/mismatch_mean": 2.1e-5 * np.exp(rng.normal(0, 0.15)), "learn/mismatch_max": 4e-4 * np.exp(rng.normal(0, 0.4)),
        "learn/grad_norm": 0.55 - 0.2 * progress + abs(rng.normal(0, 0.05)), "learn/learning_rate": 1e-4,
        "learn/skipped": int(step == 23), "faults/replaced": int(cold and step != 7),
    }  # fmt: skip
    row = {key: round(float(x), 6) if isinstance(x, float) and abs(x) > 1e-3 else (float(x) if isinstance(x, float) else x)
           for key, x in row.items()}  # fmt: skip
    _write_samples(folder, step, lengths, rewards, failed, advantages, samples_per_step, hostile)
    return row, now


def _write_samples(
    folder: Path, step: int, lengths: np.ndarray, rewards: np.ndarray, failed: np.ndarray, advantages: np.ndarray,
    limit: int, hostile: str,
) -> None:  # fmt: skip
    lines = []
    for index, (prompt, sample) in enumerate(np.ndindex(lengths.shape)):
        if index >= limit and not failed[prompt, sample]:
            continue
        a, b = 17 * step % 90 + prompt, 3 + prompt
        answer = a * b
        right = rewards[prompt, sample] == 1
        work = " ".join(f"{a} x {i} = {a * i};" for i in range(1, max(2, lengths[prompt, sample] // 9)))
        lines.append(json.dumps({
            "step": step, "prompt_index": prompt, "sample": sample,
            "prompt": f"Multiply {a} by {b}, step by step." + (hostile if index == 1 else ""),
            "response": f"{work}\n#### {answer if right else answer + 1 + sample}" + (hostile if index == 1 else ""),
            "tokens": int(lengths[prompt, sample]), "finish": "length" if lengths[prompt, sample] >= 256 else "stop",
            "reward": None if failed[prompt, sample] else float(rewards[prompt, sample]),
            "error": "reward function took longer than 10 s" if failed[prompt, sample] else None,
            "advantage": None if failed[prompt, sample] else round(float(advantages[prompt, sample]), 4),
            "answer": str(answer),
        }) + "\n")  # fmt: skip
    (folder / "samples" / f"step_{step}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    print(write_synthetic_run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60))
