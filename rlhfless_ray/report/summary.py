"""Texts and figures of the report: cards, warnings and selected samples. Pure functions of a RunRecord."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from datetime import datetime

from rlhfless_ray.report.charts import Row
from rlhfless_ray.report.cost_charts import by_kind
from rlhfless_ray.report.formatting import are_shares, duration, finite, finite_values, money, number, percent, short, slot_time, total
from rlhfless_ray.report.read_run import RunRecord

MAX_TEXT_CHARS = 1600  # characters of a prompt or response in the report
SAMPLED_STEPS = 5  # steps whose samples the report shows
MAX_TRUNCATED_SHARE = 0.1  # a larger share of responses cut at the limit causes a warning


def header(record: RunRecord) -> Row:
    """Return the run's name, status and details."""
    status = record.status
    state = str(status.get("status") or "unknown")
    sentences = {
        "done": "The run finished.",
        "stopped": "The run was stopped; it can be resumed.",
        "failed": "The run failed.",
        "running": "The run had not ended when this report was written: it is still working, or it crashed.",
    }
    sentence = sentences.get(state, "How the run ended is unknown.")
    if status.get("reason"):
        sentence += f" {str(status['reason']).strip()}"
        sentence += "" if sentence.endswith((".", "!", "?")) else "."
    details = [("machine", status.get("machine")), ("started", _moment(status.get("started_at")))]
    if resumed := status.get("resumed_at"):
        details.append(("resumed", f"{_moment(resumed[-1])}{f' ({len(resumed)} times)' if len(resumed) > 1 else ''}"))
    for change in status.get("recipe_changes") or []:
        details.append((f"recipe changed after step {change.get('after_step')}", "; ".join(map(str, change.get("changes") or []))))
    details.append(("ended", _moment(status.get("ended_at"))))
    details.append(("versions", ", ".join(f"{name} {version}" for name, version in (status.get("versions") or {}).items())))
    return {"name": _run_name(record), "state": state, "sentence": sentence, "details": [(k, str(v)) for k, v in details if v]}


def cards(record: RunRecord) -> list[Row]:
    """Return key figures with label, value and explanation, without those that the run lacks."""
    steps, out = record.steps, []
    points = {key: _held_out(record, key) for key in ("sampled", "greedy")}
    shares = are_shares(value for points_of_key in points.values() for _, value in points_of_key)
    for key, points_of_key in points.items():
        if not points_of_key:
            continue
        label, shown = f"{'Accuracy' if shares else 'Held-out reward'}, {key}", percent if shares else number
        (first_step, first), (last_step, last) = points_of_key[0], points_of_key[-1]
        if len(points_of_key) == 1:
            out.append(_card(label, shown(last), f"at step {last_step}"))
        else:
            gain = f"{100 * (last - first):+.1f} points" if shares else f"{'+' if last >= first else ''}{number(last - first)}"
            under = f"{gain}, step {first_step} to {last_step}"
            out.append(_card(label, f"{shown(first)} → {shown(last)}", under, "good" if last >= first else "bad"))
    out += _loss_cards(record) if record.is_supervised else _reward_card(steps)
    last_row: Row = record.metrics[-1] if record.metrics else {}
    done = finite(record.status.get("steps_done"))
    done = done if done is not None else float(last_row.get("step", 0)) if last_row else None
    if done is not None:
        whole = finite(record.status.get("steps_total"))
        out.append(_card("Steps", f"{number(done, 9)}" + (f" of {number(whole, 9)}" if whole else ""), _step_time(steps)))
    ends = [row["to_s"] for row in record.ledger] + [finite(last_row.get("time_s")) or 0.0]
    if max(ends) > 0:
        out.append(_card("Wall time", duration(max(ends)), "from the start to the last record"))
    out += _cost_cards(record)
    generated = total(steps, "tokens/generated")
    speeds = finite_values(steps, "tokens/per_s")
    if speeds:
        under = (
            "of sequences, median of an update"
            if record.is_supervised
            else f"median of a whole step; {short(generated)} in all"
            if generated
            else "median of a whole step"
        )
        out.append(_card("Tokens per second", short(statistics.median(speeds)), under))
    return out


def _held_out(record: RunRecord, key: str) -> list[tuple[int, float]]:
    """Return (step, mean reward) of the evaluations."""
    return [(row["step"], value) for row in record.metrics if (value := finite(row.get(f"eval/accuracy_{key}"))) is not None]


def _loss_cards(record: RunRecord) -> list[Row]:
    """Return cards with the loss and the accuracy of a supervised stage, of held-out rows if there are any."""
    cards = []
    for key, label, shown in (("loss", "Loss", number), ("accuracy", "Accuracy", percent)):
        for source, what in (("eval", "held out"), ("learn", "of training")):
            points = [(row["step"], x) for row in record.metrics if (x := finite(row.get(f"{source}/{key}"))) is not None]
            if points:
                (first, start), (last, end) = points[0], points[-1]
                under = f"{what}, step {first} to {last}" if len(points) > 1 else f"{what}, at step {last}"
                cards.append(_card(label, f"{shown(start)} → {shown(end)}" if len(points) > 1 else shown(end), under))
                break
    return cards


