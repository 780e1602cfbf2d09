"""The CPU model under real vLLM, two ranks, against transformers' own MiniMax-M3 on the same BF16 checkpoint.

Where the bound comes from
--------------------------
Both sides compute the same function and differ by roundings to bf16. One rounding moves a value by at most half a unit in the
last place, 2^-8 of the value; spread evenly, by 2^-8 / sqrt(3) of it root mean square. Roundings are independent, and a relative
change of the residual stream passes on through norms and matrices as about the same relative change (gain 1), so N of them on the
way change the final hidden state by sqrt(N) times as much (``relative_error``). A logit is that state's product with a row of the
head, so its standard deviation is the relative error times the state's rms times the row's norm; a log-probability is the
difference of a logit and a weighted mean of logits, hence at most sqrt(2) times that. ``DEVIATIONS`` standard deviations bound
each of some thousand compared values; the mean of absolute values of a normal variable is sqrt(2 / pi) of its deviation.

Choices (experts, blocks) are no small change, so they are imposed on the reference, and each is checked by itself: the reference
must find it within the same error of its own choice. Where the reference runs free, a token whose choice was close may differ.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from m3_vllm.cli.server import cpu_environment
from m3_vllm.cli.tiny import write
from m3_vllm.minimax_m3 import DENSE_LAYERS, HEAD_DIM
from m3_vllm.tiny_checkpoint import TinyModel

sys.path.insert(0, str(Path(__file__).parent))
import reference

pytestmark = pytest.mark.serving

HERE = Path(__file__).parent
PROMPT_TOKENS, CHUNK, GENERATED = 700, 256, 64
DEVIATIONS = 5.0
ROUNDING_RMS = 2.0**-8 / math.sqrt(3)

OURS_DENSE = 13
"""Input norm, fused projection, rotated heads, attention, output projection, sum over ranks, residual, second norm, gate and up,
activation, down, sum over ranks, residual."""
OURS_SPARSE_FIXED = 12
"""The same without gate-and-up and down, which stay float32, and with the shared expert's output; each pick adds two more."""
THEIRS_DENSE = 20
"""Norm, projection, head norm, three of the rotation, scores, softmax, attention, output projection, residual, norm, gate and up,
five of the activation, down, residual."""
THEIRS_SPARSE_FIXED = 29
"""The same, the shared expert beside the routed ones (gate and up, five of the activation, down), the routed scaling and the sum;
each pick adds two more."""


@attrs.frozen
class Run:
    """One run of the real engine, read back."""

    sequence: torch.Tensor
    logprobs: torch.Tensor
    picks: dict[int, torch.Tensor]
    blocks: dict[int, torch.Tensor]


@attrs.frozen
class Bound:
    """What roundings can do, from ``relative_error`` and the sizes in the reference."""

    error: float
    logit: float

    @property
    def each(self) -> float:
        return DEVIATIONS * math.sqrt(2) * self.logit

    @property
    def mean(self) -> float:
        return math.sqrt(2 / math.pi) * math.sqrt(2) * self.logit

    def key(self, router: torch.Tensor) -> float:
        """Difference of two biased scores: the sigmoid's slope is at most 1/4, and the router's input has rms 1."""
        return DEVIATIONS * math.sqrt(2) * self.error * router.norm(dim=1).max().item() / 4

    @property
    def block(self) -> float:
        """Difference of two block scores, each with an error in query and in key, in units of their norms."""
        return DEVIATIONS * math.sqrt(2) * math.sqrt(2) * self.error / math.sqrt(HEAD_DIM)


def relative_error(points: int) -> float:
    return ROUNDING_RMS * math.sqrt(points)


def points(model: TinyModel, dense: int, sparse: int) -> int:
    return DENSE_LAYERS * dense + (model.layers - DENSE_LAYERS) * (sparse + 2 * model.top_k) + 1


