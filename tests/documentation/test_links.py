"""Every relative link in the documentation leads somewhere, and every nox session that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md", "benchmarks/**/*.md") for page in ROOT.glob(pattern))
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")
SESSION = re.compile(r"nox (?:-R )?-s (?P<names>[a-z][a-z0-9_ ]*)")


def dead_links(page: Path, text: str) -> list[str]:
    """Targets of relative links that do not exist."""
    targets = (match["target"] for match in LINK.finditer(text))
    return [target for target in targets if "://" not in target and not (page.parent / target).exists()]


def named_sessions(text: str) -> set[str]:
    """Names of nox sessions in a text, as far as a line names them."""
    return {name for match in SESSION.finditer(text) for name in match["names"].split()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.md").write_text("")
    text = "[a](here.md) [b](gone.md#part) [c](https://example.org/x)"
    assert dead_links(tmp_path / "page.md", text) == ["gone.md"]


def test_sessions_that_the_readme_names_exist() -> None:
    defined = set(re.findall(r"^def ([a-z_]+)\(session: nox\.Session\)", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    assert {"demo", "tests"} <= named_sessions((ROOT / "README.md").read_text())
    for page in PAGES:
        code = "\n".join(re.findall(r"`[^`\n]+`|^ *python -m .*$", page.read_text(), re.MULTILINE))
        named = {name for name in named_sessions(code) if name.isidentifier()}
        assert named <= defined, f"{page.name} names {sorted(named - defined)}"
