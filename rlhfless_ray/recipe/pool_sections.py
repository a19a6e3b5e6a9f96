"""Recipe section of a pool of nodes for engines."""

from __future__ import annotations

from pydantic import Field, model_validator

from placement.pools import OWN
from rlhfless_ray.recipe.section import Name, Section

MARKET_LABEL, MODEL_LABEL = "ray.io/market-type", "ray.io/accelerator-type"  # labels that Ray or its autoscaler sets
MARKETS = ("spot", "on-demand")
OTHER_VENDORS = (
    "AMD-",
    "Intel-",
    "TPU-",
    "Ascend",
    "aws-neuron",
    "MXC",
    "FURIOSA",
)  # how Ray's names of accelerators without an engine begin


class PoolConfig(Section):
    name: Name = Field(min_length=1, pattern=r"^\w[\w.-]*$")
    """Name of the pool in plans, ledger and metrics. `own` is taken: it is the pool of all nodes that no other pool has."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Ray labels of its nodes, such as `{market: spot}`. Empty: what Ray says of a node decides. A pool `spot` or `on-demand` has the
    nodes of this `ray.io/market-type`, and a pool of any other name those of this `ray.io/accelerator-type`, such as `A100`."""
    price_per_hour: float | None = Field(None, ge=0)
    """Money per hour of one of its slots. None: the price of any slot (`price`)."""
    preempt_per_hour: float = Field(0.0, ge=0)
    """Expected preemptions of one of its nodes per hour. The run observes how many there are, and plans with both."""
    notice_s: float = Field(0.0, ge=0)
    """Seconds between the notice of a preemption and the end of the node. 0: a node may end without notice."""
    max: int | None = Field(None, ge=1)
    """Most slots that engines lease in it at once. None: as many as `rollout.max_actors` allows."""
    width: int | None = Field(None, ge=1)
    """Slots of one engine, as `rollout.tensor_parallel`. None: that value."""

    @model_validator(mode="after")
    def _check_nodes(self) -> PoolConfig:
        if self.name == OWN:
            raise ValueError("`own` is the pool of the nodes that no other pool has; give this one another name")
        model = self.node_labels.get(MODEL_LABEL, "")
        if model.startswith(OTHER_VENDORS):
            raise ValueError(f"there is no engine for {model}, the nodes of pool {self.name}; leave the pool out")
        return self

    @property
    def node_labels(self) -> dict[str, str]:
        """Return the labels of its nodes, those that follow from its name included."""
        return self.labels or {MARKET_LABEL if self.name in MARKETS else MODEL_LABEL: self.name}