def _reward_card(steps: Sequence[Row]) -> list[Row]:
    values = finite_values(steps, "reward/mean")
    if not values:
        return []
    few = max(1, min(10, len(values) // 4))
    if len(values) < 4:
        return [_card("Reward", number(values[-1]), "mean of the last step")]
    first, last = statistics.mean(values[:few]), statistics.mean(values[-few:])
    under = "first and last step" if few == 1 else f"means of the first and last {few} steps"
    return [_card("Reward", f"{number(first)} → {number(last)}", under)]


def _cost_cards(record: RunRecord) -> list[Row]:
    """Return cost cards from the ledger, which includes the start-up before the first step."""
    out = []
    table = by_kind(record.ledger)
    if full := sum(sum(cells.values()) for cells in table.values()):
        busy, idle = (sum(cells.get(activity, 0.0) for cells in table.values()) for activity in ("work", "idle"))
        out.append(_card("Busy cost", slot_time(busy), "slots while they worked"))
        out.append(_card("Full cost", slot_time(full), f"every leased second, {percent(busy / full, 0)} busy"))
        out.append(_card("Idle share", percent(idle / full), "of the full cost"))
    if (spent := total(record.ledger, "money")) is not None:
        out.append(_card("Money", money(spent), _price(record)))
    if any(runs > 1 for runs in finite_values(record.steps, "shared/runs")):  # the others may have ended before this one
        lent, borrowed = (_counted_on(finite_values(record.steps, f"shared/{name}_slot_s")) for name in ("lent", "borrowed"))
        under = "slots of this run's share that other runs of the cluster used, and slots of theirs"
        out.append(_card("Lent / borrowed", f"{slot_time(lent)} / {slot_time(borrowed)}", under))
    return out


def _counted_on(values: Sequence[float]) -> float:
    """Return the end of a count that began again from 0 whenever the run was resumed."""
    return sum(one for one, after in itertools.pairwise([*values, 0.0]) if after < one)


def warnings(record: RunRecord) -> list[Row]:
    """Return warnings about the run with title and sentence, the most severe first."""
    steps, out = record.steps, []
    if record.status.get("status") == "failed":
        out.append({"title": "The run failed", "text": str(record.status.get("reason") or "No reason was recorded."), "grave": True})
    count, where = _counted(steps, "reward/failed")
    if count:
        text = f"{number(count, 9)} {_plural('sample', count)} in {where} could not be scored and were left out of the update."
        out.append({"title": "Failed rewards", "text": text})
    count, where = _counted(steps, "learn/skipped")
    if count:
        text = f"{number(count, 9)} optimizer {_plural('step', count)} skipped in {where}: loss or gradient was not finite."
        out.append({"title": "Skipped updates", "text": text})
    apart = [row for row in steps if finite(row.get("learn/mismatch_warning"))]
    if apart:
        worst = max(finite_values(apart, "learn/mismatch_mean"), default=None)
        size = "is not finite" if worst is None else f"is up to {number(worst)} nats"
        limit = number(finite(apart[-1].get("learn/mismatch_tolerance")))
        text = f"In {_steps(apart)} the mean difference of their log-probabilities {size}, above the tolerance of {limit}."
        out.append({"title": "Engines and learner disagree", "text": text})
    count, where = _counted(steps, "faults/replaced")
    if count:
        what = "1 instance died and was" if count == 1 else f"{number(count, 9)} instances died and were"
        out.append({"title": "Replaced instances", "text": f"{what} replaced in {where}."})
    unplanned = [row for row in steps if row.get("plan/failed") or row.get("plan/trouble")]
    if unplanned:
        first = unplanned[0]
        failure = _clip(first.get("plan/trouble") or first.get("pool/reason"), 400)
        text = f"In {_steps(unplanned)}; the run continued with its last plan. The first failure: {failure}."
        out.append({"title": "Planning failed", "text": text})
    again = [row for row in record.ledger if row.get("repeated") and finite(row.get("slots"))]
    if again:
        spent = sum(row["slots"] * row["seconds"] for row in again)
        text = f"{slot_time(spent)} of the full cost was spent on steps that were interrupted and repeated."
        out.append({"title": "Repeated steps", "text": text})
    broken: dict[str, list[Row]] = {}
    for row in record.metrics:
        for key in row.get("nonfinite") or ():
            broken.setdefault(str(key), []).append(row)
    if broken:
        parts = [f"{key} in {_steps(rows)}" for key, rows in sorted(broken.items())]
        out.append({"title": "Values that were not finite", "text": f"Written as null: {'; '.join(parts)}."})
    cut = finite_values(steps[-10:], "length/truncated_share")
    if cut and statistics.mean(cut) > MAX_TRUNCATED_SHARE:
        text = f"{percent(statistics.mean(cut))} of the responses of the last {len(cut)} steps ended at rollout.max_tokens."
        out.append({"title": "Responses are cut", "text": text})
    return out


def _counted(steps: Sequence[Row], key: str) -> tuple[float, str]:
    """Return the sum of a count over the steps, and the steps where it is not zero."""
    rows = [row for row in steps if finite(row.get(key))]
    return total(rows, key) or 0, _steps(rows)


def length_groups(record: RunRecord) -> list[tuple[str, list[float]]]:
    """Return lengths of the stored samples of the first and last steps, for the histogram."""
    steps = [step for step in record.samples if step >= 1]
    if len(steps) < 4:
        values = _lengths(record, steps)
        return [(f"{_plural('step', len(steps))} {_span(steps)}", values)] if values else []
    few = max(1, min(5, len(steps) // 4))
    first, last = steps[:few], steps[-few:]
    return [
        (f"{_plural('step', few)} {_span(first)}", _lengths(record, first)),
        (f"{_plural('step', few)} {_span(last)}", _lengths(record, last)),
    ]


def sample_picks(record: RunRecord) -> list[Row]:
    """Return the best, worst and failed samples of steps spread over the run, and of up to two with failed rewards."""
    known = [step for step in record.samples if step >= 1] or list(record.samples)
    if not known:
        return []
    chosen = {known[round(i * (len(known) - 1) / (SAMPLED_STEPS - 1))] for i in range(SAMPLED_STEPS)}
    troubled = [row["step"] for row in record.steps if finite(row.get("reward/failed")) and row["step"] in record.samples]
    chosen |= {*troubled[:1], *troubled[-1:]}
    out = []
    for step in sorted(chosen):
        rows = record.read_samples(step)
        scored = sorted((row for row in rows if finite(row.get("reward")) is not None), key=lambda row: -float(row["reward"]))
        failed = [row for row in rows if row.get("error") or finite(row.get("reward")) is None]
        best = scored[:2]
        worst = [row for row in scored[::-1][:2] if row not in best]
        picks = [("best", row) for row in best] + [("worst", row) for row in worst] + [("failed", row) for row in failed[:2]]
        if picks:
            mean = statistics.mean(float(row["reward"]) for row in scored) if scored else None
            out.append({
                "step": step, "stored": len(rows), "mean": number(mean), "failed": len(failed),
                "rows": [_sample(label, row) for label, row in picks],
            })  # fmt: skip
    return out


def _sample(label: str, row: Row) -> Row:
    return {
        "label": label, "prompt": _clip(row.get("prompt")), "response": _clip(row.get("response")),
        "reward": number(row.get("reward")), "advantage": number(row.get("advantage")),
        "tokens": number(row.get("tokens"), 9), "cut": row.get("finish") == "length",
        "answer": _clip(row.get("answer"), 200), "error": _clip(row.get("error"), 400),
    }  # fmt: skip


def _clip(text: object, limit: int = MAX_TEXT_CHARS) -> str:
    text = "" if text is None else str(text)
    return text if len(text) <= limit else f"{text[: limit // 2]}\n[… {len(text) - limit:,} characters …]\n{text[-limit // 2 :]}"


def _card(label: str, value: str, under: str = "", tone: str = "") -> Row:
    return {"label": label, "value": value, "under": under, "tone": tone}


def _lengths(record: RunRecord, steps: Sequence[int]) -> list[float]:
    lengths = (finite(row.get("tokens")) for step in steps for row in record.read_samples(step))
    return [x for x in lengths if x is not None and x >= 0]


def _step_time(steps: Sequence[Row]) -> str:
    times = finite_values(steps, "step_s")
    return f"{duration(statistics.median(times))} each (median)" if times else ""


def _price(record: RunRecord) -> str:
    if not (price := record.settings.get("price")):
        return ""
    kinds = {str(row.get("resource")) for row in record.ledger} or {"cpu", "gpu"}
    prices = {kind: finite(price.get(f"{kind}_slot_per_hour")) for kind in sorted(kinds)}
    parked = total([row for row in record.ledger if row.get("activity") == "parked"], "money")
    text = "at " + ", ".join(f"{number(x)} per {kind.upper()} slot-hour" for kind, x in prices.items() if x is not None)
    return f"{text}; {money(parked)} of it for the memory of parked processes" if parked else text


def _run_name(record: RunRecord) -> str:
    return str((record.settings.get("run") or {}).get("name") or record.folder.resolve().name)


def _moment(value: object) -> str | None:
    try:
        return datetime.fromisoformat(str(value)).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return None


def _steps(rows: Sequence[Row]) -> str:
    steps = [row["step"] for row in rows]
    shown = ", ".join(str(step) for step in steps[:8])
    return f"{_plural('step', len(steps))} {shown}" + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")


def _span(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} – {steps[-1]}"


def _plural(word: str, count: float) -> str:
    return word if count == 1 else f"{word}s"
