"""A run's driver and its neighbour, for tests that kill one: `python abandoned.py ADDRESS start NAME HEARTBEAT_S` starts the
service, prints its application's name and sleeps; `… look` prints
the applications and the named actors that are there, once for each line of its input."""

from __future__ import annotations

import json
import logging
import sys
import time


def main(address: str, what: str, *arguments: str) -> None:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    if what == "look":
        from ray import serve

        for _ in sys.stdin:
            actors = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
            print(json.dumps({"applications": sorted(serve.status().applications), "actors": actors}), flush=True)
        return
    from rlhfless_ray.prefix.page_service import PrefixService

    service = PrefixService(arguments[0], 10**6, heartbeat_s=float(arguments[1]))
    service.start()
    print(service.name, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
