"""Draw the pictures of docs/architecture.md and README.md that need no run: `python -m docs.diagrams` writes them into docs/images/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STYLE = """
svg{--page:#fff;--box:#f5f6f8;--edge:#8b95a5;--title:#1c2430;--text:#4b5563;--blue:#eaf1fb;--green:#e9f5ef;--orange:#fcf1e4}
@media (prefers-color-scheme:dark){
svg{--page:#1e2129;--box:#2a2f3a;--edge:#7d8796;--title:#eef1f5;--text:#bcc4d0;--blue:#22344f;--green:#1f3d32;--orange:#473420}}
.page{fill:var(--page)} .box{fill:var(--box);stroke:var(--edge);stroke-width:1.4} .blue{fill:var(--blue)} .green{fill:var(--green)}
.orange{fill:var(--orange)} .title{font-weight:600;fill:var(--title)} .text{fill:var(--text);font-size:12.5px}
.code{fill:var(--text);font-size:12px;font-family:ui-monospace,Consolas,"DejaVu Sans Mono",monospace}
.line{stroke:var(--text);stroke-width:1.5;fill:none;marker-end:url(#head)} .dashed,.idle{stroke-dasharray:5 4}
.idle{fill:none} marker path{fill:var(--text)}
"""
HEAD = '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
HEAD += '<path d="M0 0L10 5L0 10z"/></marker>'


class Picture:
    def __init__(self, width: int, height: int, label: str) -> None:
        self.width, self.height, self.label, self.parts = width, height, label, list[str]()

    def text(self, x: float, y: float, content: str, kind: str = "text", anchor: str = "middle") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(content)}</text>')

    def box(self, x: float, y: float, width: float, height: float, title: str, lines: Sequence[str] = (), color: str = "") -> None:
        """Draw a box with a title and lines below it. A line in backquotes is code."""
        self.parts.append(f'<rect class="box {color}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>')
        top = y + (height - 18 * len(lines)) / 2 + 5
        self.text(x + width / 2, top, title, "title")
        for number, line in enumerate(lines, 1):
            is_code = line.startswith("`")
            self.text(x + width / 2, top + 18 * number, line.strip("`"), "code" if is_code else "text")

    def arrow(self, path: str, *, dashed: bool = False) -> None:
        self.parts.append(f'<path class="line{" dashed" if dashed else ""}" d="{path}"/>')

    def svg(self) -> str:
        start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" font-size="14" role="img" '
        start += f'font-family="Segoe UI, Helvetica, Arial, sans-serif" aria-label="{escape(self.label)}">'
        page = f'<rect class="page" width="{self.width}" height="{self.height}"/>'
        return "\n".join([start, f"<style>{STYLE}</style>", f"<defs>{HEAD}</defs>", page, *self.parts, "</svg>", ""])


def session() -> Picture:
    """Draw the groups of a session above the states of a step."""
    label = "Groups of responses enter by admission, are in flight on engines, and are taken by a step. A step is planned, taken, scored, "
    picture = Picture(
        920, 420, label + "learning, updating, updated, published and closed. The next step is admitted while the learner works."
    )
    picture.text(20, 30, "Groups of responses: in the session from the start to the end of a run", "title", "start")
    picture.box(20, 62, 190, 84, "rows", ["prompts in shuffled order,", "or as the user picks them"])
    picture.box(345, 62, 250, 84, "in flight", ["engines generate, the driver", "keeps each token it has got"], "blue")
    picture.box(730, 62, 170, 84, "the step's batch", ["complete groups,", "trained in this step"], "green")
    picture.arrow("M210 104H343")
    picture.text(277, 78, "Admission:")
    picture.text(277, 95, "lag, oversample")
    picture.text(277, 122, "session.admit", "code")
    picture.arrow("M595 104H728")
    picture.text(662, 78, "enough groups")
    picture.text(662, 95, "are complete")
    picture.text(662, 122, "session.take", "code")
    picture.arrow("M560 146V182H500V148")
    picture.text(575, 172, "Boundary: the rest goes on, or begins again,", anchor="start")
    picture.text(575, 190, "in the next step", anchor="start")
    picture.arrow("M385 148V182H445V146")
    picture.text(370, 172, "WeightSwitch: under new weights", anchor="end")
    picture.text(370, 190, "session.switch", "code", "end")

    picture.text(20, 236, "One step: each verb of the loop checks the state that it finds", "title", "start")
    states = [
        ("planned", "session.admit", ""),
        ("taken", "session.take", "blue"),
        ("scored", "updates.score", "green"),
        ("learning", "updates.phase", "orange"),
        ("updating", "updates.start", "orange"),
        ("updated", "(learner done)", "orange"),
        ("published", "updates.publish", "orange"),
        ("closed", "records.close", ""),
    ]
    for number, (name, verb, color) in enumerate(states):
        x = 10 + 114 * number
        picture.box(x, 258, 100, 56, name, color=color)
        picture.text(x + 50, 334, verb, "code")
        if number:
            picture.arrow(f"M{x - 14} 286H{x - 1}")
    picture.arrow("M516 342V372H60V342", dashed=True)
    picture.text(
        20, 394, "while the learner works, session.admit plans the next step, and under a lag generates its responses", anchor="start"
    )
    return picture


def protocols() -> Picture:
    """Draw the driver, the four protocols and their backends."""
    label = "The driver sends requests to engines and batches to trainers. Trainers publish weights in a channel, and engines fetch their "
    picture = Picture(920, 470, label + "slices. A source of slots grants leases to both.")
    picture.box(
        20, 20, 880, 62, "driver", ["session: groups in flight · autoscaler: plans · updates: scores, advantages, batches · ledger"]
    )
    picture.box(
        20,
        150,
        250,
        112,
        "Engine",
        ["generates a stream of tokens", "`generate · load · park`", "backends: exact · stock · replayed"],
        "blue",
    )
    picture.box(
        335,
        150,
        250,
        112,
        "WeightChannel",
        ["each reader gets its slices", "`publish · check · fetch`", "backends: object store · gloo"],
        "green",
    )
    picture.box(
        650, 150, 250, 112, "Trainer", ["one rank of a model in training", "`passes · accumulate · update`", "backend: DeepSpeed"], "orange"
    )
    backends = "backends: PrivateSlots, of a run alone · PoolClient, of all runs of a cluster"
    picture.box(20, 350, 880, 100, "SlotSource", ["grants slots, several of one node together", "`ask · wait · release`", backends])
    picture.arrow("M95 82V148")
    picture.text(88, 120, "requests,", anchor="end")
    picture.text(88, 136, "cuts", anchor="end")
    picture.arrow("M195 150V84")
    picture.text(203, 120, "tokens, versions,", anchor="start")
    picture.text(203, 136, "statistics", anchor="start")
    picture.arrow("M725 82V148")
    picture.text(718, 120, "shares of a batch", anchor="end")
    picture.arrow("M825 150V84")
    picture.text(833, 120, "statistics,", anchor="start")
    picture.text(833, 136, "snapshots", anchor="start")
    picture.arrow("M650 206H587")
    picture.text(618, 196, "slices")
    picture.arrow("M335 206H272")
    picture.text(303, 196, "slices")
    picture.arrow("M145 350V264", dashed=True)
    picture.text(155, 310, "leases", anchor="start")
    picture.arrow("M775 350V264", dashed=True)
    picture.text(785, 310, "leases", anchor="start")
    picture.text(460, 300, "A lease is handed over from one phase to the next.")
    picture.text(460, 318, "One that no phase needs goes back.")
    return picture


def gain() -> Picture:
    """Draw who held two cores, for two runs with a core each and on one pool, from the measured ends of both (shared_pool_2.json)."""
    ways = json.loads((RESULTS / "shared_pool_2.json").read_text(encoding="utf-8"))["ways"]
    picture = Picture(
        920,
        300,
        "Two runs with a core each are done after 124 s, and one core idles for most of it. On one pool both are done after 101 s.",
    )
    left, per_s, height = 120, 6.2, 40
    for top, (way, title) in zip((44, 180), (("parts", "A core each"), ("shared", "One pool of two cores")), strict=True):
        runs, end_s = ways[way]["runs"], ways[way]["end_s"]
        held = sum(run["held_slot_s"] for run in runs) / (2 * end_s)
        picture.text(20, top - 16, f"{title}: both runs done after {end_s:.0f} s, {held:.0%} of the core-seconds used", "title", "start")
        short_s = runs[1]["wall_s"]
        for row, name in enumerate(("core 0", "core 1")):
            picture.text(left - 14, top + row * 46 + 25, name, anchor="end")
        picture.box(left, top, per_s * end_s, height, "run 1", color="blue")
        picture.box(left, top + 46, per_s * short_s, height, "run 2", color="orange")
        rest = ("nobody, but paid for", "idle") if way == "parts" else ("run 1", "blue")
        picture.box(left + per_s * short_s, top + 46, per_s * (end_s - short_s), height, rest[0], color=rest[1])
    return picture


PICTURES = {"session": session, "protocols": protocols, "gain": gain}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
