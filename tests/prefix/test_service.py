"""The service on a local Ray, with stand-ins for engines: who computes, who owns, what is lost and what is left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.prefix.block_hash import chain, distinct_prefixes, salt
from rlhfless_ray.prefix.page_service import PrefixService, Producer
from rlhfless_ray.prefix.pages import PageLayout
from tests.prefix.producers import KIND, page_of, producer_class, taker

pytestmark = pytest.mark.ray

HEADER = tuple(range(100, 121))
PROMPTS = [(*HEADER, *(i for _ in range(7 + i % 3))) for i in range(12)]


@pytest.fixture(scope="module")
def serving(ray_cluster: None) -> Iterator[None]:
    from ray import serve

    yield
    serve.shutdown()  # this Ray is the tests' own


@pytest.fixture(scope="module")
def started(serving: None) -> Iterator[PrefixService]:
    made = PrefixService(f"test{time.time_ns()}", 10**6)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def service(started: PrefixService) -> PrefixService:
    """The service of all tests, without the pages of those before."""
    started.keep_only(-1)
    started.failures.clear()
    return started


@pytest.fixture
def make_producers() -> Iterator[Callable[..., Producer]]:
    import ray

    hired: list[Any] = []

    def make(*arguments: Any, answers_meanwhile: bool = False) -> Producer:
        options = {"num_cpus": 0, "max_concurrency": 1 + answers_meanwhile}
        hired.append(ray.remote(producer_class()).options(**options).remote(*arguments))
        return Producer(hired[-1], 1)

    yield make
    for actor in hired:
        ray.kill(actor)


def computed_by(*producers: Producer) -> list[bytes]:
    import ray

    return [address for one in producers for address in ray.get(one.actor.log.remote(), timeout=60)]


def assert_readable(refs: list[Any], prompts: list[tuple[int, ...]], version: int = 1) -> None:
    reader = taker()
    fetched = reader.fetch_pages(version, prompts, refs, 30.0)
    assert (fetched.lost, fetched.damaged, fetched.foreign) == (0, 0, 0)
    wanted = reader.engine.pages.wanted(salt(version), prompts)
    assert set(reader.engine.pages.rows) == wanted
    for address, page in reader.engine.pages.rows.items():
        np.testing.assert_array_equal(page, page_of(address))


@pytest.mark.parametrize("count", [1, 3])
def test_each_distinct_page_is_computed_once_in_the_whole_cluster(service: PrefixService, make_producers: Any, count: int) -> None:
    """By however many producers, for however many that ask at once."""
    producers = [make_producers(0.3) for _ in range(count)]
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        found[number] = service.prepare(1, PROMPTS[: 4 + 2 * number], producers, 30.0)

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    trie = distinct_prefixes(PROMPTS, KIND.block_size)
    computed = computed_by(*producers)
    assert len(computed) == len(set(computed)) == len(trie.nodes)
    assert sum(done.tokens for one in found.values() for _, done in one.done) == trie.distinct_tokens < sum(len(p) - 1 for p in PROMPTS) / 2
    for number, one in found.items():
        assert not one.failed and one.no_room == 0
        assert_readable(one.refs, PROMPTS[: 4 + 2 * number])
        some = [1, 3]
        assert_readable(one.needed_by(some), [PROMPTS[i] for i in some])
    assert service.failures == []


def test_pages_outlive_their_producer(service: PrefixService, make_producers: Any) -> None:
    """Large ones lie in shared memory, small ones with their owner: both kinds."""
    import ray

    for kind in (KIND, PageLayout(b"engine", 4, 2**14)):
        producer = make_producers(0.0, kind)
        prompts = [(int(time.time()), *prompt) for prompt in PROMPTS]
        found = service.prepare(1, prompts, [producer], 30.0)
        assert found.no_room == 0
        ray.kill(producer.actor)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(producer.actor.log.remote(), timeout=30)
        bundles = ray.get(found.refs, timeout=30)
        addresses = {address for bundle in bundles for address in bundle.addresses}
        assert len(addresses) == len(distinct_prefixes(prompts, 4).nodes)
        service.keep_only(2)


def test_a_producer_killed_at_work_costs_a_recomputation(service: PrefixService, make_producers: Any) -> None:
    import ray

    slow, healthy = make_producers(600.0, answers_meanwhile=True), make_producers()
    found: list[Any] = []
    asker = threading.Thread(target=lambda: found.append(service.prepare(1, PROMPTS, [slow], 300.0)))
    asker.start()
    while not ray.get(slow.actor.begun.remote(), timeout=60):
        time.sleep(0.05)
    beside = service.prepare(1, PROMPTS, [healthy], 30.0)
    assert beside.refs and not beside.done and not computed_by(healthy), "the pages are being computed already"
    ray.kill(slow.actor)
    asker.join(120)
    assert not asker.is_alive() and len(found[0].failed) == 1 and found[0].refs == [] and found[0].done == []
    fetched = taker().fetch_pages(1, PROMPTS, beside.refs, 10.0)
    assert fetched.lost == len(beside.refs) and fetched.pages == 0
    again = service.prepare(1, PROMPTS, [healthy], 30.0)
    assert_readable(again.refs, PROMPTS)
    assert len(computed_by(healthy)) == len(distinct_prefixes(PROMPTS, 4).nodes)


def test_a_hung_producer_times_out(service: PrefixService, make_producers: Any) -> None:
    start = time.monotonic()
    found = service.prepare(1, PROMPTS, [make_producers(600.0)], 3.0)
    assert time.monotonic() - start < 300 and found.failed == ["a prefill instance did not reply in time"]
    assert service.keep_only(2) == 0 and service.failures == [], "its pages are no longer expected"


def test_a_killed_index_restarts_and_its_pages_are_computed_again(service: PrefixService, make_producers: Any) -> None:
    import ray

    kind = PageLayout(b"engine", 4, 2**14)  # small pages would have come along with their references, and nothing would be lost
    producer = make_producers(0.0, kind)
    found = service.prepare(1, PROMPTS, [producer], 30.0)
    assert found.refs and not found.failed
    [replica] = [one for one in ray.util.list_named_actors(all_namespaces=True) if service.name in one["name"]]
    actor = ray.get_actor(**replica)
    ray.kill(actor, no_restart=True)
    with pytest.raises(ray.exceptions.RayActorError):  # it takes a moment
        for _ in range(300):
            ray.get(actor.__ray_ready__.remote(), timeout=30)
            time.sleep(0.1)
    reader = taker(kind)
    fetched = reader.fetch_pages(1, PROMPTS, found.refs, 10.0)
    # Ray may still have a copy on this node; what it has not is lost, and nothing else comes
    assert fetched.lost in (0, len(found.refs)) and bool(fetched.pages) == (not fetched.lost) and not fetched.damaged
    end = time.monotonic() + 60
    while True:
        again = service.prepare(1, PROMPTS, [producer], 10.0)
        if again.refs or time.monotonic() > end:
            break
        assert [*service.failures, *again.failed], "nothing came, and no failure was recorded"
        time.sleep(0.2)
    assert reader.fetch_pages(1, PROMPTS, again.refs, 10.0).pages == len(distinct_prefixes(PROMPTS, 4).nodes)
    assert len(computed_by(producer)) == 2 * len(distinct_prefixes(PROMPTS, 4).nodes)


def test_a_weight_update_frees_the_old_pages_and_finds_none_of_them(service: PrefixService, make_producers: Any) -> None:
    producer = make_producers()
    service.prepare(1, PROMPTS, [producer], 30.0)
    pages = len(distinct_prefixes(PROMPTS, 4).nodes)
    assert service.keep_only(2) == pages and service.keep_only(2) == 0
    new = service.prepare(2, PROMPTS, [producer], 30.0)
    assert_readable(new.refs, PROMPTS, version=2)
    assert len(set(computed_by(producer))) == 2 * pages
    stale = taker()
    assert stale.fetch_pages(1, PROMPTS, new.refs, 10.0).foreign == pages and not stale.engine.pages.rows


def test_pages_beyond_the_cap_are_left_to_their_engines(serving: None, make_producers: Any) -> None:
    small = PrefixService(f"small{time.time_ns()}", 8 * KIND.page_bytes)
    small.start()
    try:
        found = small.prepare(1, PROMPTS, [make_producers()], 30.0)
        assert found.no_room == len(distinct_prefixes(PROMPTS, 4).nodes) - 8
        reader = taker()
        assert reader.fetch_pages(1, PROMPTS, found.refs, 10.0).pages == 8
        header = distinct_prefixes([HEADER], 4)
        assert header.nodes[4].path_end == 20  # five whole blocks, which every prompt begins with
        assert set(chain(KIND.start(salt(1)), HEADER[:20], KIND.block_size)) <= set(reader.engine.pages.rows)
        assert small.keep_only(2) == 8
    finally:
        small.stop()


def test_producers_with_another_page_layout_are_left_out(service: PrefixService, make_producers: Any) -> None:
    mine, other = make_producers(), make_producers(0.0, PageLayout(b"another engine", 4, 256))
    found = service.prepare(1, PROMPTS, [mine, other], 30.0)
    assert found.failed == ["1 of 2 prefill instances have another page layout than the first"]
    assert_readable(found.refs, PROMPTS)
    assert computed_by(other) == []


def test_stopping_leaves_nothing_on_serve(started: PrefixService) -> None:
    import ray
    from ray import serve

    mine, other = PrefixService(f"mine{time.time_ns()}", 10**6), PrefixService(f"other{time.time_ns()}", 10**6)
    mine.start()
    other.start()
    mine.stop()
    assert set(serve.status().applications) >= {other.name} and mine.name not in serve.status().applications
    assert other.keep_only(1) == 0 and other.failures == [], "somebody else's application works on"
    other.stop()
    assert set(serve.status().applications) == {started.name}
    end = time.monotonic() + 90
    while left := [
        one
        for one in ray.util.list_named_actors(all_namespaces=True)
        if "rlhfless-prefix" in one["name"] and started.name not in one["name"]
    ]:
        assert time.monotonic() < end, left
        time.sleep(0.2)
    with contextlib.suppress(AttributeError):
        assert not [one for one in serve.status().proxies if one], "no proxy, hence no HTTP port"


def test_a_service_that_cannot_start_raises_an_error(serving: None) -> None:
    late = PrefixService(f"late{time.time_ns()}", 10**6, start_s=0.0)
    with pytest.raises(RunError, match="timed out after 0 s waiting for the prefix service"):
        late.start()
    late.stop()
