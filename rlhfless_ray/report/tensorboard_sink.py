"""Write TensorBoard event files with TensorBoard's own writer.

It imports in 0.4 s. torch.utils.tensorboard and tensorboardX take 2.7 s each, because both import torch, which the driver does
not need.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rlhfless_ray.report.openrlhf_names import Shown
from rlhfless_ray.report.sinks import SinkRun, numbers


class TensorBoard:
    """Write one scalar per number of a row, and a sample's text, under the row's `step`. Not thread-safe.

    After a resume TensorBoard hides values that an earlier process wrote for later steps.
    """

    def __init__(self, run: SinkRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary

        def text(tag: str, words: str) -> Any:
            """Encode a text as torch.utils.tensorboard's add_text does."""
            plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
            content = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[words.encode()])
            content.tensor_shape.dim.add(size=1)
            return self._summary.Value(tag=f"{tag}/text_summary", tensor=content, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin))

        self._text = text
        root = run.watch.tensorboard_path
        folder = Path(root) / run.name if root else run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder), max_queue_size=64, flush_secs=5)
        if run.resume_after_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=run.resume_after_step + 1, session_log=start))

    def write(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in numbers(row).items()]
        values += [
            self._text(key, f"Sample:\n{shown.text}\n\nReward: {shown.reward:.4f}")
            for key, shown in row.items()
            if isinstance(shown, Shown)
        ]
        if isinstance(step, int) and values:
            self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()
