"""How a launch is cut into tasks, shared by the kernels and the scratch layout.

The published shape (hidden 6144, 128 experts, top 4, intermediate 768 a rank) gives the published counts: 128 push and reduce tasks of 48
columns, 16 router parts, 384 down tasks, 192 final tasks. A gate/up tile is half the published one, 8 gate and 8 up rows, so that the few
experts of a single row still make tasks for every block: 96 tiles. Any even hidden size works: the last task of a stage may be narrower
than the others.
"""

from __future__ import annotations

import attrs

from m3_core.errors import RefusalError
from m3_core.formulas import ceil_div, formula, round_up

COLUMNS_A_TRIPLE = 3
COLUMNS_A_PAIR = 2
PUSH_COLUMNS = 48
PUSH_TRIPLES = PUSH_COLUMNS // COLUMNS_A_TRIPLE
ROUTER_PARTS = 16
ROUTER_PART_MULTIPLE = 16
EXPERT_TILE = 16
GATE_UP_ROWS = 8
DOWN_ROWS = 16
DOWN_PAIRS = DOWN_ROWS // COLUMNS_A_PAIR
FINAL_COLUMNS = 32
SLOT_COLUMNS_MULTIPLE = 16
SCHEDULE_BLOCKS = 256

# First block of each stage in 256ths of the grid: stages that run at the same time start on different blocks.
PUSH_START = 0
REDUCE_START = 0
NORM_START = 192
ROUTER_START = 208
ROUTE_START = 192
SHARED_UP_START = 80
UP_START = 128
DOWN_START = 0
FINAL_START = 0

MAX_ROWS = 64
MAX_HIDDEN = 65536
MAX_INTERMEDIATE = 65536
MAX_EXPERTS = 512
MAX_TOP_K = 8
WORLD_SIZES = (1, 2, 4, 8)


@formula
def triples(hidden: int) -> int:
    """Triple pairs a row; the last holds one or two columns when ``hidden`` is no multiple of 3."""
    return ceil_div(hidden, COLUMNS_A_TRIPLE)


@formula
def column_pairs(hidden: int) -> int:
    """Value pairs of two bf16 a row."""
    return ceil_div(hidden, COLUMNS_A_PAIR)


@formula
def push_tasks(hidden: int) -> int:
    """Tasks of the push stage, and of the reduce stage: 48 columns (16 triples) each, the last perhaps fewer."""
    return ceil_div(hidden, PUSH_COLUMNS)


@formula
def router_part_columns(hidden: int) -> int:
    """Columns of a router part, a multiple of 16: a sixteenth of the hidden size, rounded up."""
    return round_up(ceil_div(hidden, ROUTER_PARTS), ROUTER_PART_MULTIPLE)


@formula
def router_parts(hidden: int) -> int:
    """Parts into which the router cuts the hidden size: 16, fewer below 256 columns or where rounding leaves none for the last."""
    return ceil_div(hidden, router_part_columns(hidden))


@formula
def expert_tiles(experts: int) -> int:
    """Router tiles of 16 experts; the last perhaps fewer."""
    return ceil_div(experts, EXPERT_TILE)


@formula
def router_tasks(hidden: int, experts: int) -> int:
    """Tasks of the router stage; task = tile * parts + part."""
    return expert_tiles(experts) * router_parts(hidden)


@formula
def gate_up_tiles(intermediate: int) -> int:
    """Tiles of 8 gate rows and the same 8 up rows; the last perhaps fewer."""
    return ceil_div(intermediate, GATE_UP_ROWS)


@formula
def down_tasks(hidden: int) -> int:
    """Tasks of the down stage: 16 output columns (8 column pairs) each, the last perhaps fewer."""
    return ceil_div(hidden, DOWN_ROWS)


@formula
def final_tasks(hidden: int) -> int:
    """Tasks of the final stage: 32 output columns each, the last perhaps fewer."""
    return ceil_div(hidden, FINAL_COLUMNS)


@formula
def routed_slots(rows: int, experts: int, top_k: int) -> int:
    """The most routed experts that ``rows`` rows can pick."""
    return experts if experts < rows * top_k else rows * top_k


@formula
def slots(rows: int, experts: int, top_k: int) -> int:
    """Slots of the slot table: the shared expert is slot 0, the picked experts follow by ascending id."""
    return 1 + routed_slots(rows, experts, top_k)


@formula
def slot_columns(rows: int) -> int:
    """Columns that scratch keeps for a slot: the rows, rounded up to 16."""
    return round_up(rows, SLOT_COLUMNS_MULTIPLE)


@formula
def picks(rows: int, top_k: int) -> int:
    """Picks of a launch: pick ``top_k * row + k`` is a row's k-th expert, pick ``top_k * rows + row`` its shared expert."""
    return (top_k + 1) * rows


