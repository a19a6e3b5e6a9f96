"""Simulated: 7B and 70B on H100s, memory and seconds by layout: `python -m benchmarks.layouts`.

The step is `fixed`: all phases one after the other on all devices. An update gives every engine the new weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.table import Table

from benchmarks.common.results import make_console, save
from placement.simulate import PhaseTimes, parse, simulate

MODELS = {"qwen2.5-7b": (8, 16), "llama-2-70b": (32, 64)}  # and how many devices
NODE = 8


@dataclass(frozen=True)
class LayoutRow:
    """One layout. update_bytes: what all engines receive together. The two seconds: on the learner's devices, and on others."""

    model: str
    devices: int
    width: int
    learner: str
    learner_gb_per_device: float
    weights_gb_per_device: float
    kv_tokens_per_engine: int
    step_s: float
    rollout_s: float
    update_bytes: int
    reshard_s: float
    broadcast_s: float


def rows() -> list[LayoutRow]:
    found = []
    for model, counts in MODELS.items():
        for devices in counts:
            setting = parse(
                {
                    "name": model,
                    "device": "H100",
                    "model": model,
                    "nodes": devices // NODE,
                    "devices_per_node": NODE,
                    "algorithm": "grpo",
                    "prompts": 128,
                    "samples": 8,
                    "steps_per_epoch": 1,
                    "epochs": 1,
                },
                width="auto",
            )
            for times in PhaseTimes.from_setting(setting).widths:
                run = simulate(setting.but(tensor_parallel=times.width), ["fixed"]).policies["fixed"]
                found.append(
                    LayoutRow(
                        model,
                        devices,
                        times.width,
                        times.trainer.sharding(devices).name,
                        times.trainer.held_bytes(devices) / 1e9,
                        setting.model.weight_bytes / times.width / 1e9,
                        times.capacity,
                        run.step_s,
                        run.steps[0].rollout_s,
                        times.engines * setting.model.weight_bytes,
                        times.reshard_s,
                        times.broadcast_s,
                    )
                )
    return found


def main() -> None:
    console, found = make_console(), rows()
    table = Table()
    heads = ("model", "H100s", "width", "learner shards", "learner GB", "weights GB", "KV tokens", "step s", "rollout s")
    for head in (*heads, "update GB", "update s, same / other devices"):
        table.add_column(head, justify="right")
    for r in found:
        cells = [r.model, str(r.devices), str(r.width), r.learner, f"{r.learner_gb_per_device:.1f}", f"{r.weights_gb_per_device:.1f}"]
        cells += [f"{r.kv_tokens_per_engine:,}", f"{r.step_s:.1f}", f"{r.rollout_s:.1f}", f"{r.update_bytes / 1e9:,.0f}"]
        table.add_row(*cells, f"{r.reshard_s:.1f} / {r.broadcast_s:.1f}")
    console.print(table)
    save("layouts", {"rows": [asdict(r) for r in found]}, [], console=console)


if __name__ == "__main__":
    main()
