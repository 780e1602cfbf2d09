"""The real server with the plugin found by its entry point: it answers, it streams, it stops and leaves nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from m3_vllm.cli.server import Server, Stopped
from m3_vllm.cli.tiny import write
from m3_vllm.tiny_checkpoint import TinyModel

pytestmark = pytest.mark.serving

ARGUMENTS = ("--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "256")
PROMPTS = ("hello world", "Once upon a time there was a mailbox;", "def main(prompt: str)", "What is the answer")


def test_serves_and_leaves_nothing(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    write(model, TinyModel())
    server = Server(model=model, log_file=tmp_path / "server.log", settings={"mode": "off"}, arguments=ARGUMENTS)
    with server:

        def complete(prompt: str) -> str:
            body = {"model": str(model), "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            choice = server.post("/v1/completions", body)["choices"][0]
            assert choice["finish_reason"] == "length"
            return str(choice["text"])

        alone = [complete(prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(complete, PROMPTS))
        # What a request gets does not depend on who shares its steps.
        assert together == alone
        assert len(set(alone)) == len(PROMPTS)

        body = {"model": str(model), "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        pieces = [event["choices"][0]["text"] for event in server.stream("/v1/completions", body)]
        assert "".join(pieces) == alone[0]
        assert "m3_vllm.adapters.cpu.model" in server.log_file.read_text()
    assert server.stop() == Stopped(code=0)
