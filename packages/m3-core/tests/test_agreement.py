from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3_core.agreement import Agreement, Verdict, decode_verdict, encode_verdict
from m3_core.errors import CollectiveError, ConfigurationError

PHASES = st.text(min_size=1).filter(lambda text: "\0" not in text and text.isprintable())


@given(st.integers(0, 7), PHASES, st.none() | st.text(st.characters(codec="utf-8")))
def test_verdict_round_trip(rank: int, phase: str, reason: str | None) -> None:
    assert decode_verdict(rank, phase, encode_verdict(phase, reason)) == Verdict(rank, reason)


@given(st.binary())
def test_any_payload_is_a_verdict(payload: bytes) -> None:
    verdict = decode_verdict(3, "clear", payload)
    assert verdict.rank == 3


def test_exact_bytes() -> None:
    assert encode_verdict("drain", None) == b"\x01\x00drain\x00"
    assert encode_verdict("drain", "no") == b"\x01\x01drain\x00no"


def test_another_phase_is_a_failure() -> None:
    assert decode_verdict(1, "clear", encode_verdict("drain", None)).reason == (
        "is in phase 'drain', not 'clear': every rank must enter the same phases in the same order"
    )


@pytest.mark.parametrize("payload", [b"", b"\x01\x00", b"\x02\x00a\x00", b"\x01\x02a\x00", b"\x01\x00abc"])
def test_unreadable_payload_is_a_failure(payload: bytes) -> None:
    assert "cannot read" in str(decode_verdict(0, "a", payload).reason)


def test_agreement_of_ready_ranks() -> None:
    agreement = Agreement.from_payloads("map", [encode_verdict("map", None)] * 4)
    assert agreement.ok
    assert agreement.failed == ()
    agreement.require(2)


def test_agreement_carries_every_reason() -> None:
    reasons = [None, "out of memory", None, "no device"]
    agreement = Agreement.from_payloads("map", [encode_verdict("map", reason) for reason in reasons])
    assert not agreement.ok
    assert agreement.failed == (Verdict(1, "out of memory"), Verdict(3, "no device"))
    with pytest.raises(CollectiveError) as own:
        agreement.require(1)
    with pytest.raises(CollectiveError) as other:
        agreement.require(0)
    assert "this rank failed" in str(own.value)
    assert "this rank was ready, another failed" in str(other.value)
    for caught in (own, other):
        assert "rank 1: out of memory; rank 3: no device" in str(caught.value)
        assert caught.value.verdicts == agreement.verdicts


@pytest.mark.parametrize("ranks", [[], [1], [0, 2], [1, 0]])
def test_agreement_needs_every_rank_in_order(ranks: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="phase map has verdicts of ranks"):
        Agreement("map", tuple(Verdict(rank, None) for rank in ranks))


@pytest.mark.parametrize("phase", ["", "a\0b"])
def test_phase_names(phase: str) -> None:
    with pytest.raises(ConfigurationError, match="a phase has a name"):
        encode_verdict(phase, None)
