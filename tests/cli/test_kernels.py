"""``k3port kernels``: the registry, and the trace of one op."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3port.errors import ExitCode
from k3port.hookspecs import hookimpl
from k3port.oracle.spec import KernelSpec, Requires
from k3port.plugins import default_registry, make_registry
from k3port.testing.published import published_k3_config


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "config.json"
    path.write_text(json.dumps(published_k3_config()))
    return path


def test_every_kernel_is_listed(k3port: Any) -> None:
    result = k3port("kernels", "list")
    assert (result.code, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    assert rows[0] == ["op", "kernel", "phases", "built", "limits"]
    assert {row[1] for row in rows[1:]} == {spec.name for spec in default_registry().kernels}
    built = {row[1]: row[3] for row in rows[1:]}
    assert (built["cpu.linear"], built["cuda.flashinfer_mla_trtllm"]) == ("yes", "no")


def test_the_list_can_be_narrowed(k3port: Any) -> None:
    of_op = k3port("kernels", "list", "--op", "mla_attend").out
    assert {line.split()[0] for line in of_op.splitlines()[1:]} == {"mla_attend"}
    names = {line.split()[1] for line in k3port("kernels", "list", "--platform", "mi355").out.splitlines()[1:]}
    assert "rocm.aiter_mla_asm" in names
    assert not any(name.startswith(("cuda.", "cpu.")) for name in names)
    assert "reference.linear" in names
    # An architecture counts, not only its vendor.
    turing = {line.split()[1] for line in k3port("kernels", "list", "--platform", "h200").out.splitlines()[1:]}
    assert "cuda.flashinfer_mla_trtllm" not in turing
    assert "cuda.flashinfer_mla_wrapper" in turing


def test_the_list_as_json(k3port: Any) -> None:
    document = json.loads(k3port("kernels", "list", "--op", "kda", "--json").out)
    records = {record["name"]: record for record in document["kernels"]}
    assert set(records) == {spec.name for spec in default_registry().kernels if spec.op == "kda"}
    record = records["reference.kda"]
    assert record["built"] is True
    assert record["parts"] == ["short_conv", "kda_core", "gated_norm"]
    assert record["layouts"] == {"kda_state": "vk:float32", "conv_state": "wp"}


def test_explain_shows_the_choice_and_each_candidate(k3port: Any, k3: Path) -> None:
    result = k3port("kernels", "explain", "mla_attend@decode", "--model", k3, "--platform", "mi355", "--tp", "8")
    assert result.code == 0
    sizes = "H 12, C 512, N 128, R 64, V 128, page 64; bfloat16, bfloat16; tp 8, ep 1"
    assert result.out.startswith(f"mla_attend_decode: {sizes}\n")
    assert "  runs now (all tokens): none: no kernel fits" in result.out
    assert re.search(r"^  reference\.mla_attend_absorbed: REFERENCE .*\n    hint: --allow-reference$", result.out, re.M)
    assert "  would run (all tokens): rocm.aiter_mla_asm: " in result.out
    names = re.findall(r"^  (\w+\.\w+): ", result.out, re.M)
    assert sorted(names) == sorted(s.name for s in default_registry().kernels if s.op == "mla_attend")
    assert names[0] == "rocm.aiter_mla_asm"
    asm = result.out[result.out.index("  rocm.aiter_mla_asm: ") :]
    assert asm.startswith("  rocm.aiter_mla_asm: NOT_BUILT its adapter does not exist")
    assert "\n    padding: 12 heads padded to 16" in asm
    assert "\n    layouts: mla_cache = paged:latent" in asm
    assert re.search(r"^  cuda\.flashinfer_mla_trtllm: VENDOR needs nvidia", result.out, re.M)


def test_explain_with_references_allowed(k3port: Any, k3: Path) -> None:
    asked = ("kernels", "explain", "mla_attend@decode", "--model", k3, "--platform", "mi355", "--allow-reference")
    (now,) = [line for line in k3port(*asked).out.splitlines() if line.startswith("  runs now")]
    assert now.startswith("  runs now (all tokens): reference.mla_attend_absorbed: ")
    assert now.endswith("; a reference, allowed on this GPU")


def test_explain_gives_hints_and_windows(k3port: Any, k3: Path) -> None:
    asked = ("kernels", "explain", "--model", k3, "--platform", "b200", "--tp", "8")
    reduce = k3port(*asked, "all_reduce").out
    assert re.search(r"^    window: \d+\.\.\d+$", reduce, re.M)
    assert reduce.count("  would run (") > 1
    assert "  runs now (all tokens): none: no kernel fits" in reduce
    experts = k3port(*asked, "moe_experts").out
    assert re.search(r"NUMERICS .*mxfp8", experts)
    assert "    hint: --activations" in experts


def test_explain_as_json(k3port: Any, k3: Path) -> None:
    asked = ("kernels", "explain", "kda", "--model", k3, "--platform", "b200", "--tp", "16", "--json")
    document = json.loads(k3port(*asked).out)
    assert [trace["slot"] for trace in document["traces"]] == ["kda_prefill", "kda_decode"]
    decode = document["traces"][1]
    assert decode["query"]["axes"]["H"] == 6
    codes = {c["name"]: c["code"] for c in decode["candidates"]}
    assert codes["cuda.flashinfer_kda_decode"] == "AXIS"
    (chosen,) = decode["would_run"]
    assert chosen["kernel"] == decode["runs_now"][0]["kernel"] == "portable.kda_decode_fused"
    assert codes[chosen["kernel"]] == ""
    assert "--tp 8" in next(c for c in decode["candidates"] if c["name"] == "cuda.flashinfer_kda_decode")["detail"]


def test_a_kernel_that_runs_now_is_not_called_outranked(k3port: Any) -> None:
    """What would come first, were it built, is told beside it."""
    out = k3port("kernels", "explain", "rms_norm", "--platform", "h200").out
    assert "  runs now (all tokens): portable.rms_norm: " in out
    assert "  portable.rms_norm: runs now; would be OUTRANKED by cuda.flashinfer_rms_norm (not built)\n" in out
    asked = ("kernels", "explain", "rms_norm", "--platform", "h200", "--allow-reference")
    assert "  reference.rms_norm: OUTRANKED portable.rms_norm comes first\n" in k3port(*asked).out
    (trace,) = json.loads(k3port(*asked, "--json").out)["traces"]
    found = {c["name"]: c for c in trace["candidates"]}["portable.rms_norm"]
    assert (found["runs_now"], found["would_run"], found["code"]) == ([[1, None]], [], "")
    assert found["would_be"] == "OUTRANKED by cuda.flashinfer_rms_norm (not built)"


def test_no_platform_says_two_things_of_one_kernel(k3port: Any, k3: Path) -> None:
    """Neither of a kernel that runs that it is refused, nor of one that does not run that it fits."""
    for op in ("rms_norm", "kda", "kda_core", "short_conv", "gated_norm", "moe", "all_reduce", "linear", "mla_append"):
        for platform in ("h200", "b200", "mi355", "cpu"):
            asked = ("kernels", "explain", op, "--model", k3, "--platform", platform, "--tp", "8", "--json")
            for trace in json.loads(k3port(*asked).out)["traces"]:
                running = {answer["kernel"] for answer in trace["runs_now"]} - {""}
                fitting = {c["name"] for c in trace["candidates"] if not c["code"]}
                assert fitting == running, (op, platform)


def test_candidates_of_a_covered_op_are_covered(k3port: Any) -> None:
    out = k3port("kernels", "explain", "kda_core", "--platform", "h200").out
    for name, cover in (
        ("portable.kda_core_chunk", "portable.kda_prefill"),
        ("portable.kda_core_step", "portable.kda_decode_fused"),
        ("reference.kda_core", "portable.kda_decode_fused"),
    ):
        assert f"\n  {name}: COVERED by {cover}\n" in out
    assert ": fits" not in out and "--allow-reference" not in out
    for op in ("gated_norm", "short_conv"):
        out = k3port("kernels", "explain", op, "--platform", "h200").out
        assert f"\n  portable.{op}: COVERED by portable.kda_" in out and "--allow-reference" not in out


def test_a_reference_that_leave_would_not_select_gets_the_hint_of_a_pin(k3port: Any) -> None:
    asked = ("kernels", "explain", "rms_norm", "--platform", "h200")
    out = k3port(*asked).out
    assert re.search(
        r"^  reference\.rms_norm: REFERENCE .*\n    hint: --kernel rms_norm=reference\.rms_norm$", out, re.M
    )
    pinned = k3port(*asked, "--kernel", "rms_norm=reference.rms_norm").out
    assert "  reference.rms_norm: runs now\n" in pinned and "REFERENCE" not in pinned


def test_what_only_verification_uses_is_asked_with_drafts(k3port: Any) -> None:
    asked = ("kernels", "explain", "kda_commit", "--platform", "h200")
    result = k3port(*asked)
    assert result.code == ExitCode.USAGE
    assert "error: k3-nano uses kda_commit only where drafts are verified\nhint: --draft-tokens N" in result.err
    assert "  portable.kda_commit: runs now\n" in k3port(*asked, "--draft-tokens", "3").out


def test_more_drafts_than_a_record_holds(k3port: Any) -> None:
    asked = ("kernels", "explain", "kda@decode", "--platform", "h200", "--draft-tokens")
    out = k3port(*asked, "9").out
    refused = "portable.kda_decode_fused: AXIS records 8 tokens per request, asked for 10"
    assert f"  {refused}\n    hint: --draft-tokens 7 or fewer\n" in out
    assert "  portable.kda_decode_fused: runs now" in k3port(*asked, "7").out


def test_explain_without_a_plan_still_shows_candidates(k3port: Any, k3: Path) -> None:
    pin = ("--kernel", "mla_attend@decode=cuda.flashinfer_mla_trtllm")
    result = k3port("kernels", "explain", "mla_attend@decode", "--model", k3, "--platform", "h200", *pin)
    assert result.code == 0
    assert "warning: no kernel fits on h200: candidates are shown one by one" in result.err
    assert "cuda.flashinfer_mla_trtllm: ARCH needs sm_100" in result.out
    assert "would run" not in result.out


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (("explain", "mla_atend"), "unknown op 'mla_atend'", "did you mean mla_attend?"),
        (("explain", "zzz"), "unknown op 'zzz'", "ops: embed, "),
        (("explain", "linear@decode"), "linear has no phase 'decode'", "phases of linear: none"),
        (("explain", "kda@verify"), "kda has no phase 'verify'", "phases of kda: prefill, decode"),
        (("explain", "kda@"), "no phase after kda@", "give OP, OP@prefill or OP@decode"),
        (("explain", ""), "OP is empty", "give an op, such as rms_norm"),
        (("explain", " "), "OP is empty", "give an op, such as rms_norm"),
        (("explain", "@decode"), "OP is empty", "give an op, such as rms_norm"),
        (("check", ""), "NAME is empty", "give a kernel; k3port kernels list shows all"),
        (("check", " "), "NAME is empty", "give a kernel; k3port kernels list shows all"),
        (("list", "--op", ""), "--op is empty", "give a value"),
        (("explain",), "missing argument 'OP'", "k3port kernels explain --help"),
        (("list", "--op", "lineer"), "unknown op 'lineer'", "did you mean linear?"),
        (("list", "--platform", "b20"), "unknown platform 'b20'", "did you mean b200?"),
        (("lst",), "unknown command lst", "did you mean k3port kernels list?"),
    ],
)
def test_usage(k3port: Any, k3: Path, args: tuple[str, ...], message: str, hint: str) -> None:
    more = ("--model", k3) if args[0] == "explain" else ()
    result = k3port("kernels", *args, *more)
    assert (result.code, result.out) == (ExitCode.USAGE, "")
    assert f"error: {message}" in result.err
    assert f"hint: {hint}" in result.err


BAD = KernelSpec("mine.bad", "gated_norm", "json:dumps", "", requires=Requires(vendors="amd"))  # pyright: ignore
FAILING = KernelSpec(
    "mine.failing", "gated_norm", "json:dumps", "", priority=999,
    tokens=lambda q, t: 1 / 0, padding=lambda q: 1 / 0, note=lambda q, t: 1 / 0, workspace_bytes=lambda q: 1 / 0,
)  # fmt: skip  # pyright: ignore
BAD_WARNING = "warning: plugin Mine (given, 0): kernel mine.bad was left out: requires.vendors = 'amd': "


@pytest.fixture
def with_bad_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin with a wrong record, with one whose functions fail, and with many kernels of one op."""
    more = [KernelSpec(f"mine.k{n}", "gated_norm", "json:dumps", "") for n in range(9)]
    specs = [BAD, FAILING, KernelSpec("mine.unbuilt", "gated_norm", "", ""), *more]
    plugin = type("Mine", (), {"k3port_kernels": hookimpl(lambda self: specs)})()
    registry = make_registry([plugin], entry_points=False)
    for module in ("kernels", "check", "question"):
        monkeypatch.setattr(f"k3port.cli.{module}.default_registry", lambda: registry)


