"""How many preemptible nodes there are, over time: recordings, and traces drawn like recorded ones.

`python -m benchmarks.common.availability [--seed N] [--hours H] FILE` draws one.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

SHIPPED = Path(__file__).with_name("spot_availability.csv")
MOST = 16  # nodes of a drawn trace
FULL_S, GONE_S, BETWEEN_S = 20 * 60.0, 25 * 60.0, 5 * 60.0  # median time at most, without any, and at a number in between
SPREAD = 1.7  # standard deviation of the logarithm of these times: a few are many times as long as the median
FALLS_TO_NONE = 0.45  # share of the falls that leave no node
HEAD = """\
# Nodes available, drawn by `python -m benchmarks.common.availability` with seed {seed}: seconds, nodes from then on.
# Parameters are such that traces have statistics like those of SkyPilot's recordings of 16 preemptible nodes (spot-traces, commit
# 221da1ab, us-east-2b and us-west-2): 41 to 46 % of the time all, 37 to 56 % none, 3.4 to 3.7 nodes lost an hour, 20 to 25 minutes
# with all nodes in the median. This is no recording. Nodes are lost more often in these hours; of the first 600 seeds it is one of
# the three whose shares of the time are nearest to the recordings', and the one with the most changes.
"""


@dataclass(frozen=True)
class Availability:
    """A step function: from `times_s[i]` on there are `nodes[i]` nodes. The first time is 0."""

    times_s: tuple[float, ...]
    nodes: tuple[int, ...]
    end_s: float

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read lines `seconds,nodes`. Of several lines of one second the last one counts. `#` begins a comment."""
        changes: dict[float, int] = {}
        for line in path.read_text().splitlines():
            if text := line.partition("#")[0].strip():
                seconds, nodes = text.split(",")
                changes[float(seconds)] = int(nodes)
        if len(changes) < 2 or min(changes) != 0 or min(changes.values()) < 0:
            raise ValueError(f"{path}: expected lines `seconds,nodes` from second 0 on, with an end")
        times = sorted(changes)
        return cls(tuple(times[:-1]), tuple(changes[time] for time in times[:-1]), times[-1])

    @classmethod
    def draw(cls, seed: int, hours: float) -> Self:
        rng, at_s, nodes = np.random.default_rng(seed), 0.0, MOST
        times, counts = list[float](), list[int]()
        while at_s < 3600 * hours:
            times.append(round(at_s))
            counts.append(nodes)
            median_s = FULL_S if nodes == MOST else BETWEEN_S if nodes else GONE_S
            at_s += max(1.0, rng.lognormal(np.log(median_s), SPREAD))
            if nodes == MOST:
                nodes = 0 if rng.random() < FALLS_TO_NONE else int(rng.integers(1, MOST))
            else:
                rises = nodes == 0 or rng.random() < 0.5
                nodes = (MOST if rng.random() < 0.7 else int(rng.integers(nodes, MOST)) + 1) if rises else int(rng.integers(0, nodes))
        return cls(tuple(times), tuple(counts), 3600 * hours)

    def write(self, path: Path, head: str) -> None:
        rows = [*zip(self.times_s, self.nodes, strict=True), (self.end_s, self.nodes[-1])]
        path.write_text(head + "".join(f"{seconds:.0f},{nodes}\n" for seconds, nodes in rows))

    @property
    def most(self) -> int:
        return max(self.nodes)

    def at(self, seconds: float) -> int:
        """Return the nodes at a time. After its end the trace begins again."""
        return self.nodes[bisect_right(self.times_s, seconds % self.end_s) - 1]

    def scaled(self, most: int) -> Availability:
        """Return the same with at most `most` nodes, each of which stands for several."""
        nodes = tuple(round(count * most / self.most) for count in self.nodes)
        return Availability(self.times_s, nodes, self.end_s)

    def statistics(self) -> dict[str, float]:
        """Return mean and shares of the time, and nodes lost per hour."""
        spans, nodes = np.diff([*self.times_s, self.end_s]), np.array(self.nodes)
        lost = np.maximum(0, -np.diff(nodes)).sum()
        return {
            "hours": self.end_s / 3600,
            "mean_share": float(spans @ nodes / self.end_s / self.most),
            "share_at_most": float(spans[nodes == self.most].sum() / self.end_s),
            "share_at_0": float(spans[nodes == 0].sum() / self.end_s),
            "lost_per_hour": float(lost / self.end_s * 3600),
            "median_at_most_s": float(np.median(spans[nodes == self.most])),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float, default=6.0)
    options = parser.parse_args()
    trace = Availability.draw(options.seed, options.hours)
    trace.write(options.file, HEAD.format(seed=options.seed))
    print(", ".join(f"{name} {value:.3g}" for name, value in trace.statistics().items()))


if __name__ == "__main__":
    main()
