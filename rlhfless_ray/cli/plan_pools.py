"""Read the pools of `rlhfless plan` from its options."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject

if TYPE_CHECKING:
    from placement import Pool


COUNTS = ("actors", "tensor_parallel", "capacity")
KINDS: dict[str, type[int | float | str]] = {
    **dict.fromkeys(COUNTS, int),
    **dict.fromkeys(("price", "start", "preempt"), float),
    **dict.fromkeys(("speed", "device", "model"), str),
}
"""Keys of --pool, with the types of their values."""
MIN_STEP_S, MAX_STEP_S = 1e-9, 1e6
MAX_COUNT = 10**9  # actors, devices, KV tokens
ENGINE_MEMORY = 0.9  # share of a device's memory for an engine that is alone on it, vLLM's default
MAX_WIDTH = 8  # devices of a node: the roofline does not model the links between nodes


@dataclass(frozen=True)
class PoolOptions:
    """One kind of actor as given by the options of the same names."""

    actors: int | None = None
    speed: str | None = None
    device: str | None = None
    model: str | None = None
    tensor_parallel: int = 1
    price: float = 1.0
    start: float = 0.0
    preempt: float = 0.0
    capacity: int | None = None

    def other(self, text: str) -> PoolOptions:
        """Return a copy with the changes of `key=value,key=value`. Raises UserError for an unknown key or wrong type."""
        changes: JsonObject = {}
        for part in text.split(","):
            key, _, value = (piece.strip() for piece in part.partition("="))
            key = key.replace("-", "_")
            if key not in KINDS:
                near = difflib.get_close_matches(key, KINDS, n=1, cutoff=0.4)
                hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(KINDS)}"
                raise UserError(f"--pool {text}: unknown `{key}`; {hint}")
            try:
                changes[key] = KINDS[key](value)
            except ValueError:
                raise UserError(f"--pool {text}: `{key}` cannot be {value!r}") from None
        if "speed" in changes:  # because a comma separates the keys
            changes["speed"] = changes["speed"].replace(":", ",")
            changes.update(device=None, model=None)
        elif {"device", "model"} & set(changes):
            changes["speed"] = None
        return replace(self, **changes)

    def pool(self, name: str = "") -> Pool:
        """Return the pool. Raises UserError for an impossible value; `name` begins the message."""
        from placement import Pool, Speed

        for what in COUNTS:
            count, option = getattr(self, what), f"{name}--{what.replace('_', '-')}"
            if count is None and what == "capacity":
                continue
            if count is None or count < 1:
                raise UserError(f"{option}: must be at least 1, got {count}")
            if count > MAX_COUNT:
                raise UserError(f"{option}: must be at most {MAX_COUNT:,}")
        if (self.speed is None) == (self.device is None and self.model is None):
            raise UserError(f"{name}give an actor's speed: either --speed base,per_seq[,per_ctx], or --device and --model")
        if not 0 < self.price < math.inf:
            raise UserError(f"{name}--price must be finite and above 0, got {self.price:g}")
        for what in ("start", "preempt"):
            if not 0 <= getattr(self, what) < math.inf:
                raise UserError(f"{name}--{what} must be finite and not negative, got {getattr(self, what):g}")
        width, actors = self.tensor_parallel, self.actors or 0
        if self.speed is not None:
            try:
                numbers = [float(part) for part in self.speed.split(",")]
            except ValueError:
                numbers = []
            if len(numbers) not in (2, 3) or not all(0 <= x < math.inf for x in numbers):
                raise UserError(f"{name}--speed {self.speed}: give base,per_seq or base,per_seq,per_ctx in seconds, such as 0.0085,3e-5")
            if not (sum(numbers[:2]) >= MIN_STEP_S and sum(numbers) <= MAX_STEP_S):
                raise UserError(f"{name}--speed {self.speed}: base and per_seq together must be {MIN_STEP_S:g} to {MAX_STEP_S:g} s")
            return Pool(Speed(*numbers), self.price, actors, self.start, self.preempt, self.capacity, width)
        if self.device is None or self.model is None:
            raise UserError(f"{name}give --device and --model together: the speed follows from both")
        from placement.catalog import catalog
        from placement.speed.roofline import check_width, decode_speed, kv_capacity

        try:
            the_model, the_device = catalog.model(self.model), catalog.device(self.device)
            check_width(the_model, width)
            holds = kv_capacity(the_model, the_device, width, ENGINE_MEMORY) if self.capacity is None else self.capacity
        except ValueError as error:
            raise UserError(f"{name}{error}") from None
        return Pool(decode_speed(the_model, the_device, width), self.price, actors, self.start, self.preempt, holds, width)

    def low_kv(self, width: int, longest: float) -> str | None:
        """Return a warning if an engine of `width` devices has almost no memory left for KV of sequences of `longest` tokens."""
        from placement.catalog import catalog
        from placement.speed.roofline import low_kv_warning

        if self.device is None or self.model is None or self.capacity is not None:
            return None
        return low_kv_warning(catalog.model(self.model), catalog.device(self.device), width, ENGINE_MEMORY, longest)

    def widths(self, devices: int) -> list[Pool]:
        """Return a pool for every tensor-parallel width with which the devices can hold the model.

        Widths are powers of two up to MAX_WIDTH. Raises UserError if none is possible.
        """
        if devices < 1:
            raise UserError(f"--devices: must be at least 1, got {devices}")
        if self.device is None or self.model is None:
            raise UserError("--devices needs --device and --model: the speed of an actor with several devices follows from both")
        pools, refused = [], None
        for width in (2**k for k in range(min(devices, MAX_WIDTH).bit_length())):
            try:
                pools.append(replace(self, tensor_parallel=width, actors=devices // width).pool())
            except UserError as error:
                refused = error
        if not pools:
            assert refused is not None
            raise refused
        return pools
