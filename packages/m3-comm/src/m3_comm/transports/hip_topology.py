"""How the GPUs of this node are linked, read from the kernel driver's topology files."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")

_PCI_EXPRESS = 2
_XGMI = 11


class GpuLink(Enum):
    """The kind of link between GPUs."""

    XGMI = "xgmi"
    PCIE = "pcie"
    UNKNOWN = "unknown"


def gpu_link(nodes: Path = TOPOLOGY) -> GpuLink:
    """The link between the GPUs of this node: XGMI if any two are linked so, else PCIe if any two are, else unknown.

    The numbers of link types are those of the amdkfd driver: 2 for PCI Express, 11 for XGMI. A node with SIMDs is a GPU.
    """
    gpus = {node.name for node in _children(nodes) if _properties(node / "properties").get("simd_count", 0) > 0}
    kinds = set()
    for gpu in gpus:
        for folder in ("io_links", "p2p_links"):
            for link in _children(nodes / gpu / folder):
                facts = _properties(link / "properties")
                if str(facts.get("node_to", -1)) in gpus - {gpu}:
                    kinds.add(facts.get("type", 0))
    if _XGMI in kinds:
        return GpuLink.XGMI
    return GpuLink.PCIE if _PCI_EXPRESS in kinds else GpuLink.UNKNOWN


def _children(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return


def _properties(file: Path) -> dict[str, int]:
    """Lines of a name and a number; what cannot be read is left out."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split() for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
