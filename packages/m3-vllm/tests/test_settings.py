from __future__ import annotations

from pathlib import Path

import pytest

from m3_core.errors import ConfigurationError, RefusalError
from m3_vllm.settings import Experts, Mode, Settings


def test_defaults() -> None:
    assert Settings.parse(None) == Settings.parse({}) == Settings.from_additional_config(None) == Settings()
    assert Settings() == Settings(mode=Mode.AUTO, experts=Experts.CHECKPOINT, wait_seconds=10.0, grid=None, reset_steps=None)


def test_every_key() -> None:
    section = {"mode": "require", "experts": "mxfp4", "wait_seconds": 3, "grid": 2, "reset_steps": 40, "flight_directory": "/flights"}
    expected = Settings(
        mode=Mode.REQUIRE, experts=Experts.MXFP4, wait_seconds=3.0, grid=2, reset_steps=40, flight_directory=Path("/flights")
    )
    assert Settings.from_additional_config({"m3": section, "another plugin": {"mode": 7}}) == expected
    assert isinstance(expected.wait_seconds, float)


def test_flight_records_go_to_the_users_state_unless_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert Settings().flight_directory == Path("/home/somebody/.local/state/m3/flight")
    monkeypatch.setenv("XDG_STATE_HOME", "relative, to be ignored")
    assert Settings().flight_directory == Path("/home/somebody/.local/state/m3/flight")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert Settings().flight_directory == Settings.parse({"flight_directory": None}).flight_directory == Path("/state/m3/flight")
    assert Settings.parse({"flight_directory": False}).flight_directory is None


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
        ("flight_directory", "relative/folder"),
        ("flight_directory", ""),
        ("flight_directory", True),
        ("flight_directory", 0),
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
