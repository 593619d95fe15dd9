"""How far a result is from the float64 reference, and whether that is too far."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ABSOLUTE_SHARE = 1e-4
"""Share of the relative tolerance that is allowed as an absolute error, for results that are zero or nearly so."""
PEAK_FACTOR = 4.0
"""The largest single error, relative to the largest expected number, may be this many times the RMS tolerance: one
wrong element in a large tensor hardly moves the RMS."""
PLAIN_FACTOR = 2.0
"""A kernel may show this many times the error that plain torch shows in the same dtype, where that is more than the
contract's tolerance."""


@dataclass(frozen=True)
class OutputError:
    """How far one output, or one updated argument, is from the reference."""

    name: str
    relative_rms: float
    peak: float
    """Largest error over the largest expected magnitude."""
    tolerance: float
    """Bound of ``relative_rms``; ``peak`` may be :data:`PEAK_FACTOR` times as large."""
    ok: bool


def distance(value: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, float, float]:
    """RMS and largest error, RMS and largest magnitude of the expected numbers; NaN stays NaN, empty is 0."""
    if not expected.numel():
        return 0.0, 0.0, 0.0, 0.0
    error = value - expected
    size, largest = float(expected.square().mean().sqrt()), float(expected.abs().max())
    return float(error.square().mean().sqrt()), float(error.abs().max()), size, largest


def plain_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """What plain torch shows in the same dtype, as a relative RMS or a quarter of the peak, whichever is larger.

    Numbers that are not finite on either side are left out; 0 for integers.
    """
    if not value.is_floating_point() or value.shape != expected.shape:
        return 0.0
    value = value.double()
    both = torch.isfinite(value) & torch.isfinite(expected)
    rms, most, size, largest = distance(value[both], expected[both])
    return max(rms / size, most / largest / PEAK_FACTOR) if size else 0.0


def compare(name: str, value: torch.Tensor, expected: torch.Tensor, tolerance: float, faults: list[str]) -> OutputError:
    """Measures one result; what is wrong with it is added to ``faults`` as a sentence.

    Args:
        value: any dtype and device.
        expected: the same shape, float64 (or integers, which must be equal).
    """
    value = value.detach().cpu()
    if not value.is_floating_point():
        wrong = int((value != expected).sum())
        if wrong:
            faults.append(f"{name}: {wrong} of {value.numel()} numbers differ")
        return OutputError(name, float(wrong), float(wrong), 0.0, not wrong)
    limit = torch.finfo(value.dtype).max
    value = value.double()
    # Beyond the range of the dtype the right answer is infinity, or the largest number where rounding stops there.
    beyond = expected.abs() > limit
    value = torch.where(beyond & (value == limit * expected.sign()), torch.inf * expected.sign(), value)
    expected = torch.where(beyond, torch.inf * expected.sign(), expected)
    near = (expected.abs() > limit * (1 - 2 * tolerance)) & (value == torch.inf * expected.sign())
    expected = torch.where(near, value, expected)
    finite = torch.isfinite(expected)
    # Where the reference is infinite the kernel must be too, with the same sign.
    misplaced = int((~torch.isfinite(value) & finite).sum()) + int((value != expected)[~finite].sum())
    if misplaced:
        count = f"{misplaced} of {value.numel()} numbers"
        faults.append(f"{name}: {count} are not finite, or finite where they must not be")
    value, expected = value[finite], expected[finite]
    if not value.numel():
        return OutputError(name, 0.0, 0.0, tolerance, not misplaced)
    rms, most, size, largest = distance(value, expected)
    floor = tolerance * ABSOLUTE_SHARE
    relative = rms / size if size else rms
    peak = most / largest if largest else most
    fits = rms <= tolerance * size + floor and most <= PEAK_FACTOR * tolerance * largest + floor
    if not fits and not misplaced:
        faults.append(f"{name}: relative RMS error {relative:.2e}, peak {peak:.2e}; tolerance {tolerance:.0e}")
    return OutputError(name, relative, peak, tolerance, fits and not misplaced)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaN payloads included."""
    return not a.numel() or torch.equal(_bits(a), _bits(b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    # A tensor with an axis of size 1 counts as contiguous whatever its stride there, and then has no view as bytes.
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)
