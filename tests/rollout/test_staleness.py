"""The age of tokens in weight versions, and its bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.rollout.staleness import check_lag
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId

pytestmark = pytest.mark.pure


def sample(parts: list[tuple[int, int]]) -> Sample:
    """A response whose parts, (version, tokens), were drawn by these versions."""
    tokens = sum(count for _, count in parts)
    completion = Completion(0, np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), "stop", parts[-1][0], tuple(parts))
    return Sample(Prompt(0, "", (1,)), SampleId(0, 1, 0), completion)


@given(st.integers(0, 3), st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=4), max_size=5))
def test_the_bound_holds_for_every_token_and_the_lag_is_the_mean_over_tokens(most: int, responses: list[list[tuple[int, int]]]) -> None:
    newest = 5
    ages = [newest - version for parts in responses for version, count in parts for _ in range(count)]
    samples = [sample(parts) for parts in responses]
    if ages and not 0 <= min(ages) <= max(ages) <= most:
        with pytest.raises(RunError, match=rf"would be trained at version {newest}, but the bound is {most}"):
            check_lag(samples, newest, most)
        return
    found = check_lag(samples, newest, most)
    assert found["lag/max"] == max(ages, default=0) and found["lag/mean"] == pytest.approx(np.mean(ages) if ages else 0)
    shares = [found[f"lag/share_{lag}"] for lag in range(most + 1)]
    assert shares == pytest.approx([(ages or [0]).count(lag) / len(ages or [0]) for lag in range(most + 1)])
