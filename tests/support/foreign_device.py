"""A second device made of labels: the tensors stay in host memory, and mixing the two homes is an error as on a GPU.

The mode sees every torch function that Python code calls. A tensor is foreign if it was made with the foreign device or
comes from a foreign one; ``tensor.device`` says ``cuda:0`` then. So a kernel that makes an index, a mask or a table on the
default device fails here as it would on a GPU. What it cannot see: calls inside compiled code, Triton, and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from k3port.ops import quant

DEVICE = torch.device("cuda", 0)
_LABEL = "_foreign"
_GET_DEVICE: Any = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_TRANSFERS = {torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.cpu}
_WAITS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "nonzero", "cpu"}


class MixedDevicesError(RuntimeError):
    """A torch function got tensors of both homes."""


def is_foreign(tensor: torch.Tensor) -> bool:
    return bool(tensor.__dict__.get(_LABEL, False))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class ForeignDevice(TorchFunctionMode):
    """Inside, ``cuda:0`` is a device. ``waits`` counts by name what would make the host wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> ForeignDevice:
        quant._e2m1.cache_clear()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        # A table that was made in here must not be taken for one that lies on a real GPU.
        quant._e2m1.cache_clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _GET_DEVICE:
            return DEVICE if is_foreign(args[0]) else func(*args)
        home, args, kwargs = _asked_home(func, args, kwargs)
        inputs = list(_tensors([*args, kwargs]))
        foreign = [t for t in inputs if is_foreign(t)]
        name = getattr(func, "__name__", str(func))
        if foreign and len(foreign) < len(inputs) and func not in _TRANSFERS:
            shapes = [tuple(t.shape) for t in inputs if not is_foreign(t)]
            raise MixedDevicesError(f"{name}: tensors {shapes} are in host memory, {len(foreign)} others are not")
        if foreign and name in _WAITS:
            self.waits[name] += 1
        result = func(*args, **kwargs)
        if func is torch.Tensor.copy_:
            home = is_foreign(args[0])
        if home is None:
            home = bool(foreign)
        return _labelled(result, home, inputs)


def _asked_home(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[bool | None, Any, dict[str, Any]]:
    """Whether the call names a home, and the call without the foreign device."""
    home: bool | None = False if func is torch.Tensor.cpu else None

    def plain(value: Any) -> Any:
        nonlocal home
        named = isinstance(value, torch.device) or (func is torch.Tensor.to and isinstance(value, str))
        if named:
            device = torch.device(value)
            home = device.type == DEVICE.type
            return torch.device("cpu")
        return value

    args = tuple(plain(value) for value in args)
    if kwargs.get("device") is not None:
        kwargs["device"] = plain(torch.device(kwargs["device"]))
    kwargs.pop("pin_memory", None)
    return home, args, kwargs


def _labelled(result: Any, home: bool, inputs: list[torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        if any(result is other for other in inputs) and is_foreign(result) != home:
            result = result.clone()  # a transfer that found nothing to do, since both homes are host memory
        if home:
            setattr(result, _LABEL, True)
        return result
    if isinstance(result, tuple | list):
        parts = [_labelled(part, home, inputs) for part in result]
        if type(result) in (tuple, list):
            return type(result)(parts)
    return result  # named tuples of torch: their parts were labelled in place


def foreign_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers on the foreign device."""
    copy = tensor.clone()
    setattr(copy, _LABEL, True)
    return copy
