"""``m3 demo``: serve a tiny MiniMax-M3 with the real vLLM and two ranks, fused and stock, and compare what they say."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
from attrs import frozen

from m3_core.errors import M3Error
from m3_core.faults import Site
from m3_vllm.cli import tiny
from m3_vllm.cli.server import Server
from m3_vllm.tiny_checkpoint import TinyModel

log = structlog.get_logger(__name__)

RANKS = 2
PROMPTS = (
    "The router reads the hidden state and",
    "Once upon a time there was a mailbox",
    "Sparse attention looks at",
    "def main(prompt: str) -> list[str]:",
    "What is the answer to this question?",
)
"""The first is streamed, the others are sent at once."""

_METRIC = re.compile(r'^m3_(?P<name>[a-z_]+?)(?:_total)?\{.*rank="(?P<rank>\d+)".*\} (?P<value>\S+)$', re.MULTILINE)


@frozen
class Variant:
    """One way to serve the checkpoint.

    Attributes:
        name: for the reader.
        settings: the value of ``additional_config["m3"]``.
    """

    name: str
    settings: Mapping[str, Any]

    @property
    def fused(self) -> bool:
        """Whether plain decode steps must run the launch."""
        return bool(self.settings["mode"] != "off")


@frozen
class Served:
    """What a variant answered.

    Attributes:
        tokens: greedy token ids of each prompt.
        texts: the same as text.
        metrics: m3's figures by rank, then name.
        tokens_per_second: completion tokens over the time in which they were asked for.
    """

    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    metrics: Mapping[int, Mapping[str, int]]
    tokens_per_second: float


def variants(reset_steps: int) -> tuple[tuple[Variant, Variant], ...]:
    """Pairs of a fused and a stock variant that must say the same."""
    fused = {"mode": "require", "reset_steps": reset_steps}
    return (
        (Variant("fused, BF16 experts", fused), Variant("stock, BF16 experts", {"mode": "off"})),
        (
            Variant("fused, MXFP4 experts", {**fused, "experts": "mxfp4"}),
            Variant("stock, MXFP4 experts", {"mode": "off", "experts": "mxfp4"}),
        ),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``m3 demo``."""
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="keep the checkpoint and the servers' logs here (default: a temporary folder)"
    )
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="tokens to ask for after each prompt (default 48)")
    parser.add_argument(
        "--reset-steps",
        type=int,
        default=40,
        metavar="N",
        help="sampled steps between epoch resets, small so that some happen (default 40)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration.

    Returns:
        0 if everything held, else 1.
    """
    if arguments.directory is not None:
        return _run(arguments.directory, arguments.tokens, arguments.reset_steps)
    with tempfile.TemporaryDirectory(prefix="m3-demo-") as folder:
        return _run(Path(folder), arguments.tokens, arguments.reset_steps)


def _run(directory: Path, tokens: int, reset_steps: int) -> int:
    begin = time.monotonic()
    model = directory / "tiny-m3"
    parameters = tiny.write(model, TinyModel())
    _say(f"wrote {model.name}: {TinyModel().layers} layers, {parameters / 1e6:.1f} M random parameters")
    problems: list[str] = []
    for pair in variants(reset_steps):
        answers = []
        for variant in pair:
            _say(f"{variant.name}: starting vLLM with {RANKS} ranks")
            answers.append(serve(model, directory / (re.sub(r"\W+", "-", variant.name) + ".log"), variant, tokens))
            _say(f"{variant.name}: answered and stopped, {time.monotonic() - begin:.0f} s since the start")
        problems += report(pair, answers)
    for problem in problems:
        _say(f"FAILED: {problem}")
    if not problems:
        _say(f"all greedy tokens equal, no fault, nothing left behind; {time.monotonic() - begin:.0f} s in all")
    return 1 if problems else 0


def serve(model: Path, log_file: Path, variant: Variant, tokens: int) -> Served:
    """Start a server, ask it every prompt, stop it.

    Raises:
        M3Error: it did not start, answer, or stop without leaving something behind.
    """
    arguments = ("--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "512")
    with Server(model=model, log_file=log_file, settings=variant.settings, tensor_parallel=RANKS, arguments=arguments) as server:
        begin = time.monotonic()
        first = _stream(server, _request(model, PROMPTS[0], tokens))
        with ThreadPoolExecutor(len(PROMPTS) - 1) as pool:
            rest = list(pool.map(lambda prompt: _complete(server, _request(model, prompt, tokens)), PROMPTS[1:]))
        seconds = time.monotonic() - begin
        answers = [first, *rest]
        metrics = read_metrics(server.get("/metrics"))
    ids = tuple(answer[0] for answer in answers)
    return Served(ids, tuple(answer[1] for answer in answers), metrics, sum(map(len, ids)) / seconds)


def read_metrics(text: str) -> dict[int, dict[str, int]]:
    """m3's figures of a Prometheus exposition, by rank."""
    found: dict[int, dict[str, int]] = {}
    for match in _METRIC.finditer(text):
        found.setdefault(int(match["rank"]), {})[match["name"]] = int(float(match["value"]))
    return found


def report(pair: Sequence[Variant], answers: Sequence[Served]) -> list[str]:
    """Print completions and figures of a fused and a stock run; return what does not hold."""
    problems: list[str] = []
    fused, stock = answers
    for index, prompt in enumerate(PROMPTS):
        same = fused.tokens[index] == stock.tokens[index]
        how = "streamed" if index == 0 else "of four at once"
        print(
            f"  {prompt!r} ({how})\n    -> {fused.texts[index]!r}\n    {len(fused.tokens[index])} greedy tokens, {'the same' if same else 'OTHER'} in stock form"
        )
        if not same:
            at = next((i for i, (a, b) in enumerate(zip(fused.tokens[index], stock.tokens[index], strict=False)) if a != b), "the end")
            problems.append(f"{pair[0].name}: prompt {prompt!r} differs from the stock form at token {at}")
    header = ("variant", "rank", "fused launches", "fused steps", "stock steps", "epoch", "resets", "fault", "tokens/s")
    rows: list[tuple[str, ...]] = [header]
    for variant, answer in zip(pair, answers, strict=True):
        if sorted(answer.metrics) != list(range(RANKS)):
            problems.append(f"{variant.name}: /metrics shows ranks {sorted(answer.metrics)} of {RANKS}")
        for rank, metric in sorted(answer.metrics.items()):
            fault = "none" if not metric["fault"] else f"rank {metric['fault_rank']} at {Site(metric['fault_site']).name}"
            counts = (metric[name] for name in ("launches", "fused_steps", "stock_steps", "epoch", "resets"))
            rows.append((variant.name, str(rank), *map(str, counts), fault, f"{answer.tokens_per_second:.1f}"))
            problems += _problems(variant, rank, metric)
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)
    return problems


def _problems(variant: Variant, rank: int, metric: Mapping[str, int]) -> list[str]:
    where = f"{variant.name}, rank {rank}"
    problems = [f"{where}: the fault word is set"] if metric["fault"] else []
    if variant.fused and not (metric["launches"] and metric["resets"]):
        problems.append(f"{where}: {metric['launches']} launches and {metric['resets']} resets; both should have happened")
    if not variant.fused and metric["launches"]:
        problems.append(f"{where}: {metric['launches']} launches with mode off")
    return problems


def _request(model: Path, prompt: str, tokens: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _complete(server: Server, request: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    choice = server.post("/v1/completions", request)["choices"][0]
    return tuple(choice["token_ids"]), choice["text"]


def _stream(server: Server, request: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    ids: list[int] = []
    text = ""
    for event in server.stream("/v1/completions", request):
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
            text += choice["text"]
    if not ids:
        raise M3Error("the stream held no token ids")
    return tuple(ids), text


def _say(text: str) -> None:
    print(f"m3 demo: {text}", flush=True)
