"""Child process of the oracle test: vLLM offline on a tiny checkpoint. Reads one JSON file, writes another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily for one prompt of token ids; log-probabilities of all its tokens and of the generated ones."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=request["model"],
        tensor_parallel_size=request["ranks"],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=request["chunk"],
        enable_prefix_caching=False,
        additional_config={"m3": request["settings"]},
        worker_extension_cls="recorder.Recorder",
    )
    engine.collective_rpc("record_choices")
    parameters = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True, prompt_logprobs=0, logprobs=0)
    output = engine.generate([{"prompt_token_ids": request["prompt"]}], parameters, use_tqdm=False)[0]
    choices = engine.collective_rpc("take_choices")
    generated = list(output.outputs[0].token_ids)
    scored = [
        *zip(request["prompt"][1:], output.prompt_logprobs[1:], strict=True),
        *zip(generated, output.outputs[0].logprobs, strict=True),
    ]
    result = {"generated": generated, "logprobs": [entry[token].logprob for token, entry in scored], "choices": choices}
    engine.llm_engine.engine_core.shutdown(timeout=60)
    return result


if __name__ == "__main__":
    result = answer(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    # vLLM's offline engine sometimes aborts in its own interpreter shutdown, after everything is done.
    sys.stdout.flush()
    os._exit(0)
