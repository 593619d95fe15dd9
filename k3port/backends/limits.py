"""Arithmetic that declared kernels share: message sizes as token counts, head and width padding, fp8 flavours."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from packaging.version import InvalidVersion, Version

from k3port.oracle.spec import AxisRule, Check, OpQuery, Padding, Target, Tokens

KIB, MIB = 1 << 10, 1 << 20

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
}
STEP_TOKENS = 8192
"""Tokens of the largest step that workspaces are sized for where a query has no end."""

BLACKWELL = ("sm_100", "sm_103")
"""Data-centre Blackwell; its kernels use tensor memory, which sm_120 and sm_121 do not have."""
ADA_AND_LATER = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_107", "sm_120", "sm_121")
AMPERE_AND_LATER = ("sm_80", "sm_86", *ADA_AND_LATER)
CDNA = ("gfx942", "gfx950")
TRITON_AMD = (*CDNA, "gfx1250")
NATIVE_MXFP4 = frozenset({"sm_100", "sm_103", "sm_107", "sm_120", "sm_121", "gfx950", "gfx1250"})

KDA_DIMS = (
    AxisRule("K", allowed=(128,)),
    AxisRule("V", allowed=(128,)),
    AxisRule("bounded", allowed=(1,), why="computes the bounded gate only"),
)
FUSED_KDA_DIMS = (*KDA_DIMS, AxisRule("W", allowed=(4,)))
LATENT_DIMS = (AxisRule("C", allowed=(512,)), AxisRule("R", allowed=(64,)))
EXPANDED_DIMS = (AxisRule("N", allowed=(128,)), AxisRule("R", allowed=(64,)), AxisRule("V", allowed=(128,)))


def fp8_dtype(arch: str) -> str:
    """The 8-bit float that an architecture computes with; empty where it has none.

    gfx942 has its own flavour, whose bits mean half as much: the dtype belongs to each tensor and is never assumed.
    """
    if arch == "gfx942":
        return "float8_e4m3fnuz"
    return "float8_e4m3fn" if arch in ADA_AND_LATER or arch in TRITON_AMD else ""


def readable_cache(query: OpQuery, target: Target) -> str | None:
    """An fp8 cache can be read only where the hardware converts from its own flavour."""
    if ITEM_BYTES.get(query.kv_dtype) != 1:
        return None
    own = fp8_dtype(target.device.arch)
    if query.kv_dtype == own:
        return None
    return f"{target.device.arch} reads {own or 'no 8-bit floats'}, the cache is {query.kv_dtype}"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def step_tokens(query: OpQuery) -> int:
    """Tokens of the largest step of a query, :data:`STEP_TOKENS` where it has no end."""
    return STEP_TOKENS if query.tokens[1] is None else query.tokens[1]


def newer_than(target: Target, package: str, version: str) -> bool:
    """Whether a package is at least ``version``; absent or unreadable counts as new, since it is refused anyway."""
    found = target.packages.get(package)
    try:
        return found is None or Version(found) >= Version(version)
    except InvalidVersion:
        return True


def row_bytes(query: OpQuery) -> int:
    """Bytes that one token adds to a message. Logits are gathered in float32 whatever the activations are."""
    if query.op == "all_gather":
        return query.axes.get("V", 1) * ITEM_BYTES["float32"]
    return query.axes.get("D", 1) * ITEM_BYTES.get(query.dtype, 4)


def message_window(query: OpQuery, smallest: int = 0, largest: int | None = None) -> Tokens:
    """The steps whose message is between two sizes in bytes, both included. ``(1, 0)`` where no step is."""
    row = row_bytes(query)
    first = max(1, -(-smallest // row))
    if largest is None:
        return first, None
    last = largest // row
    return (first, last) if last >= first else (1, 0)


def several_ranks(query: OpQuery, target: Target) -> str | None:
    """Collectives have nothing to send where there is one rank."""
    del target
    return None if query.tp > 1 else "serves two ranks and more, asked for 1"


def head_builds(heads: tuple[int, ...], what: str) -> Check:
    """A kernel that exists for some head counts only. The reason says which parallel size reaches one of them."""

    def check(query: OpQuery, target: Target) -> str | None:
        del target
        found = query.axes.get("H")
        if found is None or found in heads:
            return None
        total = found * query.tp
        smaller = (query.tp >> n for n in range(1, query.tp.bit_length()))
        reachable = [tp for tp in smaller if total % tp == 0 and total // tp in heads]
        way = f"; --tp {reachable[0]} gives {total // reachable[0]} heads per rank" if reachable else ""
        return f"H = {found}, {what} is built for {', '.join(map(str, heads))} heads{way}"

    return check


def pad_heads(multiple: int) -> Callable[[OpQuery], Padding | None]:
    """Heads rounded up in queries and outputs of latent attention; the cache has one row for all heads."""

    def padding(query: OpQuery) -> Padding | None:
        heads = query.axes.get("H", 0)
        padded = round_up(heads, multiple)
        if padded == heads:
            return None
        axes, item = query.axes, ITEM_BYTES.get(query.dtype, 4)
        extra = (padded - heads) * (2 * axes.get("C", 512) + axes.get("R", 64)) * item
        return Padding(
            {"H": padded},
            f"{heads} heads padded to {padded}: {100 * (padded - heads) / heads:.0f}% more attention work, "
            f"{extra} bytes more per token for queries and outputs, the cache does not grow",
        )

    return padding


def expert_bytes(axes: Mapping[str, int], ep: int = 1, *, bits: float = 4.25) -> int:
    """Bytes of one layer's routed experts on one rank; MXFP4 takes 4.25 bits per weight, its scales included."""
    return int(axes.get("E", 1) // ep * 3 * axes.get("I", 1) * axes.get("L", 1) * bits / 8)


def pad_experts(width: int, latent: int) -> Callable[[OpQuery], Padding | None]:
    """Expert width and latent size rounded up, with what that costs in weights."""

    def padding(query: OpQuery) -> Padding | None:
        axes = query.axes
        padded = {"I": round_up(axes.get("I", width), width), "L": round_up(axes.get("L", latent), latent)}
        changed = {name: size for name, size in padded.items() if axes.get(name, size) != size}
        if not changed:
            return None
        before, after = expert_bytes(axes, query.ep), expert_bytes({**axes, **padded}, query.ep)
        sizes = ", ".join(f"{name} {axes[name]} to {size}" for name, size in changed.items())
        percent = 100 * (after - before) / before
        return Padding(
            padded, f"{sizes}: {percent:.0f}% more expert weights, {after - before} bytes per layer and rank"
        )

    return padding