@formula
def first_block(start: int, grid: int) -> int:
    """The block that takes task 0 of a stage that starts at ``start`` 256ths of the grid."""
    return start * grid // SCHEDULE_BLOCKS


@formula
def task_block(start: int, task: int, grid: int) -> int:
    """The block that takes task ``task`` of such a stage: tasks go round the grid from its first block."""
    return (first_block(start, grid) + task) % grid


def shape_reasons(
    *,
    hidden: int,
    rows: int | None = None,
    world_size: int | None = None,
    intermediate: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
) -> list[str]:
    """Why these sizes cannot run; empty if they can. ``None`` leaves a size out."""
    sizes = {"hidden": hidden, "rows": rows, "world size": world_size, "intermediate": intermediate, "experts": experts, "top_k": top_k}
    # A configuration file's sizes may be of any type.
    reasons = [
        f"{name} is {value!r}: a whole number is needed"
        for name, value in sizes.items()
        if type(value) is not int and (value is not None or name == "hidden")
    ]
    if reasons:
        return reasons
    if not 2 <= hidden <= MAX_HIDDEN or hidden % 2:
        reasons.append(f"hidden is {hidden}: an even number from 2 to {MAX_HIDDEN} is needed (two columns share a word)")
    if rows is not None and not 1 <= rows <= MAX_ROWS:
        reasons.append(f"rows is {rows}: 1 to {MAX_ROWS} rows fit a launch; route wider steps to the stock layers")
    if world_size is not None and world_size not in WORLD_SIZES:
        reasons.append(f"world size is {world_size}: the tensor-parallel size must be one of {', '.join(map(str, WORLD_SIZES))}")
    if intermediate is not None and not 1 <= intermediate <= MAX_INTERMEDIATE:
        reasons.append(f"intermediate is {intermediate}: 1 to {MAX_INTERMEDIATE} per rank")
    if experts is not None and not 1 <= experts <= MAX_EXPERTS:
        reasons.append(f"experts is {experts}: 1 to {MAX_EXPERTS} routed experts")
    if top_k is not None and not 1 <= top_k <= MAX_TOP_K:
        reasons.append(f"top_k is {top_k}: 1 to {MAX_TOP_K} experts a row")
    if top_k is not None and experts is not None and experts >= 1 and top_k > experts:
        reasons.append(f"top_k is {top_k} but there are {experts} experts: a row picks each expert at most once")
    return reasons


def require_shape(subject: str, reasons: list[str]) -> None:
    """Raise ``RefusalError`` with all ``reasons`` if there are any."""
    if reasons:
        raise RefusalError(reasons, subject)


@attrs.frozen
class WorkShape:
    """Task counts of a launch of one row count.

    Attributes:
        rows: rows of the launch, 1 to 64.
        hidden: hidden size, even.
        intermediate: intermediate size of an expert on this rank.
        experts: routed experts, without the shared one.
        top_k: routed experts a row.

    Raises:
        RefusalError: with every reason why the sizes cannot run.
    """

    rows: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def __attrs_post_init__(self) -> None:
        require_shape(
            "this launch shape",
            shape_reasons(hidden=self.hidden, rows=self.rows, intermediate=self.intermediate, experts=self.experts, top_k=self.top_k),
        )

    @property
    def push_tasks(self) -> int:
        """Tasks of push and of reduce."""
        return push_tasks(self.hidden)

    @property
    def router_part_columns(self) -> int:
        """Columns of a router part."""
        return router_part_columns(self.hidden)

    @property
    def router_parts(self) -> int:
        """Router parts of the hidden size."""
        return router_parts(self.hidden)

    @property
    def router_tasks(self) -> int:
        """Router tasks: expert tiles x parts."""
        return router_tasks(self.hidden, self.experts)

    @property
    def expert_tiles(self) -> int:
        """Router tiles of 16 experts."""
        return expert_tiles(self.experts)

    @property
    def gate_up_tiles(self) -> int:
        """Gate/up tiles of a slot."""
        return gate_up_tiles(self.intermediate)

    @property
    def down_tasks(self) -> int:
        """Tasks of the down stage."""
        return down_tasks(self.hidden)

    @property
    def final_tasks(self) -> int:
        """Tasks of the final stage."""
        return final_tasks(self.hidden)

    @property
    def slots(self) -> int:
        """Slots of the slot table, the shared expert's included."""
        return slots(self.rows, self.experts, self.top_k)

    @property
    def slot_columns(self) -> int:
        """Columns that scratch keeps for a slot."""
        return slot_columns(self.rows)

    @property
    def picks(self) -> int:
        """Picks of the launch, the shared expert's included."""
        return picks(self.rows, self.top_k)
