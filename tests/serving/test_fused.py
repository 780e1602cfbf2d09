"""The fused launches under the real server, against the stock layers under the same server."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from m3_core.errors import ResourceError
from m3_vllm.cli.server import SHARED_MEMORY, Server, Stopped
from m3_vllm.cli.tiny import write
from m3_vllm.tiny_checkpoint import TinyModel

pytestmark = pytest.mark.serving

ARGUMENTS = ("--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "256")
PROMPTS = (
    "hello world",
    "Once upon a time there was a mailbox;",
    "def main(prompt: str)",
    "What is the answer to this question? " * 8,
    "0 7 14 21 28",
    "A router reads the hidden state",
)
TOKENS = 32
LAYERS = 3
RESET_STEPS = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fused") / "tiny"
    write(folder, TinyModel())
    return folder


def completion(server: Server, prompt: str, tokens: int = TOKENS) -> str:
    body = {"model": str(server.model), "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return str(server.post("/v1/completions", body)["choices"][0]["text"])


def completions(server: Server) -> list[str]:
    """One prompt streamed, one alone, then all at once: prefill, decode and mixed steps."""
    body = {"model": str(server.model), "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    streamed = [event["choices"][0]["text"] for event in server.stream("/v1/completions", body)]
    alone = ["".join(streamed), completion(server, PROMPTS[1])]
    assert len(streamed) > 1
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: completion(server, prompt), PROMPTS))
    # What a request gets does not depend on who shares its steps.
    assert together[:2] == alone
    return together


def metrics(server: Server) -> dict[tuple[str, str], float]:
    """m3's own figures by (name, rank)."""
    found = re.findall(r'^(m3_\w+)\{engine="0",rank="(\d)"\} (\S+)$', server.get("/metrics"), re.MULTILINE)
    return {(name, rank): float(value) for name, rank, value in found}


def check_counts(fused: dict[tuple[str, str], float]) -> None:
    """Figures after :func:`completions` with launches: what was launched, and that every rank counted alike."""
    for rank in "01":
        steps = fused["m3_fused_steps_total", rank]
        # Two prompts alone decode in steps of their own, all but the first token of each.
        assert steps >= 2 * (TOKENS - 1)
        assert fused["m3_launches_total", rank] == LAYERS * steps
        assert fused["m3_outputs_total", rank] == steps + fused["m3_stock_steps_total", rank]
        assert fused["m3_resets_total", rank] == fused["m3_outputs_total", rank] // RESET_STEPS >= 3
        assert fused["m3_epoch", rank] < LAYERS * RESET_STEPS
        assert fused["m3_fault", rank] == 0
    for name in {name for name, _ in fused}:
        assert fused[name, "0"] == fused[name, "1"], name


def check_stock(stock: dict[tuple[str, str], float]) -> None:
    for rank in "01":
        assert stock["m3_launches_total", rank] == stock["m3_fused_steps_total", rank] == 0
        assert stock["m3_stock_steps_total", rank] == stock["m3_outputs_total", rank] > 0


def ended_well(events: Iterator[dict[str, Any]]) -> bool:
    """Whether a stream runs to its end without an error."""
    try:
        return all("error" not in event for event in events)
    except (ResourceError, OSError, HTTPException):
        return False


def kill_a_rank(server: Server) -> None:
    """SIGKILL of a worker while it decodes: the request fails, the server ends by itself, no process and no segment of m3 stays."""
    body = {"model": str(server.model), "prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    events = server.stream("/v1/completions", body, seconds=60.0)
    for _ in range(5):
        next(events)
    segments = server.segments()
    assert sum("status" in name for name in segments) == 2
    victim = next(pid for pid, command in server.processes().items() if "TP1" in command)
    os.kill(victim, signal.SIGKILL)
    assert not ended_well(events)
    server.wait_end(60.0)
    left = {name for name in segments if (SHARED_MEMORY / name).exists()}
    # vLLM's own segments outlive a killed worker; nobody else takes them away.
    for name in left:
        if name.startswith("vllm_dist"):
            (SHARED_MEMORY / name).unlink()
    assert {name for name in left if name.startswith("m3.")} == set()


def test_bf16_launches_then_stock_layers_by_refusal(checkpoint: Path, tmp_path: Path) -> None:
    """Mode "require" with launches, and a rank killed at the end; mode "auto" where the launches are refused: the same text."""
    flights = str(tmp_path / "flight")
    settings: dict[str, Any] = {"mode": "require", "reset_steps": RESET_STEPS, "wait_seconds": 2.0, "flight_directory": flights}
    server = Server(model=checkpoint, log_file=tmp_path / "require.log", settings=settings, arguments=ARGUMENTS)
    with server:
        fused = completions(server)
        check_counts(metrics(server))
        kill_a_rank(server)
    assert server.stop().processes == ()

    settings = {"mode": "auto", "reset_steps": 999_999}
    with Server(model=checkpoint, log_file=tmp_path / "auto.log", settings=settings, arguments=ARGUMENTS) as server:
        stock = completions(server)
        check_stock(metrics(server))
    assert server.stop() == Stopped(code=0)
    log = [line for line in server.log_file.read_text().splitlines() if "launches_off" in line]
    assert len(log) == 1
    assert "reset_steps=999999" in log[0]
    assert fused == stock
    assert len(set(stock)) == len(PROMPTS)


def test_mxfp4_launches_and_stock_layers_give_the_same_tokens(checkpoint: Path, tmp_path: Path) -> None:
    texts: dict[str, list[str]] = {}
    for mode, check in (("require", check_counts), ("off", check_stock)):
        settings: dict[str, Any] = {"mode": mode, "experts": "mxfp4", "reset_steps": RESET_STEPS}
        with Server(model=checkpoint, log_file=tmp_path / f"{mode}.log", settings=settings, arguments=ARGUMENTS) as server:
            texts[mode] = completions(server)
            check(metrics(server))
        assert server.stop() == Stopped(code=0)
    assert texts["require"] == texts["off"]
