"""The way of weight versions from the ranks that trained them to the members of engines: each member fetches its own slices.

Engines pull. A collective that sends would fix who takes part in it, and prevent elasticity.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlhfless_ray.types import BASE, WeightVersion
from rlhfless_ray.weights.checksum import combined, damaged, digests, listed
from rlhfless_ray.weights.layout import whole_tensors
from rlhfless_ray.weights.model_folder import stored_weights
from rlhfless_ray.weights.remote_folder import map_files
from rlhfless_ray.weights.tensor_file import Files, as_numpy
from rlhfless_ray.weights.tensor_slice import HeldSlices, Slices, TensorSlice, whole_slices

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

Content = tuple[tuple[int, ...], np.dtype]  # shape and type of a tensor
FETCH_S = 600.0  # deadline for what a publisher has to send


class WeightsMissing(ValueError):
    """A version, a tensor or some of its elements are not published."""


class WeightsDamaged(ValueError):
    """Slices differ from the published ones. The message names them."""


class PublisherLost(RuntimeError):
    """Who published a version did not answer within the deadline, or is gone."""


class WeightChannel(Protocol):
    """One end of a channel. Every method that waits has the channel's deadline, and raises PublisherLost after it."""

    def publish(self, version: int, slices: Slices) -> None:
        """Offer these slices as a part of a version. Those of all publishers together are the version."""

    def contents(self, version: int) -> Mapping[str, Content]:
        """Return the shape and type of each tensor by name. Raises WeightsMissing if the version is not published."""

    def check(self, version: int, member: int, width: int) -> None:
        """Check a member's share of the published slices, so that `width` members together check all of them once.

        Raises WeightsDamaged. A channel that checks what it fetches does nothing here.
        """

    def fetch(self, version: int, wanted: TensorSlice, into: np.ndarray | None = None) -> np.ndarray:
        """Return the values of a slice, perhaps as a view. Raises WeightsMissing or WeightsDamaged with the slice's name.

        `into`: a contiguous array that takes them if they are in several pieces.
        """

    def close(self) -> None:
        """Withdraw what was published, and release what was fetched."""


