"""The launch as the operator ``m3::ffn``, opaque to graphs and compilation.

The operator names its launch by a number, because operators take tensors and numbers only, and writes the channel's epoch words, so
that no pass merges, drops or reorders two launches of a channel.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

from m3_core.errors import ResourceClosed
from m3_kernels.ffn import FfnLaunch

_launches: weakref.WeakValueDictionary[int, FfnLaunch] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(launch: FfnLaunch) -> int:
    """A number for ``launch``, valid while the launch lives; a second call gives another one."""
    number = next(_numbers)
    _launches[number] = launch
    return number


def ffn(launch: int, channel: Tensor, part: Tensor, residual: Tensor, slots: Tensor, *, handshake: bool) -> tuple[Tensor, Tensor]:
    """Run a registered launch through the operator.

    Args:
        launch: from ``register``.
        channel: ``FfnChannel.epoch_words`` of the launch's channel.
        part: bf16 [rows, hidden].
        residual: bf16 [rows, hidden].
        slots: int64, at least ``rows`` values.
        handshake: whether the launch ends in the step's fault exchange.

    Returns:
        Output and new residual, bf16 [rows, hidden]; see ``FfnLaunch.__call__``.

    Raises:
        ResourceClosed: if the launch is gone.
        ConfigurationError: if an argument does not fit.
    """
    out, residual_out = torch.ops.m3.ffn(part, residual, slots, channel, launch, handshake)
    return out, residual_out


@torch.library.custom_op("m3::ffn", mutates_args=("channel",))
def _ffn(part: Tensor, residual: Tensor, slots: Tensor, channel: Tensor, launch: int, handshake: bool) -> tuple[Tensor, Tensor]:
    found = _launches.get(launch)
    if found is None:
        raise ResourceClosed(f"launch {launch} does not exist any more; keep the FfnLaunch alive while graphs use its number")
    return found(part, residual, slots, handshake=handshake)


@_ffn.register_fake
def _ffn_fake(part: Tensor, residual: Tensor, slots: Tensor, channel: Tensor, launch: int, handshake: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(part), torch.empty_like(residual)
