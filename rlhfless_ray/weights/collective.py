"""A channel over torch.distributed, in which publishers send every reader the elements that it wants, and no others.

Readers and publishers are members of one process group, made once: for engines and learners whose processes stay. As in every collective,
members that lose one must join a new group.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed import ProcessGroupGloo, Store

from rlhfless_ray.weights.channel import FETCH_S, Content, PublisherLost, WeightsDamaged, WeightsMissing
from rlhfless_ray.weights.checksum import damaged, digests, listed
from rlhfless_ray.weights.tensor_slice import HeldSlices, Place, Slices, TensorSlice, at, is_comparable, joined, overlaps

HEADER, BODY = 1, 2  # tags of messages
IDLE = timedelta(days=365)  # a publisher waits for readers without a deadline


class CollectiveChannel:
    def __init__(self, store: Store, rank: int, ranks: int, publishers: Sequence[int], within_s: float = FETCH_S) -> None:
        """Join a group of this many members, of which `publishers` have weights, at a `store` that all of them reach."""
        self.publishers, self.within_s = tuple(publishers), within_s
        self.group: Any = ProcessGroupGloo(store, rank, ranks, IDLE if rank in publishers else timedelta(seconds=within_s))
        self.published: dict[int, tuple[dict[TensorSlice, np.ndarray], dict[str, int]]] = {}  # slices and their digests
        self.offered: dict[int, list[dict[TensorSlice, np.dtype]]] = {}  # to a reader, by version and publisher
        self.fetched_bytes = 0
        if rank in publishers:
            threading.Thread(target=self._serve, daemon=True).start()

    # ---- publishers -----------------------------------------------------------------------------------------------

    def publish(self, version: int, slices: Slices) -> None:
        """Offer slices. They must keep their values until `close`, which is checked before they are sent."""
        self.published = {version: (dict(slices), digests(slices))}

    def _serve(self) -> None:
        while True:
            try:
                reader, request = self._receive(None)
            except RuntimeError:  # a member is gone, and the group with it
                return
            try:
                reply = self._reply(*request)
            except (WeightsMissing, WeightsDamaged) as error:
                reply = error
            self._send(reader, reply)

    def _reply(self, version: int, wanted: TensorSlice | None) -> Any:
        """Return what is offered, or of a wanted slice the matrices at the places where pieces overlap it."""
        if version not in self.published:
            raise WeightsMissing(f"weight version {version} is not published, only {', '.join(map(str, self.published)) or 'none'}")
        slices, digest_of = self.published[version]
        if wanted is None:
            return {piece: values.dtype for piece, values in slices.items()}
        read = {piece: values for piece, values in slices.items() if piece.name == wanted.name}
        if wrong := damaged(digests(read), {str(piece): digest_of[str(piece)] for piece in read}):
            raise WeightsDamaged(f"weight version {version} was damaged where it was published: {listed(wrong)} differ")
        return [np.ascontiguousarray(at(values, of)) for piece, values in read.items() for _, of in overlaps(wanted, piece)]

    # ---- readers --------------------------------------------------------------------------------------------------

    def contents(self, version: int) -> Mapping[str, Content]:
        return {piece.name: (piece.shape, dtype) for of_publisher in self._offered(version) for piece, dtype in of_publisher.items()}

    def check(self, version: int, member: int = 0, width: int = 1) -> None:
        """Do nothing: publishers check what they send, and readers what arrives."""

    def fetch(self, version: int, wanted: TensorSlice, into: np.ndarray | None = None) -> np.ndarray:
        offered = [[piece for piece in of_publisher if piece.name == wanted.name] for of_publisher in self._offered(version)]
        if not any(offered):
            raise WeightsMissing(f"weight version {version} has no tensor {wanted.name}")
        if not all(is_comparable(wanted, piece) for pieces in offered for piece in pieces):
            whole = TensorSlice.whole(wanted.name, wanted.shape)
            return HeldSlices.of({whole: self.fetch(version, whole).reshape(-1)}).read(wanted)
        parts: list[tuple[Place, np.ndarray]] = []
        for publisher, pieces in zip(self.publishers, offered, strict=True):
            places = [place for piece in pieces for place, _ in overlaps(wanted, piece)]
            parts += zip(places, self._ask(publisher, version, wanted) if places else (), strict=True)
        try:
            values = joined(wanted, parts, into).reshape(wanted.values_shape)
        except ValueError as error:
            raise WeightsMissing(f"weight version {version}: {error}") from None
        self.fetched_bytes += values.nbytes
        return values

    def _offered(self, version: int) -> list[dict[TensorSlice, np.dtype]]:
        if version not in self.offered:
            self.offered = {version: [self._ask(publisher, version, None) for publisher in self.publishers]}
        return self.offered[version]

    def _ask(self, publisher: int, version: int, wanted: TensorSlice | None) -> Any:
        try:
            self._send(publisher, (version, wanted))
            _, reply = self._receive(publisher)
        except RuntimeError as error:
            raise PublisherLost(f"publisher {publisher} of weight version {version} is lost, or silent for {self.within_s:g} s") from error
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        self.published, self.offered = {}, {}

    # ---- messages -------------------------------------------------------------------------------------------------

    def _send(self, to: int, said: object) -> None:
        body = torch.frombuffer(bytearray(pickle.dumps(said, protocol=5)), dtype=torch.uint8)
        header = torch.tensor([self.group.rank(), len(body), digest_of(body)])
        for tensor, tag in ((header, HEADER), (body, BODY)):
            self.group.send([tensor], to, tag).wait()

    def _receive(self, source: int | None) -> tuple[int, Any]:
        """Return a message and its sender. Raises RuntimeError if that is lost, or a reader's deadline passed."""
        header = torch.empty(3, dtype=torch.int64)
        (self.group.recv_anysource([header], HEADER) if source is None else self.group.recv([header], source, HEADER)).wait()
        sender, size, digest = header.tolist()
        body = torch.empty(size, dtype=torch.uint8)
        self.group.recv([body], sender, BODY).wait()
        if digest_of(body) != digest:
            raise WeightsDamaged(f"a message of member {sender} arrived damaged")
        return sender, pickle.loads(body.numpy().data)


def digest_of(body: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(body.numpy().data) >> 1  # as a signed number