def test_a_bad_record_is_a_warning_and_stops_nothing(k3port: Any, with_bad_kernels: None, k3: Path) -> None:
    for args in (("kernels", "list"), ("kernels", "explain", "gated_norm", "--model", k3), ("plan", "--model", k3)):
        result = k3port(*args)
        assert result.code == 0, result.err
        assert next(line for line in result.err.splitlines() if "mine.bad" in line).startswith(BAD_WARNING)
    assert (
        "  mine.failing: AXIS its own tokens failed: ZeroDivisionError: division by zero"
        in k3port("kernels", "explain", "gated_norm", "--model", k3).out
    )


def test_quiet_shows_the_warnings_of_no_other_kernel(k3port: Any, with_bad_kernels: None) -> None:
    other = k3port("kernels", "check", "other.zzz", "--quiet")
    assert other.code == ExitCode.USAGE
    assert other.err.splitlines() == [
        "error: no kernel 'other.zzz'",
        "hint: k3port kernels list shows all; a plugin has to be installed",
    ]
    lost = k3port("kernels", "check", "mine.bad", "--quiet").err.splitlines()
    assert lost[0] == "error: no kernel 'mine.bad'"
    assert lost[1].startswith("  - plugin Mine (given, 0): kernel mine.bad was left out: ")
    assert lost[2] == "hint: correct its record; k3port kernels list shows the others"


