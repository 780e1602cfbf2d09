"""Regenerates what the documentation shows from this package: diagrams, tables, examples, counterexamples.

``python -m m3_core.documents --write DOCS`` rewrites the generated parts of ``DOCS/protocol.md`` and ``DOCS/model-checking.md``, each between
``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``, and the files of ``DOCS/counterexamples``; ``--check DOCS`` exits 1 on any
difference.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from m3_core import epochs, layout
from m3_core.agreement import encode_verdict
from m3_core.check.explorer import explore
from m3_core.check.mutants import MUTANTS, Mutant
from m3_core.check.properties import Property, timeline
from m3_core.check.scopes import SCOPES
from m3_core.check.traces import EVENTS, HOST_STAGES, Stage
from m3_core.epochs import EpochBudget
from m3_core.errors import ConfigurationError
from m3_core.faults import Fault, Site
from m3_core.handshake import HANDSHAKE
from m3_core.layout import ChannelLayout, PeerLayout
from m3_core.lifecycle import LIFE
from m3_core.phase import PHASE
from m3_core.reset import RESET
from m3_core.tables import Table, markdown, mermaid
from m3_core.words import pack_bf16_pair, pack_pair, pack_triple

PAGES = ("protocol.md", "model-checking.md")
COUNTEREXAMPLES = "counterexamples"


def _rows(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _machine(table: Table[Any, Any, Any]) -> str:
    return f"```mermaid\n{mermaid(table)}```\n\n{markdown(table)}"


def _numbers() -> str:
    budget = EpochBudget(57)
    return _rows(
        ("quantity", "value", "from"),
        (
            ("halves (parities)", epochs.PARITIES, "layout"),
            ("tag of a value pair", f"{epochs.PAIR_TAG_BITS} bits", "layout"),
            ("tag of a triple pair", f"{epochs.TRIPLE_TAG_BITS} bits", "layout"),
            ("tag period", f"{epochs.TAG_PERIOD:,}", "halves x 2^16: a half sees every second launch"),
            ("epoch limit", f"{epochs.EPOCH_LIMIT:,}", "2^17 - 2^12: a launch at or past it refuses"),
            ("reset threshold", f"{epochs.RESET_LAUNCHES:,}", "2^17 - 2^14 counted launches"),
            ("reset step of 57 layers", f"{budget.reset_step:,}", "first sampled step whose launches reach the threshold"),
            ("room for uncounted launches, 57 layers", f"{budget.room:,}", "limit - reset step x 57"),
        ),
    )


def _sites() -> str:
    return _rows(
        ("number", "site", "waits for, or what happened", "advice"),
        [(site.value, site.name, ("waits for " if site.is_wait else "") + site.waited_for, site.advice) for site in Site],
    )


def _sizes() -> str:
    rows = []
    for ranks in (1, 2, 4, 8):
        for max_rows in (1, 16, 64):
            peer = PeerLayout(ranks, max_rows, 6144)
            rows.append(
                (
                    ranks,
                    max_rows,
                    f"{peer.half_bytes:,}",
                    f"{peer.ffn_offset(0):,}",
                    f"{peer.attention_offset(1):,}",
                    f"{peer.ffn_offset(1):,}",
                    f"{peer.total_bytes:,}",
                    f"{ChannelLayout(1, peer).channel_bytes:,}",
                )
            )
    head = ("ranks", "max_rows", "half", "FFN, half 0", "attention, half 1", "FFN, half 1", "total", "channel stride")
    return _rows(head, rows)


def _hex(data: bytes) -> str:
    return data.hex(" ")


def _example() -> str:
    """Words of one launch, byte by byte."""
    peer = PeerLayout(2, 4, 10)
    epoch, source, row = 5, 1, 2
    parity = epochs.parity(epoch)
    triple = pack_triple(0x3F80, 0x4000, 0x4040, epochs.triple_tag(epoch))
    last = pack_triple(0x4080, 0, 0, epochs.triple_tag(epoch))
    pair = pack_pair(pack_bf16_pair(0x3F80, 0x4000), epochs.pair_tag(epoch))
    clear, failed = (pack_pair(value, epochs.pair_tag(epoch)) for value in (0, 1))
    fault = Fault(True, 1, 5, Site.REDUCE, peer=0, layer=3)
    words = [
        ("attention, columns 0-2 = 1.0, 2.0, 3.0", peer.attention_pair(parity, source, row, 0), triple),
        ("attention, column 9 = 4.0, and two that do not exist", peer.attention_pair(parity, source, row, 3), last),
        ("FFN, columns 4-5 = 1.0, 2.0", peer.ffn_pair(parity, source, row, 2), pair),
        ("handshake flag, clear", peer.handshake_pair(source), clear),
        ("handshake flag, failed", peer.handshake_pair(source), failed),
        ("fault, stored first: epoch 5, site REDUCE, peer 0, layer 3", 8, fault.words()[0]),
        ("fault, stored second: set, rank 1", 0, fault.words()[1]),
    ]
    return _rows(
        ("word", "byte offset", "eight bytes, lowest address first"),
        [(name, offset, f"`{_hex(word.to_bytes(8, 'little'))}`") for name, offset, word in words],
    )


def _verdicts() -> str:
    cases = (("reset.drain", None), ("reset.drain", "no memory"))
    return _rows(
        ("phase", "reason", "bytes"),
        [(phase, reason or "none: ready", f"`{_hex(encode_verdict(phase, reason))}`") for phase, reason in cases],
    )


def _events() -> str:
    rows = [
        (stage.value, ", ".join(sorted(event.value for event in EVENTS[stage])), "no" if stage in HOST_STAGES else "yes") for stage in Stage
    ]
    return _rows(("stage", "events", "carries an epoch"), rows)


def _properties() -> str:
    return _rows(("property", "in every reachable state"), [(broken.name, broken.value) for broken in Property])


def _worlds() -> str:
    return _rows(("world", "what it shows", "checked"), [(c.name, c.about, "on request" if c.large else "always") for c in SCOPES])


def _mutants() -> str:
    rows = [(f"[{m.name}]({COUNTEREXAMPLES}/{m.name}.txt)", m.change, m.breaks.name) for m in MUTANTS]
    return _rows(("wrong protocol", "what is wrong", "caught by"), rows)


def _scratch() -> str:
    scratch = layout.ScratchLayout(16, 6144, 768, 128, 4, timeline_blocks=256)
    return _rows(("region", "offset", "bytes"), [(r.name, f"{r.offset:,}", f"{r.nbytes:,}") for r in scratch.regions])


PARTS: dict[str, Callable[[], str]] = {
    "numbers": _numbers,
    "sizes": _sizes,
    "example": _example,
    "scratch": _scratch,
    "sites": _sites,
    "life": lambda: _machine(LIFE),
    "handshake": lambda: _machine(HANDSHAKE),
    "phase": lambda: _machine(PHASE),
    "reset": lambda: _machine(RESET),
    "verdicts": _verdicts,
    "events": _events,
    "properties": _properties,
    "worlds": _worlds,
    "mutants": _mutants,
}
_PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def regenerate(page: str) -> str:
    """A page with its generated parts made anew.

    Raises:
        ConfigurationError: if it asks for a part that does not exist.
    """

    def part(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in PARTS:
            raise ConfigurationError(f"no generated part is called {name}; there are {', '.join(PARTS)}")
        return f"{match[1]}\n{PARTS[name]()}\n{match[3]}"

    return _PART.sub(part, page)


def counterexample(mutant: Mutant) -> str:
    """The file of a wrong protocol: what is wrong, and the shortest way to a violation."""
    result = explore(mutant.rules, mutant.scope)
    return f"{mutant.name}: {mutant.change}\n\n{timeline(result.trace, mutant.scope.ranks)}"


def documents(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every file that has generated parts, with the text that it should have."""
    for name in PAGES:
        page = folder / name
        yield page, regenerate(page.read_text(encoding="utf-8"))
    for mutant in MUTANTS:
        yield folder / COUNTEREXAMPLES / f"{mutant.name}.txt", counterexample(mutant)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m m3_core.documents", description="Regenerate parts of the documentation.")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--write", type=Path, metavar="DOCS", help="rewrite the files under DOCS")
    target.add_argument("--check", type=Path, metavar="DOCS", help="exit 1 if a file under DOCS differs")
    options = parser.parse_args(arguments)
    folder: Path = options.write or options.check
    different = [(path, text) for path, text in documents(folder) if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path, text in different:
        if options.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        else:
            print(f"{path} differs; run: python -m m3_core.documents --write {folder}", file=sys.stderr)
    return 1 if different and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
