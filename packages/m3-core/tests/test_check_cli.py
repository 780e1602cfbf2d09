"""The checker's command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from m3_core.check import cli
from m3_core.check.cli import main
from m3_core.check.mutants import MUTANTS
from m3_core.check.rules import ATTENTION_ONLY, BOTH_IN_ORDER, Scope
from m3_core.check.scopes import SCOPES
from m3_core.check.simulator import Setup, simulate
from m3_core.check.traces import write
from m3_core.errors import ConfigurationError


def test_scopes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scope", "limit", "--scope", "widths"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["world", "states", "transitions", "depth", "seconds", "verdict"]
    assert [line.split()[0] for line in lines[1:]] == ["limit", "widths"]
    assert all(line.endswith("every property holds") for line in lines[1:])


def test_a_broken_world_prints_its_trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "tags-from-zero")
    broken = attrs.evolve(SCOPES[0], name="broken", rules=mutant.rules, scope=mutant.scope)
    monkeypatch.setattr(cli, "SCOPES", (broken,))
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "BROKEN STALE: no stale pair is accepted" in out
    assert "rank 0                                      rank 1" in out
    assert "VIOLATION STALE: rank 1 accepts a cleared word in its launch of epoch 0" in out


def test_a_mutant_prints_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mutant", "one-region", "--mutant", "abort-only-local", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "caught by OVERWRITE: the attention and the FFN exchange share one region" in out
    assert "VIOLATION LEARN" in out
    assert out.endswith("2 of 2 caught\n")


def test_a_missed_mutant_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = attrs.evolve(MUTANTS[0], rules=MUTANTS[0].base)
    monkeypatch.setattr(cli, "MUTANTS", (harmless,))
    assert main(["--mutants"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out
    assert out.endswith("0 of 1 caught\n")


def test_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = simulate(Setup(seed=1, ranks=2, steps=3)).records
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    write(good, records)
    write(bad, records[1:])
    assert main(["--trace", str(good)]) == 0
    assert main(["--trace", str(bad)]) == 1
    assert main(["--trace", str(tmp_path / "none.jsonl")]) == 2
    captured = capsys.readouterr()
    assert f"{good}: {len(records)} events of 2 ranks, the protocol allows it" in captured.out
    assert "problems\n  event " in captured.out
    assert "none.jsonl cannot be read: No such file or directory" in captured.err


def test_simulations(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--simulate", "3", "--seed", "100"]) == 0
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines()[:3]] == ["seed 100", "seed 101", "seed 102"]
    assert out.endswith("3 of 3 runs keep every property\n")
    assert main(["--seconds", "0.000001"]) == 0
    assert capsys.readouterr().out.endswith("8 of 8 runs keep every property\n")
    monkeypatch.setattr("m3_core.epochs.TagArithmetic.parity", lambda self, epoch: 0)
    assert main(["--simulate", "3", "--seed", "100"]) == 1
    assert "WrongValueError" in capsys.readouterr().out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    for item in (*SCOPES, *MUTANTS):
        assert f"\n{item.name} " in f"\n{out}"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--scope", "none"], "unknown none; known: exchange"),
        (["--mutant", "none"], "unknown none"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--simulate", "0"], "--simulate is 0; pass at least 1"),
        (["--seconds", "nan"], "--seconds is nan; pass a number above 0"),
        (["--seconds", "0"], "--seconds is 0.0; pass a number above 0"),
    ],
)
def test_bad_arguments(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(("content", "named"), [(b"\xff\xfe", "is no text"), (b"[" * 100_000, "line 1 of the recording is no event")])
def test_recordings_that_are_none(content: bytes, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_bytes(content)
    assert main(["--trace", str(path)]) == 2
    assert named in capsys.readouterr().err


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "m3_core.check", "--scope", "limit"], check=True, capture_output=True, text=True)
    assert "every property holds" in done.stdout


def test_scopes_that_cannot_be() -> None:
    for name in ("ranks", "launches", "channels"):
        with pytest.raises(ConfigurationError, match=f"{name} is 0"):
            Scope(**{name: 0})
    for blocks in ((), ("x",)):
        with pytest.raises(ConfigurationError, match="blocks are"):
            Scope(blocks=blocks)
    for rows in ((), (0,)):
        with pytest.raises(ConfigurationError, match="rows are"):
            Scope(rows=rows)
    with pytest.raises(ConfigurationError, match="lower last_epoch"):
        Scope(ranks=3, channels=2)
    assert Scope(blocks=(BOTH_IN_ORDER,)).ordered
    assert not Scope(blocks=(BOTH_IN_ORDER, ATTENTION_ONLY)).ordered