def test_a_hint_names_five_kernels_at_most(k3port: Any, with_bad_kernels: None) -> None:
    result = k3port("kernels", "check", "mine.unbuilt", "--quiet")
    assert result.code == ExitCode.USAGE
    hint = result.err.splitlines()[-1]
    assert hint.startswith("hint: built kernels of gated_norm: mine.failing, mine.k0, mine.k1, mine.k2, mine.k3 and ")
    assert re.search(r" and \d+ more$", hint)


def test_the_group_alone_shows_its_commands(k3port: Any) -> None:
    result = k3port("kernels")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("Usage: k3port kernels ")


def test_an_op_that_the_model_does_not_use(k3port: Any, tiny_linear_folder: Path) -> None:
    result = k3port("kernels", "explain", "vision_patch", "--model", tiny_linear_folder)
    assert result.code == ExitCode.USAGE
    assert "linear does not use vision_patch" in result.err


def test_no_torch(k3: Path) -> None:
    code = (
        "import sys; from k3port.cli.main import main; "
        "code = main(sys.argv[1:]); sys.exit(code or 9 * bool({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    )
    for args in (["list"], ["explain", "kda", "--model", str(k3), "--platform", "mi355"]):
        command = [sys.executable, "-c", code, "kernels", *args]
        subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, check=True)
