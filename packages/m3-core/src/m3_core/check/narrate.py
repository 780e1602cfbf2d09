"""Steps of the world in words."""

from __future__ import annotations

from m3_core.check.properties import Line
from m3_core.check.world import World

_HOST = {
    "BEGIN_STEP": "host begins step {step}, {rows} row(s)",
    "END_STEP": "host returns a token of step {step}",
    "FAULT_SEEN": "host sees the fault word and drops step {step}",
    "ABORT": "host aborts and marks the ranks",
    "RESET_DUE": "host starts a reset",
}
_EXCHANGE = ("attention", "FFN")


def narrate(world: World, state: bytes, action: tuple[object, ...]) -> tuple[Line, ...]:
    """The lines of a timeline for one step from ``state``."""
    fields = world.fields
    kind, *rest = action
    numbers = [part for part in rest if isinstance(part, int)]
    channels = world.scope.channels

    def block(rank: int, channel: int, block: int) -> str:
        where = f"block {block}"
        return where if channels == 1 else f"channel {channel} {where}"

    if kind == "host":
        step = state[fields.steps[numbers[0]]]
        text = _HOST[str(rest[1])].format(step=step, rows=world.rows(state, numbers[0]))
        return (Line(numbers[0], text),)
    if kind == "reset":
        done = "done" if rest[2] == "DONE" else "failed"
        return (Line(numbers[0], f"reset: {str(rest[1]).lower()} {done}, sends its verdict"),)
    if kind == "verdicts":
        return (Line(numbers[0], f"reset: every verdict of {('drain', 'clear')[numbers[1]]} is there"),)
    if kind == "agreement timeout":
        return (Line(numbers[0], "reset: gives up waiting for verdicts"),)
    if kind == "stop":
        return (Line(numbers[0], "stops for ever"),)
    if kind == "timeout":
        return (Line(numbers[0], f"{block(*numbers)} gives up waiting"),)
    if kind == "arrive":
        slot = fields.slots[numbers[0]]
        epoch, _, exchange = fields.unpack(numbers[1])
        row = f" row {slot.row}" if len(set(world.scope.rows)) > 1 else ""
        column = f" column {slot.column}" if len(world.scope.blocks) > 1 else ""
        return (Line(slot.owner, f"<- {_EXCHANGE[exchange]} word of {slot.source}, epoch {epoch}{row}{column}"),)
    if kind == "payload":
        slot = fields.slots[numbers[0]]
        return (Line(slot.owner, f"<- payload of {slot.source}"),)
    if kind == "flag":
        owner, _, source, flag = numbers
        epoch, failed = divmod((flag - 1) // 2, 2)
        return (Line(owner, f"<- flag of {source}, epoch {epoch}: {'failed' if failed else 'clear'}"),)
    if kind == "mark":
        return (Line(numbers[0], f"<- fault mark of {numbers[2]}"),)
    if kind in ("plain", "announce"):
        what = "plain data" if kind == "plain" else "announcement"
        return (Line(numbers[0], f"{block(*numbers)}: {what} becomes visible"),)
    if kind == "accept":
        rank, channel, which, exchange, position = numbers
        slot = fields.slots[position]
        return (Line(rank, f"{block(rank, channel, which)} accepts {_EXCHANGE[exchange]} of {slot.source}"),)
    if kind == "start":
        epoch = state[fields.epoch[numbers[0], numbers[1]]]
        return (Line(numbers[0], f"{block(*numbers)} starts launch at epoch {epoch}"),)
    if kind == "advance":
        return (Line(numbers[0], f"epoch moves to {state[fields.epoch[numbers[0], numbers[1]]] + 1}"),)
    if kind == "read flag":
        return (Line(numbers[0], f"reads the flag of {numbers[2]}"),)
    texts = {
        "leave": "leaves: the fault word is set",
        "release": "announces its plain data",
        "read early": "reads plain data before polling",
        "gather": "has all announcements, pushes FFN",
    }
    return (Line(numbers[0], f"{block(*numbers)} {texts[str(kind)]}"),)
