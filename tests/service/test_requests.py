"""Order, repetition and bounds of a tenant's requests; the bytes of protobuf messages."""

from __future__ import annotations

import numpy as np
import pytest

from rlhfless_ray.service import requests
from rlhfless_ray.service.requests import Job, QueueFull, Requests
from rlhfless_ray.service.wire import CLASSES, ClientMistake, read_passes, write_passes, write_samples

pytestmark = pytest.mark.pure


def job(id: str, batch: str = "") -> Job:
    return Job(id, lambda jobs: None, batch=batch)


def taken(of: Requests) -> list[str]:
    found = []
    while jobs := of.take(0):
        found.append("+".join(one.id for one in jobs))
    return found


def test_requests_of_a_model_wait_for_their_predecessors() -> None:
    of = Requests()
    for number in (2, 3):
        of.submit(job(f"m:{number}"), "m", number)
    of.submit(job("n:1"), "n", 1)
    assert taken(of) == ["n:1"]
    of.submit(job("m:1"), "m", 1)
    assert taken(of) == ["m:1", "m:2", "m:3"]


def test_repeated_request_is_the_first_one() -> None:
    of, first = Requests(), job("m:1")
    assert of.submit(first, "m", 1) is of.submit(job("m:1"), "m", 1) is first
    assert taken(of) == ["m:1"]


def test_request_whose_result_is_forgotten_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "KEPT_RESULTS", 1)
    of = Requests()
    for number in (1, 2, 3):
        of.submit(job(f"m:{number}"), "m", number).future.set_result({})
    of.submit(job("m:4"), "m", 4)
    with pytest.raises(ClientMistake, match="seq_id: 1 of m is done"):
        of.submit(job("m:1"), "m", 1)


def test_jobs_of_a_batch_are_taken_together() -> None:
    of = Requests()
    for id, batch in (("a", "x"), ("b", ""), ("c", "x"), ("d", "y")):
        of.submit(job(id, batch))
    assert taken(of) == ["a+c", "b", "d"]


def test_open_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_OPEN", 2)
    of = Requests()
    done = of.submit(job("a"))
    of.submit(job("b"))
    with pytest.raises(QueueFull):
        of.submit(job("c"))
    done.future.set_result({})
    of.submit(job("c"))


def test_known_bytes_are_read_and_written() -> None:
    """Bytes put together by the rules of protobuf: model "m", number 3, one datum of tokens 7 and 8, its targets, forward only."""
    tokens, targets = np.array([7, 8], "<i4").tobytes(), np.array([8, 9], "<i8").tobytes()
    chunk = b"\x0a\x0a" + b"\x0a\x08" + tokens
    tensor = b"\x0a\x10" + targets + b"\x18\x02" + b"\x22\x01\x02"
    entry = b"\x0a\x0dtarget_tokens" + b"\x12" + bytes([len(tensor)]) + tensor
    datum = b"\x0a" + bytes([len(chunk)]) + chunk + b"\x12" + bytes([len(entry)]) + entry
    body = b"\x0a\x01m\x10\x03\x1a" + bytes([len(datum)]) + datum + b"\x22\x0dcross_entropy\x30\x01"
    read = read_passes(body)
    assert (read.model_id, read.seq_id, read.loss, read.forward_only, read.config) == ("m", 3, "cross_entropy", True, {})
    [one] = read.data
    assert (one.tokens.tolist(), one.inputs["target_tokens"].tolist()) == ([7, 8], [8, 9])
    written = write_samples([("length", np.array([5]), np.array([-0.5]))])
    assert written == b"\x0a\x0e\x08\x01\x12\x04\x05\x00\x00\x00\x1a\x04\x00\x00\x00\xbf"


def test_outputs_are_cut_by_byte_offsets() -> None:
    message = CLASSES["ForwardBackwardOutput"].FromString(write_passes([np.zeros(2, np.float32), np.ones(3, np.float32)], 1.5))
    [record] = message.loss_fn_outputs
    assert record.num_datums == 2
    assert np.frombuffer(record.fields[0].value.offsets, np.int64).tolist() == [0, 8, 20]
    assert [(one.key, one.value) for one in message.metrics] == [("loss:sum", 1.5)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dense": b"123", "dtype": 2}, r"data\[0\].loss_fn_inputs.x: 3 bytes"),
        ({"dense": b"\0" * 8, "dtype": 2}, r"data\[0\].loss_fn_inputs.x: must have one value for each"),
        ({"dense": b"\0" * 16, "dtype": 9}, r"data\[0\].loss_fn_inputs.x: must be a dense tensor"),
        ({"sparse_csr": b"\0", "dtype": 1}, r"data\[0\].loss_fn_inputs.x: must be a dense tensor"),
    ],
)
def test_torn_tensor_is_named(change: dict[str, object], field: str) -> None:
    message = CLASSES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="ppo")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    datum.loss_fn_inputs.add(key="x").value.MergeFrom(CLASSES["Tensor"](**change))
    with pytest.raises(ClientMistake, match=field):
        read_passes(message.SerializeToString())
