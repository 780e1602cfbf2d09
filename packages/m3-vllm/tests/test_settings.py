from __future__ import annotations

import pytest

from m3_core.errors import ConfigurationError, RefusalError
from m3_vllm.settings import Experts, Mode, Settings


def test_defaults() -> None:
    assert Settings.parse(None) == Settings.parse({}) == Settings.from_additional_config(None) == Settings()
    assert Settings() == Settings(mode=Mode.AUTO, experts=Experts.CHECKPOINT, wait_seconds=10.0, grid=None, reset_steps=None)


def test_every_key() -> None:
    section = {"mode": "require", "experts": "mxfp4", "wait_seconds": 3, "grid": 2, "reset_steps": 40}
    expected = Settings(mode=Mode.REQUIRE, experts=Experts.MXFP4, wait_seconds=3.0, grid=2, reset_steps=40)
    assert Settings.from_additional_config({"m3": section, "another plugin": {"mode": 7}}) == expected
    assert isinstance(expected.wait_seconds, float)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mode", "on"),
        ("mode", None),
        ("mode", ["off"]),
        ("experts", "fp8"),
        ("wait_seconds", 0),
        ("wait_seconds", float("nan")),
        ("wait_seconds", "10"),
        ("wait_seconds", True),
        ("grid", 0),
        ("grid", 2.0),
        ("grid", 1025),
        ("reset_steps", 0),
        ("reset_steps", False),
    ],
)
def test_a_bad_value_is_named(key: str, value: object) -> None:
    with pytest.raises(RefusalError) as caught:
        Settings.parse({key: value})
    (reason,) = caught.value.reasons
    assert reason.startswith(f"{key}={value!r} must be ")


def test_all_reasons_come_together() -> None:
    with pytest.raises(RefusalError) as caught:
        Settings.parse({"mode": "on", "wiat_seconds": 3, "grid": -1})
    reasons = caught.value.reasons
    assert len(reasons) == 3
    assert "'auto', 'require', 'off'" in reasons[0]
    assert "unknown key 'wiat_seconds'" in reasons[1]
    assert "wait_seconds" in reasons[1]


def test_a_section_that_is_no_mapping() -> None:
    with pytest.raises(ConfigurationError, match="mapping"):
        Settings.parse("off")
