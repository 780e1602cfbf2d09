from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import m3_vllm.adapters
from m3_vllm import plugin
from m3_vllm.adapters.cpu.ledger import PATCHES

ADAPTERS = Path(m3_vllm.adapters.__file__).parent


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with capture_logs() as logs:
        plugin.register()
    assert logs == []


def test_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no registry")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(m3_vllm.adapters, "register_adapters", fail)
    with capture_logs() as logs:
        plugin.register()
    assert [entry["event"] for entry in logs] == ["plugin_failed"]
    assert "no registry" in logs[0]["error"]


def test_importing_is_cheap() -> None:
    """The entry point is loaded in every process of every model: neither torch nor vLLM comes with it."""
    code = "import sys, m3_vllm.plugin; sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'm3_kernels')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def patched(source: str) -> set[str]:
    """Dotted names that a module assigns to below a name imported from vLLM, and uses of ``sys.modules``."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or "vllm": "vllm" for alias in node.names if alias.name.split(".")[0] == "vllm"}
    found: set[str] = set()
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            targets = [ast.Attribute(node.args[0], ast.unparse(node.args[1]))]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
            found.add("sys.modules")
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name) and root is not target and root.id in imported:
                found.add(ast.unparse(target).replace(root.id, imported[root.id], 1))
    return found


def test_the_ledger_names_every_patch() -> None:
    found = set().union(*(patched(file.read_text()) for file in ADAPTERS.rglob("*.py")))
    assert found == {patch.target for patch in PATCHES}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from vllm.a import B\nB.c = 1", {"vllm.a.B.c"}),
        ("from vllm import a as x\nx.b.c['d'] += 1", {"vllm.a.b.c['d']"}),
        ("import vllm\nsetattr(vllm.a, 'b', 1)", {"vllm.a.'b'"}),
        ("import sys\nsys.modules['vllm.a'] = 1", {"sys.modules"}),
        ("from vllm.a import B\nb = B()\nb.c = 1", set()),
    ],
)
def test_the_ledgers_test_sees_patches(source: str, expected: set[str]) -> None:
    assert patched(source) == expected
