"""The patches of vLLM that the CPU adapter needs: why, how, and when each can go.

The list is empty: registering an architecture, additional configuration, the layer interfaces and the model's own methods were
enough. A patch may enter only with its entry here; a test compares the list with what the adapter assigns into vLLM.
"""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Patch:
    """One change to vLLM at run time.

    Attributes:
        target: dotted name of what is replaced.
        why: what does not work without it, and why no hook serves.
        how: what the replacement does differently.
        until: the change in vLLM that makes it unnecessary.
    """

    target: str
    why: str
    how: str
    until: str


PATCHES: tuple[Patch, ...] = ()
