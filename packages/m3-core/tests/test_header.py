from __future__ import annotations

import inspect
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from m3_core import formulas, header
from m3_core.errors import ConfigurationError
from m3_core.faults import Site
from m3_core.formulas import Bytes, Word32, formula

COMMITTED = Path(__file__).parents[2] / "m3-kernels" / "include" / "m3" / "protocol.h"

# Values tried for every parameter, by name; shapes include the published one, tails everywhere, and the smallest.
SHAPES = [
    # world_size, max_rows = rows, hidden, intermediate, experts, top_k
    (4, 16, 6144, 768, 128, 4),
    (1, 1, 2, 1, 1, 1),
    (2, 3, 100, 24, 8, 2),
    (8, 64, 4096, 384, 512, 8),
    (2, 5, 250, 17, 129, 3),
    (4, 7, 98, 100, 16, 4),
]
INDICES = (0, 1, 5)
ARITHMETIC = {
    "epoch": (0, 1, 2, 3, 126_975, 126_976, 131_069, 131_070, 131_071, 131_072),
    "parities": (1, 2, 3),
    "bits": (1, 3, 16, 32),
    "seen": (0, 1, 2**31 - 1, 2**31, 2**32 - 1),
    "wanted": (0, 1, 2**31 - 1, 2**31, 2**32 - 1),
    "value": (0, 1, 15, 16, 17, 2**31 - 64),
    "divisor": (1, 3, 48),
    "multiple": (1, 16, 256),
    "tag": (0, 1, 65535),
    "word": (0, 1, 0x01234567, 0x7FFFFFFF),
    "first": (0, 0xCDEF),
    "second": (0x89AB,),
    "third": (0x4567, 65535),
    "lower": (0xCDEF,),
    "upper": (0, 0x89AB),
    "index": (0, 1, 2),
    "site": (0, 1, 13),
    "start": (0, 80, 192, 208),
    "grid": (1, 7, 256),
    "timeline_blocks": (0, 7, 256),
    "launches": (1, 3, 4096),
    "host_records": (0, 1, 4096),
    "event": (1, 2, 3, 4, 5, 6, 7, 16),
    "block": (0, 2**24 - 1),
    "detail": (0, 2**31 - 1),
    "site_word": (0, 2**31 - 1),
    "clock": (0, 2**63 - 1, 2**64 - 1),
    "where": (0, 2**64 - 1),
    "what": (0, 0x0123456789ABCDEF, 2**64 - 1),
}
SHAPE_NAMES = ("world_size", "rows", "hidden", "intermediate", "experts", "top_k")


def cases(function: Callable[..., int]) -> list[tuple[int, ...]]:
    names = list(inspect.signature(function).parameters)
    found: list[tuple[int, ...]] = []
    for shape in SHAPES:
        sizes = dict(zip(SHAPE_NAMES, shape, strict=True)) | {"max_rows": shape[1], "rank": shape[0] - 1}
        choices = [(sizes[name],) if name in sizes else ARITHMETIC.get(name, INDICES) for name in names]
        if function.__name__ in ("site_word",):
            choices = [ARITHMETIC["site"], (-1, 0, 254), (-1, 0, 32766)]
        if function.__name__.startswith(("pair_word", "triple_word")):
            choices[0] = (0, 0x0123456789ABCDEF, 2**64 - 1)
        if function.__name__ == "pack_pair":
            choices = [(0, 2**32 - 1), (0, 1, 2**32 - 1)]
        found.extend(itertools.product(*choices))
    return sorted(set(found))


def literal(value: int) -> str:
    return f"{value}ULL" if value >= 2**63 else f"{value}LL" if value >= 2**31 else str(value)


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_cxx_computes_what_python_computes(tmp_path: Path, standard: str) -> None:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to check the header"
    names: list[tuple[str, tuple[int, ...], int]] = []
    lines = []
    for function in formulas.registered():
        if function.__module__.startswith("m3_core."):
            for arguments in cases(function):
                names.append((function.__name__, arguments, int(function(*arguments))))
                lines.append(f"  {{static_cast<Word64>({function.__name__}({', '.join(map(literal, arguments))}))}},")
    assert len(names) > 2000
    for module in header.MODULES:
        for _, name, value in header.constants(module):
            names.append((name, (), value))
            lines.append(f"  {{static_cast<Word64>({name})}},")
    for site in Site:
        names.append((f"Site::{site.name}", (), site.value))
        lines.append(f"  {{static_cast<Word64>(Site::{site.name})}},")
    source = tmp_path / "offsets.cpp"
    source.write_text(
        '#include "protocol.h"\n#include "protocol.h"\n#include <cstdio>\nusing namespace m3::protocol;\n'
        "constexpr Word64 values[] = {\n" + "\n".join(lines) + "\n};\n"
        'int main() { for (Word64 value : values) std::printf("%llu\\n", value); }\n'
    )
    (tmp_path / "protocol.h").write_text(header.generate_header())
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
    (tmp_path / "alone.cpp").write_text('#include "protocol.h"\n')
    subprocess.run([compiler, f"-std={standard}", *warnings, "-fsyntax-only", tmp_path / "alone.cpp"], check=True)
    subprocess.run([compiler, f"-std={standard}", "-w", source, "-o", tmp_path / "offsets"], check=True)
    printed = subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True).stdout.split()
    different = [
        (name, arguments, value, got) for (name, arguments, value), got in zip(names, printed, strict=True) if value % 2**64 != int(got)
    ]
    assert different == []


def test_the_committed_header_is_what_the_formulas_generate() -> None:
    assert header.main(["--check", str(COMMITTED)]) == 0


def test_a_changed_header_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "m3" / "protocol.h"
    assert header.main(["--check", str(target)]) == 1
    assert header.main(["--write", str(target)]) == 0
    assert header.main(["--check", str(target)]) == 0
    target.write_text(target.read_text().replace("EPOCH_LIMIT = 126976", "EPOCH_LIMIT = 131072"))
    assert header.main(["--check", str(target)]) == 1
    assert "differs" in capsys.readouterr().err


def test_printed_without_arguments() -> None:
    printed = subprocess.run([sys.executable, "-m", "m3_core.header"], check=True, capture_output=True, text=True).stdout
    assert printed == header.generate_header()


def loop(value: int) -> int:
    for _ in range(3):
        value += 1
    return value


def power(value: int) -> int:
    return value**2


def untyped(value) -> int:  # type: ignore[no-untyped-def]
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "named"),
    [(loop, "single return expression"), (power, "has no C\\+\\+ form"), (untyped, "need one of the types")],
)
def test_formulas_without_a_cxx_form(function: Callable[..., int], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        header.translate(function)


def test_translation() -> None:
    def shifted(value: Word32, unused: int) -> Bytes:
        """Twice the value.

        More about it.
        """
        return value << 1 if value < 4294967295 else Bytes(value) % 7

    before = formulas.registered()
    assert formula(shifted)(3, 0) == 6
    formulas._registered[:] = before
    assert header.translate(shifted) == (
        "// Twice the value.\nM3_DEVICE_INLINE constexpr Bytes shifted(Word32 value, int /*unused*/) {\n"
        "  return (value < 4294967295u) ? (value << 1) : (static_cast<Bytes>(value) % 7);\n}\n"
    )
