from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3_core.errors import ConfigurationError
from m3_core.plan import GraphMode, Route, StepFacts, StepPlan, plan_step

DECODE = StepFacts(rows=4, num_decodes=3, num_decode_tokens=3, slots=4, seq_lens=3, block_table_rows=3)


@pytest.mark.parametrize("mode", [GraphMode.NONE, GraphMode.FULL])
def test_plain_decode_is_fused(mode: GraphMode) -> None:
    plan = plan_step(attrs.evolve(DECODE, graph_mode=mode), max_rows=16)
    assert plan == StepPlan(Route.FUSED, ())
    assert plan.fused


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"closed": True}, "the executor is closed"),
    ({"faulted": True}, "a fault is set"),
    ({"forward_context": False}, "no forward context"),
    ({"intermediate_tensors": True}, "another pipeline stage"),
    ({"rows": 17, "slots": 17}, "17 rows; launches were built for 1 to 16"),
    ({"graph_mode": GraphMode.PIECEWISE}, "replayed in pieces"),
    ({"sparse_metadata": False}, "no sparse attention metadata"),
    ({"decode_metadata": False}, "no decode part"),
    ({"num_decodes": 0}, "no request decodes"),
    ({"num_prefills": 1}, "1 requests prefill 0 tokens"),
    ({"num_prefill_tokens": 9}, "0 requests prefill 9 tokens"),
    ({"num_decode_tokens": 0}, "0 decode tokens in 4 rows"),
    ({"num_decode_tokens": 5}, "5 decode tokens in 4 rows"),
    ({"seq_lens": 2}, "2 sequence lengths for 3 decode requests"),
    ({"block_table_rows": 2}, "2 block table rows for 3 decode requests"),
    ({"slots_are_int64": False}, "not int64"),
    ({"slots": 3}, "3 slots for 4 rows"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_each_reason_alone(change: dict[str, Any], named: str) -> None:
    plan = plan_step(attrs.evolve(DECODE, **change), max_rows=16)
    assert plan.route is Route.STOCK
    assert len(plan.reasons) == 1
    assert named in plan.reasons[0]


@given(st.sets(st.integers(0, len(CHANGES) - 1)))
def test_reasons_add_up(chosen: set[int]) -> None:
    change = {key: value for index in sorted(chosen) for key, value in CHANGES[index][0].items()}
    plan = plan_step(attrs.evolve(DECODE, **change), max_rows=16)
    assert plan.fused == (not chosen)
    assert len(plan.reasons) >= (1 if chosen else 0)


def test_no_rows() -> None:
    plan = plan_step(attrs.evolve(DECODE, rows=0), max_rows=16)
    assert plan.reasons == ("0 rows; launches were built for 1 to 16", "3 decode tokens in 0 rows")


def test_bad_input() -> None:
    with pytest.raises(ConfigurationError, match="num_prefills is -1"):
        attrs.evolve(DECODE, num_prefills=-1)
    for rows in (0, 65):
        with pytest.raises(ConfigurationError, match=f"max_rows is {rows}"):
            plan_step(DECODE, max_rows=rows)
    with pytest.raises(ConfigurationError, match="route stock with reasons"):
        StepPlan(Route.STOCK, ())
    with pytest.raises(ConfigurationError, match="route fused with reasons"):
        StepPlan(Route.FUSED, ("why",))
