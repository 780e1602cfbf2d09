"""The generated parts of the documentation are what the package generates, and a difference is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from m3_core import documents
from m3_core.check.mutants import MUTANTS
from m3_core.errors import ConfigurationError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wrong protocols that are caught at once."""
    monkeypatch.setattr(documents, "MUTANTS", tuple(mutant for mutant in MUTANTS if mutant.name in ("one-region", "silent-abort")))


def test_committed_documents() -> None:
    assert documents.main(["--check", str(DOCS)]) == 0


def test_no_counterexample_is_left_over() -> None:
    assert {path.stem for path in (DOCS / "counterexamples").iterdir()} == {mutant.name for mutant in MUTANTS}


def test_a_difference_is_noticed_and_repaired(tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str]) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs)
    page = docs / "protocol.md"
    # The list of wrong protocols depends on the fixture.
    documents.main(["--write", str(docs)])
    assert documents.main(["--check", str(docs)]) == 0
    good = page.read_text()
    page.write_text(good.replace("126,976 |", "131,072 |"))
    (docs / "counterexamples" / "one-region.txt").unlink()
    assert documents.main(["--check", str(docs)]) == 1
    assert capsys.readouterr().err.count(" differs; run: ") == 2
    assert documents.main(["--write", str(docs)]) == 0
    assert page.read_text() == good
    assert documents.main(["--check", str(docs)]) == 0


def test_an_unknown_part() -> None:
    with pytest.raises(ConfigurationError, match="no generated part is called none"):
        documents.regenerate("<!-- generated: none -->\n<!-- end of none -->")


def test_text_outside_generated_parts_stays() -> None:
    assert documents.regenerate("before\n<!-- generated: verdicts -->\nold\n<!-- end of verdicts -->\nafter\n").startswith("before\n")
    assert documents.regenerate("nothing generated\n") == "nothing generated\n"


def test_every_part_is_used() -> None:
    text = "".join((DOCS / page).read_text() for page in documents.PAGES)
    assert {name for name in documents.PARTS if f"<!-- generated: {name} -->" in text} == set(documents.PARTS)