def bound(model: TinyModel, oracle: Any, hidden_rms: float, *, reference_rounds: bool) -> Bound:
    error = relative_error(points(model, OURS_DENSE, OURS_SPARSE_FIXED))
    if reference_rounds:
        error = math.hypot(error, relative_error(points(model, THEIRS_DENSE, THEIRS_SPARSE_FIXED)))
    return Bound(error, error * hidden_rms * oracle.lm_head.weight.float().norm(dim=1).max().item())


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture(scope="module")
def checkpoint(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oracle") / "tiny"
    write(folder, model)
    return folder


@pytest.fixture(scope="module")
def prompt(model: TinyModel) -> list[int]:
    return torch.randint(3, model.vocabulary, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def engine_run(checkpoint: Path, prompt: list[int], settings: dict[str, Any], scratch: Path) -> Run:
    request = {"model": str(checkpoint), "ranks": 2, "chunk": CHUNK, "settings": settings, "prompt": prompt, "tokens": GENERATED}
    (scratch / "request.json").write_text(json.dumps(request))
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(HERE / "offline.py"), str(scratch / "request.json"), str(scratch / "answer.json")]
    with (scratch / "engine.log").open("wb") as log:
        done = subprocess.run(
            command, env=cpu_environment(2) | {"PYTHONPATH": path}, stdout=log, stderr=subprocess.STDOUT, timeout=400, check=False
        )
    assert done.returncode == 0, (scratch / "engine.log").read_text()[-4000:]
    answer = json.loads((scratch / "answer.json").read_text())
    first, second = answer["choices"]
    assert first["picks"] == second["picks"], "the ranks picked different experts"
    blocks = {int(layer): torch.cat([torch.tensor(rank["blocks"][layer]) for rank in (first, second)], dim=1) for layer in first["blocks"]}
    picks = {int(layer): torch.tensor(rows) for layer, rows in first["picks"].items()}
    return Run(torch.tensor(prompt + answer["generated"]), torch.tensor(answer["logprobs"]), picks, blocks)


def token_logprobs(logits: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(dim=-1).gather(1, sequence[1:, None])[:, 0]


@pytest.fixture(scope="module")
def stock(checkpoint: Path, prompt: list[int], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return engine_run(checkpoint, prompt, {"mode": "off"}, tmp_path_factory.mktemp("stock"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_stock_layers_agree(model: TinyModel, checkpoint: Path, stock: Run, dtype: torch.dtype) -> None:
    """Every log-probability, every choice of experts and blocks, every greedy token; prompt in chunks, then decode."""
    oracle = reference.load(checkpoint, dtype)
    imposed = reference.run(oracle, stock.sequence[:-1], stock.picks, stock.blocks)
    limit = bound(model, oracle, imposed.hidden_rms, reference_rounds=dtype == torch.bfloat16)

    difference = (token_logprobs(imposed.logits, stock.sequence) - stock.logprobs).abs()
    assert difference.numel() == PROMPT_TOKENS + GENERATED - 1
    assert difference.max() <= limit.each
    assert difference.mean() <= limit.mean
    assert difference[-GENERATED:].mean() <= limit.mean

    for layer, miss in imposed.router_miss.items():
        assert miss.max() <= limit.key(oracle.model.layers[layer].mlp.gate.weight)
        assert imposed.block_miss[layer].max() <= limit.block

    logits = imposed.logits[PROMPT_TOKENS - 1 :]
    best = logits.topk(2, dim=-1)
    clear = best.values[:, 0] - best.values[:, 1] > limit.each
    generated = stock.sequence[PROMPT_TOKENS:]
    assert torch.equal(best.indices[clear, 0], generated[clear])
    # The check must not be empty, nor a loop over one token.
    assert clear.sum() >= GENERATED // 4
    assert generated.unique().numel() >= GENERATED // 4


def test_free_reference_agrees(model: TinyModel, checkpoint: Path, stock: Run) -> None:
    """Nothing imposed: close choices fall otherwise for a minority of tokens, so the median meets the bound of the mean."""
    oracle = reference.load(checkpoint, torch.bfloat16)
    free = reference.run(oracle, stock.sequence[:-1])
    limit = bound(model, oracle, free.hidden_rms, reference_rounds=True)
    difference = (token_logprobs(free.logits, stock.sequence) - stock.logprobs).abs()
    assert difference.median() <= limit.mean


def test_launches_give_the_same_bits(checkpoint: Path, prompt: list[int], stock: Run, tmp_path: Path) -> None:
    """With the launches in place of the stock halves at decode: the same tokens and log-probabilities, not only close ones."""
    fused = engine_run(checkpoint, prompt, {"mode": "require"}, tmp_path)
    assert torch.equal(fused.sequence, stock.sequence)
    assert torch.equal(fused.logprobs, stock.logprobs)
    # The prompt's rows went through the stock router, the others through the launches.
    assert {rows.shape[0] for rows in stock.picks.values()} == {PROMPT_TOKENS + GENERATED - 1}
    assert {rows.shape[0] for rows in fused.picks.values()} == {PROMPT_TOKENS}


def test_the_bound_notices_a_wrong_model(model: TinyModel, checkpoint: Path, stock: Run) -> None:
    """The same comparison fails for a reference without the offset of the up branch, and for one with the experts' weights halved."""
    for wrong in ("offset", "scaling"):
        oracle = reference.load(checkpoint, torch.float32)
        for layer in oracle.model.layers[DENSE_LAYERS:]:
            if wrong == "offset":
                layer.mlp.experts._apply_gate = lambda fused: _without_offset(fused)
            else:
                layer.mlp.routed_scaling_factor /= 2
        imposed = reference.run(oracle, stock.sequence[:-1], stock.picks, stock.blocks)
        limit = bound(model, oracle, imposed.hidden_rms, reference_rounds=False)
        difference = (token_logprobs(imposed.logits, stock.sequence) - stock.logprobs).abs()
        assert difference.mean() > limit.mean, wrong
        assert difference.max() > limit.each, wrong


def _without_offset(fused: torch.Tensor) -> torch.Tensor:
    gate, up = fused.chunk(2, dim=-1)
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * up.clamp(-7.0, 7.0)
