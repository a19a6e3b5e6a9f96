"""What a parked engine on a GPU would lose: tensors that are neither parameters nor buffers."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rlhfless_ray.engine.worker_weights import restore_unregistered, save_unregistered


class Attention(torch.nn.Module):
    """As vLLM's layers are: a cache, an implementation with the slopes of ALiBi, and views of what is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(3))
        self.kv_cache, self.scale, self.view = torch.ones(8), torch.tensor([2.0]), self.table[1:]
        self.elsewhere, self.empty = torch.ones(2, device="meta"), torch.tensor([])
        self.impl = SimpleNamespace(alibi_slopes=torch.tensor([0.5, 0.25]), shared=self.scale, weight=self.weight.data)
        whole = torch.tensor([1.0, 2.0, 3.0])
        self.first, self.parts = whole[:1], {"rest": [whole[1:]]}
        self.parts["itself"] = self.parts
        self.states = [(torch.ones(2),)]  # a cache of a hybrid model
        self.quant_method = SimpleNamespace(scales=(torch.tensor([4.0], dtype=torch.bfloat16),))


def test_unregistered_tensors_survive() -> None:
    model = Attention()
    worker = SimpleNamespace(get_model=lambda: model, model_runner=SimpleNamespace(kv_caches=[model.kv_cache, *model.states]))
    restore_unregistered(worker)  # of an engine that was never parked
    save_unregistered(worker)
    lost = (model.weight.data, model.table, model.kv_cache, model.states[0][0])
    kept = (model.scale, model.impl.alibi_slopes, model.first, model.parts["rest"][0], model.quant_method.scales[0])
    for tensor in (*lost, *kept):
        tensor.zero_()
    save_unregistered(worker)  # parked again: nothing can be read
    restore_unregistered(worker)
    assert not any(tensor.any() for tensor in lost)
    assert [tensor.tolist() for tensor in kept] == [[2.0], [0.5, 0.25], [1.0], [2.0, 3.0], [4.0]]
    model.scale.zero_()
    restore_unregistered(worker)
    assert model.scale.tolist() == [0.0], "only once"
