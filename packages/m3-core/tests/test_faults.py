from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3_core.errors import ConfigurationError, FaultError
from m3_core.faults import MAX_FAULT_LAYER, MAX_FAULT_PEER, Fault, Site

I32 = st.integers(-(2**31), 2**31 - 1)
FAULTS = st.builds(
    Fault,
    failed=st.booleans(),
    rank=I32,
    epoch=I32,
    site=st.sampled_from(Site),
    peer=st.none() | st.integers(0, MAX_FAULT_PEER),
    layer=st.none() | st.integers(0, MAX_FAULT_LAYER),
)


def test_site_numbers() -> None:
    names = ["HOST", "REDUCE", "NORM", "ROUTER", "ROUTE", "TABLE", "UP", "DOWN", "FINAL", "EPOCH", "WRAP", "HANDSHAKE", "INJECT", "PEER"]
    assert [(site.name, site.value) for site in Site] == list(zip(names, range(14), strict=True))


@pytest.mark.parametrize("site", list(Site))
def test_every_site_says_what_and_what_to_do(site: Site) -> None:
    assert site.waited_for
    assert len(site.advice) > 10
    text = Fault(True, 1, 7, site, peer=3, layer=5).describe({5: "model.layers.5"})
    assert text.startswith(f"rank 1 failed at layer 5 (model.layers.5), stage {site.name}, epoch 7: ")
    assert site.waited_for in text
    assert text.endswith(site.advice)
    assert ("from rank 3" in text) == site.is_wait


@given(FAULTS)
def test_round_trip(fault: Fault) -> None:
    assert Fault.decode(fault.encode()) == fault


@given(st.binary(min_size=16, max_size=32))
def test_every_bit_pattern_reads(words: bytes) -> None:
    fault = Fault.decode(words)
    flag, rank, epoch, site = struct.unpack("<4i", words[:16])
    assert (fault.failed, fault.rank, fault.epoch) == (flag != 0, rank, epoch)
    assert fault.encode()[4:12] == words[4:12]
    assert fault.describe()
    assert int.from_bytes(fault.encode()[12:], "little") == site & 0x7FFFFFFF


def test_plain_site_numbers_are_understood() -> None:
    assert Fault.decode(struct.pack("<4i", 1, 2, 33, 8)) == Fault(True, 2, 33, Site.FINAL)


def test_exact_bytes() -> None:
    assert Fault.none().encode() == bytes(16)
    assert Fault.host_abort(3).encode() == struct.pack("<4i", 1, 3, -1, 0)
    assert Fault(True, 2, 9, Site.REDUCE, peer=3, layer=4).encode() == struct.pack("<4i", 1, 2, 9, 1 | 4 << 8 | 5 << 16)


def test_word_order() -> None:
    assert Fault(True, 2, 9, Site.REDUCE).words() == (9 | 1 << 32, 1 | 2 << 32)
    assert Fault.host_abort(1).words() == (0xFFFFFFFF, 1 | 1 << 32)


def test_sentences() -> None:
    assert Fault.none().describe() == "no fault"
    assert Fault.host_abort(2).describe() == (
        "rank 2 failed at stage HOST: its host aborted the step; that rank's log holds the exception that made its host abort"
    )
    assert "layer 4, stage REDUCE, epoch 9: waited for the peers' attention output (triples) from rank 3 and gave up" in str(
        FaultError(Fault(True, 2, 9, Site.REDUCE, peer=3, layer=4))
    )


def test_unknown_site() -> None:
    fault = Fault.decode(struct.pack("<4i", 1, 2, 33, 77))
    assert fault.site is None
    assert fault.site_number == 77
    assert fault.describe() == (
        "rank 2 failed at unknown site 77, epoch 33; its version of m3 differs from this one: install the same on every rank"
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"peer": 255}, "peer is 255"),
        ({"peer": -1}, "peer is -1"),
        ({"layer": 32767}, "layer is 32767"),
        ({"rank": 2**31}, "rank is 2147483648"),
        ({"epoch": -(2**31) - 1}, "epoch is -2147483649"),
        ({"site_number": 2}, "site is REDUCE"),
        ({"site": None, "site_number": 2}, "site is None but 2 is NORM"),
        ({"site": None, "site_number": 256}, "site_number is 256"),
    ],
)
def test_fields_that_do_not_fit(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Fault(**{"failed": True, "rank": 0, "epoch": 0, "site": Site.REDUCE, **arguments})  # type: ignore[arg-type]


def test_too_few_bytes() -> None:
    with pytest.raises(ConfigurationError, match="15 bytes"):
        Fault.decode(bytes(15))
