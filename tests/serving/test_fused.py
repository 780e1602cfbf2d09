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


@pytest.mark.parametrize("experts", ["checkpoint", "mxfp4"])
def test_fused_and_stock_give_the_same_tokens(checkpoint: Path, tmp_path: Path, experts: str) -> None:
    texts: dict[str, list[str]] = {}
    figures: dict[str, dict[tuple[str, str], float]] = {}
    for mode in ("require", "off"):
        settings: dict[str, Any] = {"mode": mode, "experts": experts, "reset_steps": RESET_STEPS}
        with Server(model=checkpoint, log_file=tmp_path / f"{mode}.log", settings=settings, arguments=ARGUMENTS) as server:
            texts[mode] = completions(server)
            figures[mode] = metrics(server)
        assert server.stop() == Stopped(code=0)
    assert texts["require"] == texts["off"]
    assert len(set(texts["off"])) == len(PROMPTS)

    fused, stock = figures["require"], figures["off"]
    for rank in "01":
        steps = fused["m3_fused_steps_total", rank]
        # Two prompts alone decode in steps of their own, all but the first token of each.
        assert steps >= 2 * (TOKENS - 1)
        assert fused["m3_launches_total", rank] == LAYERS * steps
        assert fused["m3_outputs_total", rank] == steps + fused["m3_stock_steps_total", rank]
        assert fused["m3_resets_total", rank] == fused["m3_outputs_total", rank] // RESET_STEPS >= 3
        assert fused["m3_epoch", rank] < LAYERS * RESET_STEPS
        assert fused["m3_fault", rank] == 0
        assert stock["m3_launches_total", rank] == stock["m3_fused_steps_total", rank] == 0
        assert stock["m3_stock_steps_total", rank] == stock["m3_outputs_total", rank] > 0
    for name in {name for name, _ in fused}:
        assert fused[name, "0"] == fused[name, "1"], name


def test_auto_serves_stock_layers_where_launches_are_refused(tmp_path: Path) -> None:
    folder, settings = tmp_path / "tiny", {"mode": "auto", "reset_steps": 999_999}
    write(folder, TinyModel(top_k=9))
    with Server(model=folder, log_file=tmp_path / "server.log", settings=settings, arguments=ARGUMENTS) as server:
        assert completion(server, PROMPTS[0])
        figures = metrics(server)
    assert server.stop() == Stopped(code=0)
    assert {figures["m3_launches_total", rank] for rank in "01"} == {0}
    log = [line for line in server.log_file.read_text().splitlines() if "launches_off" in line]
    assert len(log) == 1
    assert "top_k is 9" in log[0]
    assert "reset_steps=999999" in log[0]


def test_require_refuses_with_every_reason(tmp_path: Path) -> None:
    folder, settings = tmp_path / "tiny", {"mode": "require", "reset_steps": 999_999}
    write(folder, TinyModel(top_k=9))
    server = Server(model=folder, log_file=tmp_path / "server.log", settings=settings, arguments=ARGUMENTS)
    with pytest.raises(ResourceError, match="ended with code 1"), server:
        pytest.fail("the server answers")
    refusal = next(line for line in server.log_file.read_text().splitlines() if "m3 refuses to build the launches" in line)
    assert "top_k is 9" in refusal
    assert "reset_steps=999999" in refusal
    assert server.stop().processes == ()


def ended_well(events: Iterator[dict[str, Any]]) -> bool:
    """Whether a stream runs to its end without an error."""
    try:
        return all("error" not in event for event in events)
    except (ResourceError, OSError, HTTPException):
        return False


def test_a_killed_rank_ends_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """SIGKILL of a worker while it decodes: the request fails, the server ends by itself, no process and no segment of m3 stays."""
    settings = {"mode": "require", "wait_seconds": 2.0}
    server = Server(model=checkpoint, log_file=tmp_path / "server.log", settings=settings, arguments=ARGUMENTS)
    segments: frozenset[str] = frozenset()
    server.start()
    try:
        server.wait_ready()
        body = {"model": str(checkpoint), "prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        events = server.stream("/v1/completions", body, seconds=60.0)
        for _ in range(5):
            next(events)
        segments = server.segments()
        victim = next(pid for pid, command in server.processes().items() if "TP1" in command)
        os.kill(victim, signal.SIGKILL)
        assert not ended_well(events)
        server.wait_end(60.0)
    finally:
        stopped = server.stop()
        left = {name for name in segments if (SHARED_MEMORY / name).exists()}
        # vLLM's own segments outlive a killed worker; nobody else takes them away.
        for name in left:
            if name.startswith("vllm_dist"):
                (SHARED_MEMORY / name).unlink()
    assert stopped.processes == ()
    assert sum("status" in name for name in segments) == 2
    assert {name for name in left if name.startswith("m3.")} == set()
