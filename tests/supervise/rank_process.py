"""One rank of the cases of `test_supervised_rank.py`: python rank_process.py FOLDER RANK RANKS PORT."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import torch

from rlhfless_ray.learn import packing
from rlhfless_ray.supervise.supervised_rank import SupervisedRank
from rlhfless_ray.weights.load_policy import quiet_libraries


def main(folder: Path, rank: int, ranks: int, port: int) -> None:
    quiet_libraries()
    torch.set_num_threads(1)
    cases = pickle.loads((folder / "cases.pickle").read_bytes())
    results, call_work = {}, packing.CALL_WORK
    for name, (recipe, rows, steps) in cases.items():
        packing.CALL_WORK = -(10**12) if name.endswith(" packed") else call_work  # these policies are too narrow for it to save time
        examples, teacher = rows.train, folder / "teacher" if recipe.teacher.path else None
        work = SupervisedRank(recipe, len(steps), rank, ranks)
        work.trainer.join_process_group(("127.0.0.1", port))
        references = work.open(folder / "model", teacher, [examples], None, None, rows.reward_tokens)
        held = work.evaluate(examples, data=0)
        found = [work.step(examples, rows) for rows in steps]
        weights = {k: v.clone() for k, v in work.trainer.held.merged(dict.fromkeys(work.trainer.held.sizes(), 0)).items()}
        results[name] = {"references": references, "held": held, "steps": found, "weights": {k: np.asarray(v) for k, v in weights.items()}}
        if recipe.task == "rm":
            work.evaluate(examples, data=0)
            results[name]["config"] = work.config()
    if rank == 0:
        (folder / f"results_{ranks}.pickle").write_bytes(pickle.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
