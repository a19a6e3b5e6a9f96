"""vLLM's worker for a policy with drafts, whose hidden states an EAGLE-3 head may read, or whose routers' choices are recorded."""

from __future__ import annotations

from vllm.platforms import current_platform

from rlhfless_ray.engine.router_choices import RouterChoices

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

LAYERS = "states_of_layers"  # in vLLM's `additional_config`: the layers before which the head reads; none for vLLM's default
EXPERTS = "records_experts"  # in the same place: whether the routers' choices are recorded


class StatesWorker(Worker):  # type: ignore[misc, valid-type]
    """A worker whose model returns the hidden states of inner layers beside its output, or which records what routers choose.

    Both begin before the first pass, so that compiled models and CUDA graphs do it too.
    """

    choices: RouterChoices | None = None

    def load_model(self, **options: object) -> None:
        super().load_model(**options)
        model, config = self.model_runner.get_model(), self.vllm_config.additional_config
        if LAYERS in config:
            model.set_aux_hidden_state_layers(tuple(config[LAYERS]) or model.get_eagle3_default_aux_hidden_state_layers())
            self.model_runner.use_aux_hidden_state_outputs = True
        if self.vllm_config.speculative_config is not None:
            # Otherwise vLLM captures whole CUDA graphs only of steps in which each sequence has all drafted tokens, which are rare.
            # Steps without drafts would take longer than in an engine without them.
            self.model_runner.uniform_decode_query_len = self.model_runner.cudagraph_dispatcher.uniform_decode_query_len = 1
        if EXPERTS in config:
            self.choices = RouterChoices(self.model_runner)
