"""Convert weights to the names and shapes that `save_pretrained` writes, which engines and model folders need.

transformers 5 keeps some models in another form than their files: the experts of a mixture are one fused tensor in memory and one
tensor per expert on disk. vLLM loads the files' form only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def saved_state(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a live state dict to the one that `save_pretrained` would write for this model.

    Args:
        model: the transformers model of the state. Only its conversions are used, so its weights may be sharded.
        state: whole tensors by the model's own names, adapters merged, tied copies left out.

    Returns: {name in a file: tensor}. Tensors may be views of those in `state`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return revert_weight_conversion(model, {name: tensor for name, tensor in state.items() if name not in ignored})


def unconverted_names(model: Any) -> set[str]:
    """Return the names of the parameters that files have under the same name and in the same form. Parameters may be divided by ZeRO 3."""
    import torch

    shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in model.named_parameters()}
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    found = saved_state(model, parameters)
    return {name for name, tensor in parameters.items() if found.get(name) is tensor}
