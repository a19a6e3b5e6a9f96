"""vLLM's worker for a policy whose hidden states an EAGLE-3 head reads."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

LAYERS = "states_of_layers"  # in vLLM's `additional_config`: the layers before which the head reads; none for vLLM's default


class StatesWorker(Worker):  # type: ignore[misc, valid-type]
    """A worker whose model returns the hidden states of inner layers beside its output."""

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        model = self.model_runner.get_model()
        model.set_aux_hidden_state_layers(
            tuple(self.vllm_config.additional_config[LAYERS]) or model.get_eagle3_default_aux_hidden_state_layers()
        )
        # set before the first pass, so compiled models and CUDA graphs return them too
        self.model_runner.use_aux_hidden_state_outputs = True
