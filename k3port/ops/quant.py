"""MXFP4: 4-bit floats in groups of 32 that share one power-of-two scale (OCP Microscaling v1.0, E2M1 with E8M0).

The layout constants of the format live here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

GROUP_SIZE = 32
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of the three magnitude bits; bit 3 of a nibble is the sign, so code 8 is -0."""
SCALE_BIAS = 127
SCALE_NAN = 255


@cache
def _e2m1(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The 16 values by code; kept per device, so that expanding a matrix on a GPU does not wait for an upload."""
    return torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """A weight ``[out, in]`` as stored: ``packed`` uint8 ``[out, in/2]``, ``scale`` uint8 ``[out, in/32]``.

    The low nibble of byte j is element 2j, the high nibble element 2j+1. Groups run along the input axis.
    """

    packed: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_mxfp4(self.packed, self.scale, dtype)


def scale_values(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E8M0 bytes to numbers: byte s is 2^(s-127), byte 0 is 2^-127 (a subnormal in fp32, not zero), byte 255 is NaN.

    Args:
        scale: uint8, any shape.
        dtype: float32, float64 or bfloat16; float16 cannot hold the range.
    """
    exponent = scale.to(torch.int32) - SCALE_BIAS
    value = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
    return torch.where(scale == SCALE_NAN, torch.nan, value).to(dtype)


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Expands MXFP4 to plain numbers; exact in float32, and in bfloat16 for scale bytes up to 252.

    Args:
        packed: uint8 ``[..., in/2]``, low nibble first.
        scale: uint8 ``[..., in/32]``.
        dtype: result type.

    Returns:
        ``[..., in]`` of ``dtype``.

    Raises:
        ValueError: the two tensors do not describe the same number of whole groups.
    """
    num_in = packed.shape[-1] * 2
    if num_in % GROUP_SIZE or scale.shape != (*packed.shape[:-1], num_in // GROUP_SIZE):
        raise ValueError(
            f"MXFP4 scale {tuple(scale.shape)} does not fit packed {tuple(packed.shape)}: "
            f"expected one byte per {GROUP_SIZE} elements, so [..., {num_in / GROUP_SIZE:g}]"
        )
    table = _e2m1(dtype, packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    values = table[codes.to(torch.int32)].reshape(*scale.shape, GROUP_SIZE)
    # Scales up to 2^127 times 6 overflow float32 only where the format itself leaves the range of float32.
    return (values * scale_values(scale, dtype).unsqueeze(-1)).reshape(*packed.shape[:-1], num_in)


def quantize_mxfp4(weight: torch.Tensor) -> Mxfp4Tensor:
    """Rounds ``[out, in]`` to the nearest MXFP4 numbers, ties to the even code.

    The scale is the power of two that puts the largest magnitude of a group in [4, 8) (OCP Microscaling v1.0, 6.3);
    what exceeds 6 saturates. A group of zeros gets scale 2^-127.

    Raises:
        ValueError: ``in`` is not a multiple of 32, or a value is not finite.
    """
    rows, num_in = weight.shape
    if num_in % GROUP_SIZE:
        raise ValueError(f"MXFP4 needs a multiple of {GROUP_SIZE} columns, got {num_in}")
    if not torch.isfinite(weight).all():
        raise ValueError("MXFP4 cannot hold values that are not finite")
    groups = weight.double().reshape(rows, num_in // GROUP_SIZE, GROUP_SIZE)
    largest = groups.abs().amax(dim=-1)
    _, exponent = torch.frexp(largest)  # largest = m * 2^exponent, m in [0.5, 1)
    byte = torch.where(largest > 0, exponent - 3 + SCALE_BIAS, 0).clamp(0, SCALE_NAN - 1)
    scaled = groups.abs() / torch.ldexp(torch.ones_like(largest), byte - SCALE_BIAS).unsqueeze(-1)
    middles = torch.tensor(
        [(a + b) / 2 for a, b in pairwise(E2M1_MAGNITUDES)], dtype=torch.float64, device=weight.device
    )
    code = torch.bucketize(scaled, middles)  # a tie takes the lower code ...
    tie_up = torch.isin(scaled, middles) & (code % 2 == 1)  # ... unless that one is odd
    code = code + tie_up + 8 * torch.signbit(groups)
    nibbles = code.reshape(rows, num_in // 2, 2).to(torch.uint8)
    return Mxfp4Tensor(packed=nibbles[..., 0] | (nibbles[..., 1] << 4), scale=byte.to(torch.uint8))
