"""Tensors over memory that they do not own: over a device's, and over memory that may be taken away, which then refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_iter, tree_map_only

from m3_core.errors import ResourceError


class GuardedBytes(torch.Tensor):
    """A non-owning view whose operations first ask whether its memory is still there.

    Slices, reshapes and other views of it are guarded too; results with memory of their own are plain tensors. What cannot be guarded
    is an address that left through ``data_ptr()``, ``numpy()`` or DLPack before the memory went away, and code that was compiled
    or captured with it.
    """

    _check: Callable[[], None]

    @classmethod
    def over(cls, tensor: torch.Tensor, check: Callable[[], None]) -> GuardedBytes:
        """Guard a tensor.

        Args:
            tensor: the view to guard.
            check: called before every operation; raises once the memory must not be used.
        """
        guarded = tensor.as_subclass(cls)
        guarded._check = check
        return guarded

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check every guarded argument, run the operation on plain tensors, guard what shares memory with an argument."""
        guards: dict[int, Callable[[], None]] = {}
        for value in tree_iter((args, kwargs or {})):
            if isinstance(value, cls):
                value._check()
                with torch._C.DisableTorchFunctionSubclass():
                    guards[value.untyped_storage()._cdata] = value._check
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))

            def guard(tensor: torch.Tensor) -> torch.Tensor:
                check = guards.get(tensor.untyped_storage()._cdata)
                return tensor if check is None or isinstance(tensor, cls) else cls.over(tensor, check)

            return tree_map_only(torch.Tensor, guard, result)


@attrs.frozen
class _DeviceBytes:
    """Device memory as the CUDA array interface (version 3) describes it; ROCm builds of torch read the same."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None}


def device_bytes(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Device memory as a uint8 tensor [nbytes] that does not own it.

    Raises:
        ResourceError: torch made a copy, or put it elsewhere than asked.
    """
    tensor = torch.as_tensor(_DeviceBytes(address, nbytes), device=device)
    if tensor.data_ptr() != address or tensor.device != device:
        raise ResourceError(
            f"a view of {nbytes} bytes at {address:#x} on {device} became {tensor.data_ptr():#x} on {tensor.device}: torch copied it"
        )
    return tensor
