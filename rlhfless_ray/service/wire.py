"""The protobuf messages of the remote training interface, and what they hold as arrays.

Names and field numbers are those that the public client sends and reads. An enumeration is an integer here, and a map is a repeated
message of key and value: both are the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

PROTOBUF = "application/x-protobuf"
MESSAGES = {  # message → field → (number, type); "*": repeated
    "Text": {"tokens": (1, "bytes")},
    "Chunk": {"encoded_text": (1, "Text"), "image": (2, "bytes"), "dmel": (3, "bytes")},
    "Tensor": {"dense": (1, "bytes"), "sparse_csr": (2, "bytes"), "dtype": (3, "int32"), "shape": (4, "int64*")},
    "NamedTensor": {"key": (1, "string"), "value": (2, "Tensor")},
    "Datum": {"model_input": (1, "Chunk*"), "loss_fn_inputs": (2, "NamedTensor*")},
    "Number": {"key": (1, "string"), "value": (2, "double")},
    "Value": {"number": (1, "double"), "text": (2, "string")},
    "NamedValue": {"key": (1, "string"), "value": (2, "Value")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "Datum*"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "Number*"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "NamedValue*"),
    },
    "Batched": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32"), "trailing_shape": (4, "int64*")},
    "NamedBatched": {"key": (1, "string"), "value": (2, "Batched")},
    "Record": {"type_tag": (1, "string"), "fields": (2, "NamedBatched*"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {"loss_fn_output_type": (1, "string"), "loss_fn_outputs": (2, "Record*"), "metrics": (3, "Number*")},
    "Sequence": {"stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes")},
    "SampleResponse": {"sequences": (1, "Sequence*")},
}
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.int64), 3: np.dtype(np.int32)}
FLOAT32 = 1
STOP_REASONS = {"stop": 0, "length": 1}


class ClientMistake(Exception):
    """A mistake of the client. The message names the field."""


def _message_classes() -> dict[str, Any]:
    kinds: Any = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="rlhfless_service.proto", package="rlhfless_service", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            of, label = kind.removesuffix("*"), kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            if of in MESSAGES:
                reference = f".{file.package}.{of}"
                message.field.add(name=field, number=number, label=label, type=kinds.TYPE_MESSAGE, type_name=reference)
            else:
                message.field.add(name=field, number=number, label=label, type=getattr(kinds, f"TYPE_{of.upper()}"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in MESSAGES}


CLASSES = _message_classes()


@dataclass(frozen=True)
class Datum:
    """A sequence to train on. `tokens` (n,) int64 are the model's input; each of `inputs` is (n,), among them `target_tokens`."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class PassesRequest:
    model_id: str
    seq_id: int
    loss: str
    config: Mapping[str, float]
    forward_only: bool
    data: Sequence[Datum]


def read_passes(body: bytes) -> PassesRequest:
    """Read a ForwardBackwardRequest. Raises ClientMistake."""
    try:
        message = CLASSES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise ClientMistake(f"body: not a ForwardBackwardRequest in protobuf ({error})") from None
    config = {one.key: one.value for one in message.loss_fn_config}
    for one in message.loss_fn_config_v2:
        if one.value.text:
            raise ClientMistake(f"loss_fn_config.{one.key}: must be a number, not {one.value.text!r}")
        config[one.key] = one.value.number
    data = [_datum(one, f"data[{number}]") for number, one in enumerate(message.data)]
    if not data:
        raise ClientMistake("data: must have at least one datum")
    return PassesRequest(message.model_id, message.seq_id, message.loss_fn, config, message.forward_only, data)


def _datum(message: Any, where: str) -> Datum:
    parts = []
    for chunk in message.model_input:
        if chunk.image or chunk.dmel:
            raise ClientMistake(f"{where}.model_input: only text is served, not images or audio")
        parts.append(_array(chunk.encoded_text.tokens, DTYPES[3], f"{where}.model_input"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
    inputs = {}
    for one in message.loss_fn_inputs:
        name = f"{where}.loss_fn_inputs.{one.key}"
        tensor = one.value
        if tensor.sparse_csr or tensor.dtype not in DTYPES:
            raise ClientMistake(f"{name}: must be a dense tensor of float32, int64 or int32")
        inputs[one.key] = _array(tensor.dense, DTYPES[tensor.dtype], name)
        if len(inputs[one.key]) != len(tokens):
            raise ClientMistake(
                f"{name}: must have one value for each of the {len(tokens)} tokens of model_input, not {len(inputs[one.key])}"
            )
    if not len(tokens):
        raise ClientMistake(f"{where}.model_input: has no tokens")
    return Datum(tokens, inputs)


def _array(content: bytes, dtype: np.dtype[Any], name: str) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise ClientMistake(f"{name}: {len(content)} bytes are not whole values of {dtype}")
    return np.frombuffer(content, dtype)


def write_passes(logprobs: Sequence[np.ndarray], loss: float) -> bytes:
    """Write a ForwardBackwardOutput. `logprobs`: of each datum, (tokens,) float32. `loss`: the sum over all tokens."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    offsets = np.cumsum([0, *(one.nbytes for one in logprobs)], dtype=np.int64)
    data = b"".join(one.astype(np.float32).tobytes() for one in logprobs)
    record.fields.add(key="logprobs").value.MergeFrom(CLASSES["Batched"](data=data, offsets=offsets.tobytes(), dtype=FLOAT32))
    message.metrics.add(key="loss:sum", value=loss)
    return message.SerializeToString()


def write_samples(sequences: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> bytes:
    """Write a SampleResponse. `sequences`: finish reason, tokens and log-probabilities of each."""
    message = CLASSES["SampleResponse"]()
    for reason, tokens, logprobs in sequences:
        of = {"tokens": tokens.astype(np.int32).tobytes(), "logprobs": logprobs.astype(np.float32).tobytes()}
        message.sequences.add(stop_reason=STOP_REASONS[reason], **of)
    return message.SerializeToString()
