"""``k3port run``: where the prompt comes from, what is printed where, and the plan it shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3port.cli import inputs
from k3port.cli.run import DTYPES

SHORT = ("-n", "8", "--seed", "7")
CLOSING = re.compile(
    r"prompt 5 tok · answer \d+ tok · TTFT [\d.]+ m?s · [\d.]+ tok/s · peak [\d.]+ GiB · length · seed 7\n$"
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3PORT_THREADS", "1")


@pytest.fixture(scope="module")
def answer(tiny_checkpoint: Path) -> str:
    """What the tiny model writes after "Hello" with seed 7, from the library."""
    import k3port as library

    params = library.SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95, seed=7)
    return library.load(tiny_checkpoint).generate("Hello", params)[0].text


def test_text_goes_to_stdout_and_the_rest_to_stderr(k3port: Any, tiny_checkpoint: Path, answer: str) -> None:
    result = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT)
    assert result.code == 0
    assert result.out.rstrip("\n") == answer.rstrip("\n")
    first, last = result.err.splitlines(keepends=True)
    assert re.match(
        r"k3port \d\S* · tiny · cpu \(float32\) · kernels: .*\d+ reference.* · threads 1/1 · context", first
    )
    assert CLOSING.match(last)
    assert "\x1b" not in result.out + result.err


def test_quiet_prints_nothing_but_the_text(k3port: Any, tiny_checkpoint: Path) -> None:
    result = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT, "-q")
    assert (result.code, result.err) == (0, "")
    assert result.out


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_the_prompt_can_come_from_stdin_or_a_file(
    k3port: Any, tiny_checkpoint: Path, tmp_path: Path, answer: str, ending: str
) -> None:
    data = ("Hello" + ending).encode()
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    common = ("run", "--model", tiny_checkpoint, *SHORT, "-q")
    for result in (
        k3port(*common, stdin=data),
        k3port(*common, "-", stdin=data),
        k3port(*common, "-f", "-", stdin=data),
        k3port(*common, "--file", file),
        k3port(*common, "--", "Hello", stdin=b"this is not read"),
    ):
        assert (result.code, result.out.rstrip("\n")) == (0, answer.rstrip("\n"))


def test_json_is_one_document(k3port: Any, tiny_checkpoint: Path, answer: str) -> None:
    result = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--json")
    assert result.code == 0
    document = json.loads(result.out)
    assert document["text"] == answer
    assert len(document["token_ids"]) == 8
    assert (document["finish_reason"], document["prompt_tokens"], document["seed"]) == ("length", 5, 7)
    assert document["plan"]["kernels"]["linear"] == "cpu.linear"
    timings = document["timings"]
    assert timings["ttft_s"] > 0
    assert timings["decode_tokens_per_s"] > 0
    assert timings["peak_rss_bytes"] > 50e6
    assert (document["warnings"], document["model"]) == ([], "tiny")
    assert CLOSING.search(result.err)
    quiet = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--json", "-q")
    assert quiet.err == ""
    assert json.loads(quiet.out)["token_ids"] == document["token_ids"]


def test_one_token_has_no_rate(k3port: Any, tiny_checkpoint: Path) -> None:
    result = k3port("run", "Hello", "--model", tiny_checkpoint, "-n", "1", "--json")
    assert "tok/s" not in result.err
    assert json.loads(result.out)["timings"]["decode_tokens_per_s"] is None


def test_a_stop_id_ends_the_text_and_is_not_part_of_it(k3port: Any, tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "stops"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(320))}))
    result = k3port("run", "Hello", "--model", folder, "--json")
    document = json.loads(result.out)
    assert (document["finish_reason"], document["token_ids"], document["text"]) == ("stop", [], "")
    more = json.loads(k3port("run", "Hello", "--model", folder, "--json", "--ignore-eos", "-n", "4").out)
    assert (more["finish_reason"], len(more["token_ids"])) == ("length", 4)


def test_greedy_is_temperature_zero(k3port: Any, tiny_checkpoint: Path) -> None:
    runs = [
        json.loads(k3port("run", "Hello", "--model", tiny_checkpoint, "-n", "6", "--json", *options).out)["token_ids"]
        for options in (("--greedy",), ("--greedy", "--seed", "5"), ("--temperature", "0"), ("--top-k", "1"))
    ]
    assert runs.count(runs[0]) == 4


def test_a_drawn_seed_is_shown_and_repeats_the_text(k3port: Any, tiny_checkpoint: Path) -> None:
    first = json.loads(k3port("run", "Hello", "--model", tiny_checkpoint, "-n", "8", "--json").out)
    seed = first["seed"]
    second = json.loads(k3port("run", "Hello", "--model", tiny_checkpoint, "-n", "8", "--json", "--seed", seed).out)
    assert second["token_ids"] == first["token_ids"]


def test_the_end_of_the_context_is_a_warning(k3port: Any, tiny_checkpoint: Path) -> None:
    result = k3port("run", "x" * 60, "--model", tiny_checkpoint, "--context", "64", "--ignore-eos", "--json")
    document = json.loads(result.out)
    assert len(document["token_ids"]) == 4
    assert document["warnings"] == ["the answer ended at the limit of the context, 64 tokens"]


def test_pins_reach_the_plan(k3port: Any, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3PORT_KERNELS", "linear=reference.linear,rms_norm=reference.rms_norm")
    pins = ("--kernel", "kda_core@decode=reference.kda_core", "--kernel", "linear=cpu.linear")
    result = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--json", *pins)
    kernels = json.loads(result.out)["plan"]["kernels"]
    assert kernels["kda_core_decode"] == "reference.kda_core"
    assert kernels["kda_core_prefill"] == "cpu.kda_core_chunk"
    assert (kernels["linear"], kernels["rms_norm"]) == ("cpu.linear", "reference.rms_norm")


def test_dtype_and_platform(k3port: Any, tiny_checkpoint: Path) -> None:
    from k3port.runtime import runtime

    assert set(DTYPES) == set(runtime.DTYPES)
    assert f"Default: {runtime.DEFAULT_KV_TOKENS}." in k3port("run", "--help").out
    options = ("--dtype", "bfloat16", "--platform", "cpu", "--threads", "2", "--context", "100")
    result = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT, *options)
    assert result.code == 0
    assert "cpu (bfloat16)" in result.err
    assert "threads 2/2 · context 128" in result.err


def test_dry_run_prints_every_op_and_loads_nothing(tiny_checkpoint: Path) -> None:
    code = (
        "import sys; from k3port.cli.main import main; "
        f"code = main(['run', '--dry-run', '--model', {str(tiny_checkpoint)!r}, *sys.argv[1:]]); "
        "sys.exit(code or 9 * ('torch' in sys.modules))"
    )
    text, document = (
        subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
        for args in ([], ["--json"])
    )
    assert "kernels:" in text.stderr.splitlines()[0]
    lines = text.stdout.splitlines()
    assert lines[0].split() == ["op", "phase", "kernel", "why"]
    assert any(re.fullmatch(r"kda_core +decode +cpu\.kda_core_step +first of 2 that fit", x) for x in lines)
    selections = json.loads(document.stdout)["plan"]["selections"]
    assert len(selections) == len(lines) - 1
    assert all(s["rejected"] or len(s["accepted"]) == 1 for s in selections)


def test_verbose_prints_plan_and_notes(k3port: Any, tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bare"))
    (folder / "generation_config.json").unlink()
    result = k3port("run", "Hello", "--model", folder, *SHORT, "-v")
    assert "first of 2 that fit" in result.err
    assert "note: generation_config.json is not there (optional)" in result.err


def test_the_embedded_model_needs_no_prompt(
    k3port: Any, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3port.cli.run.embedded_checkpoint", lambda: tiny_checkpoint)
    for stdin in (None, b""):
        result = k3port("run", "-n", "2", stdin=stdin)
        assert (result.code, bool(result.out)) == (0, True)
        assert f'no prompt: continuing the built-in one, "{inputs.BUILTIN_PROMPT}"' in result.err


def test_text_is_streamed(spawn: Callable[..., subprocess.Popen[bytes]], tiny_checkpoint: Path) -> None:
    process = spawn("run", "Hello", "--model", tiny_checkpoint, "-n", "600", "--ignore-eos", "-q")
    assert process.stdout is not None
    assert len(process.stdout.read1(1)) == 1
    assert process.poll() is None  # the first piece was there long before the end
    rest, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert len(rest) > 600


def test_a_closed_pipe_is_quiet(spawn: Callable[..., subprocess.Popen[bytes]], tiny_checkpoint: Path) -> None:
    process = spawn("run", "Hello", "--model", tiny_checkpoint, "-n", "2000", "--ignore-eos", "-q")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read1(1)
    process.stdout.close()
    assert (process.wait(timeout=60), process.stderr.read()) == (0, b"")
    process.stderr.close()


def test_help_and_version_are_quick() -> None:
    for args, expected in ((["--help"], "run"), (["run", "--help"], "--temperature"), (["--version"], "k3port 0")):
        code = (
            "import sys; from k3port.cli.main import main; "
            f"code = main({args!r}); sys.exit(code or 9 * ('torch' in sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert expected in done.stdout
        assert done.stderr == ""
