"""`python -m rlhfless_ray.cli.batch_inference`: generate responses or rewards with the flags of OpenRLHF's launcher of this name."""

from __future__ import annotations

from rlhfless_ray.cli.supervised_launcher import start
from rlhfless_ray.compat.openrlhf.batch_inference import run_batch
from rlhfless_ray.compat.openrlhf.explain_report import announce
from rlhfless_ray.compat.openrlhf.inference import translate_inference
from rlhfless_ray.compat.openrlhf.inference_table import BATCH
from rlhfless_ray.compat.openrlhf.resources import fit_width


def _run(tokens: list[str]) -> None:
    translation = translate_inference(BATCH, tokens)
    if narrower := fit_width(translation.settings):
        translation.notes.append(narrower)
    announce(translation)
    run_batch(translation)


if __name__ == "__main__":
    start(BATCH, _run)
