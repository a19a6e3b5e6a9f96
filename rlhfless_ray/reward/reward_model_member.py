"""A further member of a divided reward model: a process with its slices, which takes part in every pass.

`python -m rlhfless_ray.reward.reward_model_member` starts one, whose standard input is the connection.
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle

from rlhfless_ray.local.member_process import connect


class RewardModelMember:
    def __init__(self) -> None:
        self.model: Any = None

    def load(self, *model: Any, divide: tuple[object, ...]) -> None:
        """`model`: arguments of `ScalarModel.load`."""
        from rlhfless_ray.reward.scalar_model import ScalarModel

        self.model = ScalarModel.load(*model)
        self.model.divide(*divide)

    def values(self, sequences: list[Any]) -> None:
        self.model.values(sequences)

    def move(self, device: str) -> None:
        self.model.move(device)


def main() -> None:
    """Carry out calls. An exception ends the process, and with it the actor's: others wait in a collective operation then."""
    reader, writer = connect()
    import torch

    torch.set_num_threads(1)
    member = RewardModelMember()
    while True:
        method, args, kwargs = pickle.load(reader)
        getattr(member, method)(*args, **kwargs)
        cloudpickle.dump(None, writer)
        writer.flush()


if __name__ == "__main__":
    main()
