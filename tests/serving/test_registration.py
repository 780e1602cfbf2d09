"""The plugin in a process of vLLM's own, beside the real registry."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.serving

CODE = """
import sys
from m3_vllm.plugin import register

register()
from vllm.model_executor.models.registry import ModelRegistry

first = ModelRegistry.models["MiniMaxM3SparseForCausalLM"]
register()
second = ModelRegistry.models["MiniMaxM3SparseForCausalLM"]
assert first == second, (first, second)
assert (second.module_name, second.class_name) == ("m3_vllm.adapters.cpu.model", "MiniMaxM3ForCPU"), second
early = [name for name in sys.modules if name.startswith(("m3_vllm.adapters.cpu", "m3_kernels", "vllm.models"))]
assert not early, early
assert second.load_model_cls().__name__ == "MiniMaxM3ForCPU"
# vLLM's own package for this model would need a GPU and torchvision.
assert not any(name.startswith("vllm.models.minimax_m3") for name in sys.modules)
"""


def test_registers_lazily_twice_and_without_vllms_own_model() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
