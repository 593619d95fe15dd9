"""MXFP4 (OCP microscaling FP4): blocks of 32 along the last axis, E2M1 elements, one E8M0 exponent byte per block.

The same functions serve the straight-through rounding in training and the exporter, and every operation on the way
to the codes is exact in float32, so that the file holds precisely the weights the last training steps used.
"""

from __future__ import annotations

import torch

BLOCK = 32
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _scale_exponent(blocks: torch.Tensor) -> torch.Tensor:
    """Power-of-two exponent per block ``[..., n, 32] -> [..., n, 1]`` (int32).

    With amax = m * 2^e, 1 <= m < 2, the exponent is e - 2 (the block then reaches into [4, 8) units, clipped at 6),
    or e - 1 when m >= 1.75, where clipping would cost more than the coarser grid.
    """
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(2.0**-100)
    mantissa, exponent = torch.frexp(amax)  # mantissa in [0.5, 1)
    return (exponent - 3 + (mantissa >= 0.875).to(exponent.dtype)).to(torch.int32)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 magnitude of ``|x|`` (ties to even code), sign restored."""
    a = x.abs().clamp_max(6.0)
    # Spacing is 0.5 below 2, 1 below 4 and 2 up to 6; torch.round rounds ties to even multiples of the spacing.
    step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0)).to(x.dtype)
    return torch.copysign(torch.round(a / step) * step, x)


def fake_quantize(weight: torch.Tensor) -> torch.Tensor:
    """``dequantize(quantize(weight))`` in float32, for a weight ``[..., in]`` with ``in`` a multiple of 32."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    exponent = _scale_exponent(blocks)
    scale = torch.ldexp(torch.ones_like(blocks[..., :1]), exponent)
    return (_round_e2m1(blocks / scale) * scale).flatten(-2)


def straight_through(weight: torch.Tensor) -> torch.Tensor:
    """Rounded values forward, identity gradient backward."""
    return weight + (fake_quantize(weight) - weight).detach()


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes ``[..., in/2]`` (low nibble = even element) and E8M0 scales ``[..., in/32]``, both uint8."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    exponent = _scale_exponent(blocks)
    rounded = _round_e2m1(blocks / torch.ldexp(torch.ones_like(blocks[..., :1]), exponent)).flatten(-2)
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=weight.device)
    codes = torch.searchsorted(levels, rounded.abs().contiguous()).to(torch.uint8)
    # copysign keeps the sign of values that round to zero; code 8 (minus zero) is legal but useless.
    codes = torch.where((rounded < 0) & (codes > 0), codes + 8, codes)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.contiguous(), (exponent.squeeze(-1) + 127).to(torch.uint8).contiguous()


def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 weight ``[..., in]`` from packed codes and scales."""
    levels = torch.tensor(LEVELS + tuple(-v for v in LEVELS), dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    blocks = levels[codes].unflatten(-1, (-1, BLOCK))
    factor = torch.ldexp(torch.ones_like(blocks[..., :1]), scale.to(torch.int32).unsqueeze(-1) - 127)
    return (blocks * factor).flatten(-2)
