"""What a page store takes in and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfless_ray.prefix.block_hash import chain
from rlhfless_ray.prefix.pages import Bundle, PageLayout, PageStore

TOKENS = tuple(range(10))
BYTES = 64


def store_of(fingerprint: bytes = b"engine", block_size: int = 4, page_bytes: int = BYTES) -> PageStore:
    made = PageStore()
    made.kind = PageLayout(fingerprint, block_size, page_bytes)
    return made


def addresses_of(store: PageStore, tokens: tuple[int, ...], version: str = "version 1") -> list[bytes]:
    return chain(store.layout.start(version), tokens, store.layout.block_size)


def bundle_of(store: PageStore, version: str = "version 1") -> Bundle:
    addresses = addresses_of(store, TOKENS[:-1], version)
    pages = np.random.default_rng(0).integers(0, 256, (len(addresses), BYTES)).astype(np.uint8)
    return Bundle.seal(store.layout.start(version), addresses, pages)


def test_pages_of_the_same_engine_are_accepted() -> None:
    store = store_of()
    bundle = bundle_of(store)
    assert store.put(bundle, "version 1", store.wanted("version 1", [TOKENS])) == 3
    found = store.match(addresses_of(store, TOKENS[:-1]), 1)
    np.testing.assert_array_equal(np.stack(found), bundle.pages[1:])
    assert store.counts == {"put": 3}


@pytest.mark.parametrize(
    "maker, version",
    [(store_of(fingerprint=b"another model or dtype"), "version 1"), (store_of(block_size=5), "version 1"), (store_of(), "version 0")],
)
def test_foreign_pages_are_refused_by_their_address(maker: PageStore, version: str) -> None:
    store = store_of()
    bundle = bundle_of(maker, version)
    assert store.put(bundle, "version 1", store.wanted("version 1", [TOKENS])) == 0
    assert store.counts["foreign"] == len(bundle.addresses) and not store.rows


def test_pages_of_other_prompts_in_a_bundle_are_ignored() -> None:
    store = store_of()
    assert store.put(bundle_of(store), "version 1", set(addresses_of(store, TOKENS[:4]))) == 1
    assert store.counts == {"put": 1}


def test_a_page_with_a_forged_root_is_not_found() -> None:
    """The root that a bundle names is a label; what counts are the addresses."""
    store, other = store_of(), store_of(fingerprint=b"another")
    bundle = replace(bundle_of(other), start=store.layout.start("version 1"))
    assert store.put(bundle, "version 1", store.wanted("version 1", [TOKENS])) == 0 and not store.rows


def test_only_the_damaged_page_is_refused() -> None:
    store = store_of()
    bundle = bundle_of(store)
    pages = bundle.pages.copy()
    pages[1, 17] ^= 1
    assert store.put(replace(bundle, pages=pages), "version 1", store.wanted("version 1", [TOKENS])) == 2
    assert store.counts["damaged"] == 1
    assert len(store.match(addresses_of(store, TOKENS[:-1]), 0)) == 1, "what lies behind a gap cannot be used"


def test_pages_with_swapped_addresses_are_refused() -> None:
    store = store_of()
    bundle = bundle_of(store)
    swapped = replace(bundle, pages=bundle.pages[[1, 0, 2]], checksums=tuple(bundle.checksums[i] for i in (1, 0, 2)))
    assert store.put(swapped, "version 1", store.wanted("version 1", [TOKENS])) == 1
    assert store.counts["damaged"] == 2


def test_pages_of_another_size_are_refused() -> None:
    store = store_of(page_bytes=BYTES // 2)
    assert store.put(bundle_of(store), "version 1", store.wanted("version 1", [TOKENS])) == 0
    assert store.counts["damaged"] == 3


def test_each_page_is_saved_once_and_known_ones_are_not() -> None:
    store = store_of()
    addresses = addresses_of(store, TOKENS)
    store.copy_out = lambda blocks: np.repeat(np.array(blocks, np.uint8)[:, None], BYTES, 1)
    store.request_save(["a", "b"], known=addresses[:1])
    store.save("a", addresses, [5, 6, 7])
    store.save("b", addresses, [8, 9, 10])
    found = store.take_saved(["a", "b"])
    assert {address: int(page[0]) for address, page in found.items()} == {addresses[1]: 6, addresses[2]: 7}
    assert store.counts["saved"] == 2 and not store.to_save and not store.known
    assert store.take_saved(["a"]) == {}


def test_pages_copied_from_a_running_request_are_not_saved_again() -> None:
    store = store_of()
    addresses = addresses_of(store, TOKENS)
    store.copy_out = lambda blocks: np.repeat(np.array(blocks, np.uint8)[:, None], BYTES, 1)
    copied = store.copy("a", addresses[:2], [5, 6])
    assert {address: int(page[0]) for address, page in copied.items()} == {addresses[0]: 5, addresses[1]: 6}
    store.request_save(["a"], after_copy=True)
    store.save("a", addresses, [5, 6, 7])
    assert {address: int(page[0]) for address, page in store.take_saved(["a"]).items()} == {addresses[2]: 7}
    store.request_save(["a"], after_copy=True)
    store.save("a", addresses, [5, 6, 7])
    assert len(store.take_saved(["a"])) == 3, "a later move, which may go elsewhere"
    store.copy("a", addresses[:2], [5, 6])
    store.request_save(["a"])
    store.save("a", addresses, [5, 6, 7])
    assert len(store.take_saved(["a"])) == 3, "the copy has not arrived"


def test_without_an_engine_there_are_no_pages() -> None:
    with pytest.raises(RuntimeError, match="not built yet"):
        PageStore().wanted("version 1", [TOKENS])
