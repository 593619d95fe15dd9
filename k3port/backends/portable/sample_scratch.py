"""How rows of logits are divided by the Triton kernels for sampling, and the scratch memory that takes."""

from __future__ import annotations

from k3port.backends.portable.tuning import Config, entries
from k3port.oracle.spec import OpQuery

CANDIDATE_BYTES = 256 << 20
"""Most memory for the candidates of rows with top-k or top-p; more rows are drawn in parts."""


def span_count(config: Config, vocab: int) -> int:
    """Number of spans of a row."""
    return -(-vocab // config["SPAN"])


def span_block(config: Config, vocab: int) -> int:
    """Lanes for one number per span and one more, a power of two."""
    return max(16, 1 << span_count(config, vocab).bit_length())


def rows_at_once(vocab: int) -> int:
    """Most rows of a part: any logit of a row may be a candidate."""
    return max(1, CANDIDATE_BYTES // (4 * vocab))


def scratch_bytes(config: Config, rows: int, vocab: int) -> int:
    """Scratch memory of a call in which some row has top-k or top-p."""
    spans, pivots = span_count(config, vocab), config["PIVOTS"]
    # Peak, lowest logit, id, mass and ties of each span; then two tables of counts and masses, pivots, bands, offsets.
    drawn = spans * (4 + 4 + 4 + 8 + 4)
    cut = 2 * spans * pivots * (4 + 8) + 2 * (4 * pivots + 8 * 8) + 4 * (spans + 1) + 8
    return min(rows, rows_at_once(vocab)) * (4 * vocab + drawn + cut)


def sample_workspace(query: OpQuery) -> int:
    """Most scratch memory of drawing one id for each of ``B`` requests, for any GPU's configuration."""
    rows, vocab = query.axes.get("B", 1), query.axes.get("V", 1)
    return max(scratch_bytes(entry.config, rows, vocab) for entry in entries("sample"))