class PublishedVersion(Mapping[str, np.ndarray]):
    """The tensors of a version in a channel, by name. A tensor is fetched each time it is read."""

    def __init__(self, channel: WeightChannel, version: int) -> None:
        self.channel, self.version = channel, version

    @cached_property
    def contents(self) -> Mapping[str, Content]:
        return self.channel.contents(self.version)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(TensorSlice.whole(name, self.contents[name][0]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents)

    def __len__(self) -> int:
        return len(self.contents)

    def read(self, wanted: TensorSlice, into: np.ndarray | None = None) -> np.ndarray:
        return self.channel.fetch(self.version, wanted, into)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without reading them."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.contents.values())


def base_slices(base: Files | tuple[str, Mapping[str, int], str]) -> Slices:
    """Return the weights of a folder as slices. `base`: its files, or the arguments of `map_files`."""
    files = map_files(*base) if isinstance(base, tuple) else base
    return whole_slices({name: as_numpy(tensor) for name, tensor in stored_weights(files)})


def stored_version(version: int, weights: Mapping[str, np.ndarray]) -> WeightVersion:
    """Put whole tensors into the object store as a version."""
    import ray

    channel = ObjectStoreChannel()
    channel.publish(version, whole_slices(weights))
    digest_of = channel.digests[version]
    return WeightVersion(version, tuple(channel.refs[version]), combined(digest_of), digests=ray.put(digest_of))


class RayStore:
    """Ray's object store, for a process of Ray, and for a further member of an engine, which joins the cluster when it fetches first."""

    def __init__(self) -> None:
        self.engine: tuple[str, bytes] | None = None  # whom a further member asks: the cluster's address, and the engine's pickled actor

    def put(self, slices: Slices) -> Any:
        import ray

        return ray.put(slices)

    def get(self, refs: Sequence[ObjectRef] | None, version: int, within_s: float) -> list[Any]:
        """Map parts of a version. Of a further member the engine's actor has the references (`refs` None)."""
        import ray

        if refs is None and self.engine is not None:
            address, actor = self.engine
            if not ray.is_initialized():
                ray.init(address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
            engine: ActorHandle = ray.cloudpickle.loads(actor)  # only once this process has joined
            refs = ray.get(engine.published.options(concurrency_group="control").remote(version), timeout=within_s)
        return ray.get(list(refs or ()), timeout=within_s)

    def __getstate__(self) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        return {"engine": self.engine or (context.gcs_address, ray.cloudpickle.dumps(context.current_actor))}


class ObjectStoreChannel:
    """Slices in an object store. A reader maps the parts of a version, and reads its own slices only.

    A pickled channel, as an engine sends it to its further members, has no weights. They map the parts themselves.
    """

    def __init__(self, within_s: float = FETCH_S, store: RayStore | None = None) -> None:
        self.within_s, self.store = within_s, store or RayStore()
        self.refs: dict[int, Sequence[Any]] = {}  # to each version's parts
        self.held: dict[int, HeldSlices] = {}
        self.digests: dict[int, Mapping[str, int]] = {}
        self.fetched_bytes = 0

    def offer(self, version: int, parts: Sequence[Slices], digest_of: Mapping[str, int], refs: Sequence[ObjectRef] = ()) -> None:
        """Offer a version whose parts this process has mapped already. `refs`: to the parts, for further members."""
        self.held[version], self.digests[version], self.refs[version] = HeldSlices.of(*parts), digest_of, refs

    def publish(self, version: int, slices: Slices) -> None:
        self.refs[version] = (*self.refs.get(version, ()), self.store.put(slices))
        self.digests[version] = {**self.digests.get(version, {}), **digests(slices)}
        self.held.pop(version, None)

    def contents(self, version: int) -> dict[str, Content]:
        held = self._mapped(version)
        return {name: held.content(name) for name in held}

    def check(self, version: int, member: int = 0, width: int = 1) -> None:
        pieces = {str(piece): (piece, load) for of_name in self._mapped(version).held.values() for piece, load in of_name}
        owner = whole_tensors({name: piece.end - piece.start for name, (piece, _) in pieces.items()}, width)
        own = {piece: load() for name, (piece, load) in pieces.items() if owner[name] == member}
        expected = {name: digest for name, digest in self.digests[version].items() if owner.get(name, 0) == member}
        if wrong := damaged(digests(own), expected):
            raise WeightsDamaged(f"weight version {version} arrived damaged: {listed(wrong)} differ from the published tensors")

    def fetch(self, version: int, wanted: TensorSlice, into: np.ndarray | None = None) -> np.ndarray:
        held = self._mapped(version)
        try:
            values = held.read(wanted, into)
        except KeyError as error:
            raise WeightsMissing(f"weight version {version} has no tensor {error.args[0]}") from None
        except ValueError as error:
            raise WeightsMissing(f"weight version {version}: {error}") from None
        self.fetched_bytes += values.nbytes
        return values

    def close(self) -> None:
        for of_version in (self.refs, self.held, self.digests):
            of_version.clear()

    def _mapped(self, version: int) -> HeldSlices:
        if version in self.held:
            return self.held[version]
        if version not in self.digests:
            raise WeightsMissing(f"weight version {version} is not published, only {', '.join(map(str, self.digests)) or 'none'}")
        from ray.exceptions import RayError

        try:
            parts = self.store.get(self.refs.get(version), version, self.within_s)
        except RayError as error:
            raise PublisherLost(
                f"weight version {version} did not come from the object store within {self.within_s:g} s: {error}"
            ) from error
        self.held[version] = HeldSlices.of(*(base_slices(*parts),) if version == BASE else parts)
        return self.held[version]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "refs": {}, "held": {}}
