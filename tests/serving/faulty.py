"""Child process of the fault tests: vLLM offline on a tiny checkpoint, made to fail. Reads one JSON file, writes another.

It is its own worker extension as well: vLLM adds the methods of ``Faulty`` to its workers.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

PR_GET_PDEATHSIG = 2


class Faulty:
    """What the tests ask of a worker."""

    model_runner: Any

    def identify(self) -> dict[str, int]:
        """This worker, the engine that started it, and the signal that the kernel sends it when the engine ends."""
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
        return {"worker": os.getpid(), "engine": os.getppid(), "signal": number.value}

    def stall(self, rank: int, seconds: float) -> None:
        """Let the rank's next launch stand still for so long, then fail."""
        self.model_runner.model.steps.executor._channel.inject_fault(rank, seconds)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, generate once, then do what is asked."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=request["model"],
        tensor_parallel_size=2,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        additional_config={"m3": request["settings"]},
        worker_extension_cls="faulty.Faulty",
    )
    workers = engine.collective_rpc("identify")
    prompt = [{"prompt_token_ids": list(range(3, 20))}]
    parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = len(engine.generate(prompt, parameters, use_tqdm=False)[0].outputs[0].token_ids)
    result: dict[str, Any] = {"workers": workers, "tokens": tokens}
    if request["fault"] == "stall":
        engine.collective_rpc("stall", args=(1, request["seconds"]))
        try:
            engine.generate(prompt, parameters, use_tqdm=False)
        except Exception as error:
            result["error"] = type(error).__name__
    else:
        handles = [os.pidfd_open(worker["worker"]) for worker in workers]
        start = time.monotonic()
        os.kill(workers[0]["engine"], signal.SIGKILL)
        ended = [bool(select.select([handle], [], [], max(0.0, start + 10.0 - time.monotonic()))[0]) for handle in handles]
        result |= {"ended": ended, "seconds": time.monotonic() - start}
    return result


if __name__ == "__main__":
    answer = run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
    # The engine is gone or broken: nothing of it is worth an orderly end.
    sys.stdout.flush()
    os._exit(0)
