"""Store the costs of a cluster's runs in Ray. The record outlives pools and ends with the cluster."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, fields

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.pool_messages import RunInfo
from rlhfless_ray.functions.pool_runs import PastRun
from rlhfless_ray.functions.pool_state import PoolState

NAMESPACE = b"rlhfless"
DAY_S = 86400


def today() -> int:
    """Return the UTC day, in days since the epoch."""
    return int(time.time() // DAY_S)


def save_costs(resource: str, state: PoolState, began_s: float, now_s: float) -> None:
    """Store what a pool counted. `began_s`: since when, in seconds since the epoch. `now_s`: on the state's clock."""
    since_epoch_s = time.time() - now_s
    record = {
        "began_s": began_s,
        "day": state.day,
        "handovers": state.handovers,
        "free_slot_s": state.free_slot_s,
        "past": [
            asdict(past) | {"joined_s": past.joined_s + since_epoch_s, "ended_s": past.ended_s + since_epoch_s} for past in state.past
        ],
    }
    _internal_kv_put(_key(resource), json.dumps(record).encode(), overwrite=True, namespace=NAMESPACE)


def load_costs(resource: str) -> JsonObject | None:
    """Return the stored record, with `past` as `PastRun`s on the clock of this process. None: the cluster has had no pool.

    A pool of another version may have stored it, whose runs have other fields.
    """
    stored = _internal_kv_get(_key(resource), namespace=NAMESPACE)
    if stored is None:
        return None
    record, since_epoch_s = json.loads(stored), time.time() - time.monotonic()
    past, known = [], {one.name for one in fields(RunInfo)}
    for one in record["past"]:
        joined_s, ended_s = one["joined_s"] - since_epoch_s, one["ended_s"] - since_epoch_s
        today_slot_s = one.get("today_slot_s", 0.0) if record.get("day") == today() else 0.0
        info = RunInfo(**{name: value for name, value in one["info"].items() if name in known})
        past.append(PastRun(info, joined_s, ended_s, one["slot_s"], today_slot_s))
    return {**record, "past": past}


def _key(resource: str) -> bytes:
    return f"slot-pool-{resource}".encode()
