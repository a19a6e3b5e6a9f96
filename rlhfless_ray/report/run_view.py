"""Show a run folder in a notebook."""

from __future__ import annotations

from html import escape

from rlhfless_ray.report import summary
from rlhfless_ray.report.charts import series
from rlhfless_ray.report.cost_charts import by_kind
from rlhfless_ray.report.inline import curves, ledger_html
from rlhfless_ray.report.read_run import RunRecord

SHOWN = (  # metrics of a run, one dict per figure
    {"reward/mean": "reward", "eval/accuracy_sampled": "held out"},
    {"learn/loss": "loss", "eval/loss": "held-out loss"},
    {"step_s": "step (s)", "cost/full_slot_s": "cost (slot-s)"},
)


class RunView(RunRecord):
    """A run folder's status, metrics, ledger and samples, as they are now. The run may go on meanwhile.

    A notebook shows its status, key figures, curves and costs.

    Examples:
        >>> from rlhfless_ray import RunView
        >>> RunView.read("runs/none").problems[0]
        'status.json is missing, so how the run ended is unknown.'
    """

    def _repr_html_(self) -> str:
        status = self.status
        head = f"<b>{escape(self.folder.name)}</b>: {status.get('status', 'unknown')}, step {status.get('steps_done', '?')} of "
        reason = status.get("reason") if status else " ".join(self.problems)
        parts = [f"<p>{head}{status.get('steps_total', '?')}{escape(f': {reason}' if reason else '')}</p>"]
        cards = [f"<td><small>{escape(card['label'])}</small><br>{escape(str(card['value']))}</td>" for card in summary.cards(self)]
        parts.append(f"<table><tr>{''.join(cards)}</tr></table>")
        parts += [curves({label: series(self.metrics, key) for key, label in names.items()}).text for names in SHOWN]
        return "".join([*parts, ledger_html(by_kind(self.ledger))])
