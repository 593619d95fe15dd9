"""How a long KDA prefill is cut into slabs of chunks, and the scratch memory that takes."""

from __future__ import annotations

from k3port.backends.limits import ITEM_BYTES, step_tokens
from k3port.backends.portable.tuning import Config, entries
from k3port.oracle.spec import OpQuery


def slabs(config: Config, chunks: int) -> tuple[int, int]:
    """Number and size of the slabs of ``chunks`` chunks: near ``slab_chunks`` each, and as even as possible.

    A short rest of a slab would cost its launches and hide nothing.
    """
    wanted = config["slab_chunks"]
    count = max(1, (chunks + wanted // 2) // wanted)
    return count, -(-chunks // count)


def scratch_bytes(config: Config, chunks: int, heads: int, key_dim: int, value_dim: int, itemsize: int) -> int:
    """What the chunks of a call leave for its scan: all of one slab, or two slabs that take turns."""
    count, size = slabs(config, chunks)
    rows = 1 << config["bits"]
    row = (4 * key_dim + value_dim + rows) * itemsize + 4 * (key_dim + rows)
    return min(2, count) * size * heads * rows * row


def prefill_workspace(query: OpQuery) -> int:
    """Most scratch memory of a step with up to the query's tokens and ``B`` requests, for any GPU's configuration."""
    axes, item = query.axes, ITEM_BYTES.get(query.dtype, 4)
    heads, key_dim, value_dim = (axes.get(name, 1) for name in ("H", "K", "V"))
    most = 0
    for entry in entries("kda_chunk"):
        # Every request starts a chunk of its own. Fewer chunks can take more memory: two larger slabs.
        chunks = (step_tokens(query) >> entry.config["bits"]) + axes.get("B", 1)
        sizes = range(max(1, chunks - 2 * entry.config["slab_chunks"]), chunks + 1)
        needed = (scratch_bytes(entry.config, n, heads, key_dim, value_dim, item) for n in sizes)
        most = max(most, *needed)
    return most
