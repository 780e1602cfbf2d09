"""``m3 doctor`` finds what is broken, goes on, and says how to mend it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from m3_vllm.cli import doctor, main


def test_one_failure_does_not_hide_the_other_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> str:
        raise doctor.Trouble("it is broken", "mend it")

    def raising() -> str:
        raise ImportError("no module named x")

    checks = (doctor.Check("a", broken), doctor.Check("b", raising), doctor.Check("c", lambda: "fine"))
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert doctor.run(argparse.Namespace(verbose=False)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "FAILED  a: Trouble: it is broken",
        "        remedy: mend it",
        "FAILED  b: ImportError: no module named x",
        "ok      c: fine",
        "1 checks held, 2 failed",
    ]


def test_versions_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "0.2.0" if name == "m3-comm" else "0.1.0")
    with pytest.raises(doctor.Trouble, match=r"'m3-comm': '0\.2\.0'"):
        doctor.packages()


def test_plugin_filter_that_leaves_m3_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: name == "vllm")
    monkeypatch.setattr(doctor, "version", lambda name: "0.33.0")
    with pytest.raises(doctor.Trouble, match="VLLM_PLUGINS is 'other'"):
        doctor.vllm_version({"VLLM_PLUGINS": "other"})
    assert "vllm 0.33.0" in doctor.vllm_version({"VLLM_PLUGINS": "other,m3"})


def test_missing_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: False)
    with pytest.raises(doctor.Trouble, match="not installed"):
        doctor.vllm_version({})


def test_full_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    def statvfs(path: Any) -> Full:
        return Full()

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(doctor, "DEFAULT_DIRECTORY", tmp_path)
    with pytest.raises(doctor.Trouble, match="4096 bytes free") as caught:
        doctor.shared_memory()
    assert "--shm-size" in caught.value.remedy


@pytest.mark.serving
def test_the_command_runs_every_check_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    out = capsys.readouterr().out
    assert "ok      launch: one rank's launch runs" in out
    assert "ok      kernels:" in out
    assert out.splitlines()[-1] == f"{len(doctor.CHECKS)} checks held, 0 failed", out
    assert code == 0
