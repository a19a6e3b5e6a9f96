from __future__ import annotations

import pytest

from placement.price import PriceTable


def test_without_prices_a_slot_second_costs_one() -> None:
    table = PriceTable.of({})
    assert table.is_neutral
    assert {table.per_slot_s(name) for name in ("cpu", "gpu", "H100")} == {1.0}
    assert PriceTable(preemptible_factor=0.3).per_slot_s("gpu", preemptible=True) == pytest.approx(0.3)


def test_prices_per_hour() -> None:
    table = PriceTable.of({"cpu_per_hour": 0.36, "gpu_per_hour": 3.6, "devices_per_hour": {"H100": 7.2}, "preemptible_factor": 0.25})
    assert not table.is_neutral
    assert table.per_slot_s("cpu") == pytest.approx(1e-4)
    assert table.per_slot_s("gpu") == pytest.approx(1e-3)
    assert table.per_slot_s("H100") == pytest.approx(2e-3)
    assert table.per_slot_s("L40S") == pytest.approx(1e-3), "a device without a price of its own costs what a GPU does"
    assert table.per_slot_s("H100", preemptible=True) == pytest.approx(5e-4)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"gpu_per_hours": 3.6}, "did you mean `gpu_per_hour`"),
        ({"cpu": 1}, "did you mean `cpu_per_hour`"),
        ({"xyzzy": 1}, "unknown price `xyzzy`; known are cpu_per_hour"),
        ({"gpu_per_hour": -1}, "`gpu_per_hour` must be a number"),
        ({"gpu_per_hour": "3"}, "`gpu_per_hour` must be a number"),
        ({"cpu_per_hour": True}, "must be a number"),
        ({"devices_per_hour": {"H100": float("nan")}}, "devices_per_hour.H100"),
        ({"devices_per_hour": [1]}, "must map device names"),
        ({"preemptible_factor": 0}, "preemptible_factor"),
        ({"preemptible_factor": 1.5}, "preemptible_factor"),
    ],
)
def test_mistakes_are_named(table: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        PriceTable.of(table)
    assert "\n" not in str(caught.value)


def test_a_resource_without_a_price() -> None:
    with pytest.raises(ValueError, match="no price for `cpu`; known are H100"):
        PriceTable.of({"devices_per_hour": {"H100": 7.2}}).per_slot_s("cpu")
    with pytest.raises(ValueError, match="no price for `h10`; did you mean `H100`"):
        PriceTable.of({"devices_per_hour": {"H100": 7.2}}).per_slot_s("h10")
