"""Ranks in processes of their own that change their layout between updates: python resized_ranks.py FOLDER.

FOLDER/cases has cases, each a dict: `settings` and `files` of a learner, `batches` to update with, `layouts`: {number of updates done:
layout from then on}, `kills`: numbers of updates after which all processes are ended, and continue from the state that was kept before.
FOLDER/found gets for each case the weights after the last update, and (bytes fetched, least bytes) of each change.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhfless_ray.learn.process_group import free_port
from rlhfless_ray.learn.rank_actors import LearnerActor
from rlhfless_ray.learn.rank_settings import RankLayout
from rlhfless_ray.weights.model_folder import read_content, write_folder
from rlhfless_ray.weights.tensor_file import Files, write_file
from rlhfless_ray.weights.tensor_slice import HeldSlices

CONTEXT = multiprocessing.get_context("fork")


def work(pipe: Any) -> None:
    """Answer calls of an actor's methods."""
    import torch

    torch.set_num_threads(1)
    actor = LearnerActor()
    while (call := pipe.recv()) is not None:
        method, arguments = call
        try:
            if method == "keep":
                whole, parts, _ = actor.keep()
                pipe.send({name: bytes(content) for name, content in {**whole, **parts}.items()})
            elif method == "weights":
                pipe.send({piece: np.array(values) for piece, values in actor.weights()[0].items()})
            else:
                pipe.send(getattr(actor, method)(*arguments))
        except BaseException:
            pipe.send(traceback.format_exc())


class Process:
    def __init__(self) -> None:
        self.pipe, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work, args=(other,), daemon=True)
        self.process.start()

    def ask(self, method: str, *arguments: object) -> Callable[[], Any]:
        self.pipe.send((method, arguments))

        def answer() -> Any:
            assert self.pipe.poll(300), f"{method} did not end"
            found = self.pipe.recv()
            assert not (isinstance(found, str) and "Traceback" in found), found
            return found

        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Group:
    """What a worker group does, without Ray: states are files in a folder."""

    def __init__(self, settings: Any, files: Files) -> None:
        self.settings, self.ranks = settings, list[Process]()
        self.folder = Path(tempfile.mkdtemp())
        model = self.folder / "policy"
        model.mkdir()
        write_folder(model, files)
        self.model = self.found(model)
        self.states = 0

    @staticmethod
    def found(folder: Path) -> tuple[str, dict[str, int], str]:
        return str(folder), {path.name: len(read_content(path)) for path in folder.iterdir()}, ""

    def all(self, method: str, *arguments: object) -> list[Any]:
        return [answer() for answer in [rank.ask(method, *arguments) for rank in self.ranks]]

    def keep(self) -> tuple[str, dict[str, int], str]:
        folder = self.folder / f"state{self.states}"
        folder.mkdir()
        self.states += 1
        for files in self.all("keep"):
            for name, content in files.items():
                write_file(folder / name, content)
        return self.found(folder)

    def build(self, layout: RankLayout, state: Any) -> tuple[int, int]:
        for rank in self.ranks[layout.ranks :]:
            rank.end()
        self.ranks = self.ranks[: layout.ranks] + [Process() for _ in range(layout.ranks - len(self.ranks))]
        place = "127.0.0.1", free_port()
        asked = [
            rank.ask("build", self.model, place, 1, state, self.settings.placed(number, layout)) for number, rank in enumerate(self.ranks)
        ]
        replies = [answer() for answer in asked]
        self.cutter = replies[0]["cutter"]
        fetched, least = np.array([reply["fetched"] for reply in replies]).sum(0).tolist()
        return fetched, least

    def update(self, batch: Any) -> None:
        shares = self.cutter.of_update(batch)
        asked = [rank.ask("update", shares[n * len(shares) // len(self.ranks)], 1) for n, rank in enumerate(self.ranks)]
        stats = [answer()[0] for answer in asked]
        self.cutter = replace(self.cutter, optimizer_steps=self.cutter.optimizer_steps + stats[0].applied)

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
        self.ranks = []


def run(case: dict[str, Any]) -> dict[str, Any]:
    group, moved, state, layout = Group(case["settings"], case["files"]), [], None, None
    for number, batch in enumerate(case["batches"]):
        if number in case.get("kills", ()):
            group.end()
            group.build(layout, state)
        if number in case["layouts"]:
            layout = case["layouts"][number]
            if group.ranks:
                state = group.keep()
            moved.append(group.build(layout, state))
        group.update(batch)
        state = group.keep() if number + 1 in case.get("kills", ()) else state
    weights = dict(HeldSlices.of(*group.all("weights")))
    average = {name: bytes(content) for files in group.all("keep") for name, content in files.items() if name.startswith("ema")}
    group.end()
    return {"weights": weights, "moved": moved, "average": average}


if __name__ == "__main__":
    import deepspeed  # noqa: F401 - once, and then each rank is forked

    cases = pickle.loads(Path(sys.argv[1], "cases").read_bytes())
    Path(sys.argv[1], "found").write_bytes(pickle.dumps({name: run(case) for name, case in cases.items()}))
