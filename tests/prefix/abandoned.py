"""A run's driver, for tests that kill one: `python abandoned.py ADDRESS NAME HEARTBEAT_S` starts the service, prints its application's
name, and then the applications and the named actors that are there, once for each line of its input."""

from __future__ import annotations

import json
import logging
import sys


def main(address: str, name: str, heartbeat_s: str) -> None:
    import ray
    from ray import serve

    from rlhfless_ray.prefix.page_service import PrefixService

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    service = PrefixService(name, 10**6, heartbeat_s=float(heartbeat_s))
    service.start()
    print(service.name, flush=True)
    for _ in sys.stdin:
        actors = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
        print(json.dumps({"applications": sorted(serve.status().applications), "actors": actors}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
