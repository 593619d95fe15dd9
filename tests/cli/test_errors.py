"""What goes wrong, how it is said, and the exit code. Prompts never show up in what is said."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import write_tiny_text_checkpoint

from k3port.errors import ExitCode

SECRET = "xyzzy-secret-prompt"


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(values)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


USAGE_CASES = [
    (["--temprature", "1"], "unknown option --temprature", "did you mean --temperature?"),
    (["--no-such-thing"], "unknown option --no-such-thing", "k3port run --help lists the options"),
    (["-n", "many"], "--max-tokens: 'many' is not a valid integer range", "k3port run --help"),
    (["-n", "0"], "--max-tokens: 0 is not in the range 1<=x<=", "k3port run --help"),
    (["--threads", "0"], "--threads: 0 is not in the range", "k3port run --help"),
    (["--dtype", "float8"], "--dtype: 'float8' is not one of 'float32', 'bfloat16', 'float64'", "k3port run --help"),
    (["--temperature", "-1"], "sampling parameters out of range", "k3port run --help"),
    (["--temperature", "nan"], "sampling parameters out of range", "k3port run --help"),
    (["--greedy", "--temperature", "0.5"], "both --greedy and --temperature", "--greedy means --temperature 0"),
    (["-q", "-v"], "both --verbose and --quiet", "give one of them"),
    (["--platform", "cpuu"], "unknown platform 'cpuu'", "did you mean cpu?"),
    (["--kernel", "linear"], "--kernel linear: expected op[@phase]=kernel", "such as linear=cpu.linear"),
    (["--kernel", "linear=cpu.liner"], "no kernel 'cpu.liner' for op linear", "did you mean cpu.linear?"),
    (["--kernel", "lineal=cpu.linear"], "pinned op 'lineal' is not an op of this model", "did you mean linear?"),
    (["second prompt"], "more than one PROMPT", "put the prompt in quotes"),
    (["--file", "prompt.txt"], "both PROMPT and --file", "give one of them"),
    (["--model", ""], "--model is empty", "give the folder of a checkpoint"),
    (["-n"], "option '-n' requires an argument", "k3port run --help lists the options"),
    (["-n", "9" * 24], f"--max-tokens: {'9' * 24} is not in the range 1<=x<=1000000000", "k3port run --help"),
    (["--top-k", "9" * 24], f"--top-k: {'9' * 24} is not in the range 0<=x<=1000000000", "k3port run --help"),
    (["--context", "9" * 24], f"--context: {'9' * 24} is not in the range 1<=x<=2147483647", "k3port run --help"),
    (["--seed", "9" * 24], f"--seed: {'9' * 24} is not in the range 0<=x<={2**63 - 1}", "k3port run --help"),
    (["--threads", "1000"], "--threads 1000: at most ", "leave --threads out"),
    (["--platform", ""], "--platform is empty", "give a value"),
    (["--profiles", ""], "--profiles is empty", "give a value"),
    (["--plan", ""], "--plan is empty", "give a value"),
    (["--file", ""], "--file is empty", "give a value"),
    (
        ["--kernel", "linear=a", "--kernel", "linear=b"],
        "--kernel: linear is pinned to both a and b",
        "give one of them",
    ),
]


@pytest.mark.parametrize(("args", "message", "hint"), USAGE_CASES, ids=[" ".join(case[0]) for case in USAGE_CASES])
def test_usage(k3port: Any, tiny_checkpoint: Path, args: list[str], message: str, hint: str) -> None:
    result = k3port("run", SECRET, "--model", tiny_checkpoint, *args)
    assert (result.code, result.out) == (ExitCode.USAGE, "")
    error = result.err[result.err.index("error: ") :]
    assert error.startswith(f"error: {message}")
    assert hint
    assert f"hint: {hint}" in error
    assert SECRET not in result.err
    document = json.loads(k3port("run", "--json", SECRET, "--model", tiny_checkpoint, *args).out)["error"]
    assert (document["exit_code"], document["kind"]) == (2, "UsageError")
    assert document["message"].startswith(message)
    assert SECRET not in json.dumps(document)


def test_prompts_that_look_like_options_are_not_quoted(k3port: Any) -> None:
    for prompt in (f"--{SECRET} and more", f"- {SECRET}"):
        result = k3port("run", prompt)
        assert result.code == ExitCode.USAGE
        assert "a prompt that starts with - comes after --" in result.err
        assert SECRET not in result.err
    for prompt in (f"{SECRET} and more",):
        result = k3port(prompt)
        assert (result.code, SECRET in result.err) == (ExitCode.USAGE, False)


@pytest.mark.parametrize(
    "args",
    [
        *[(option, f"{SECRET} and more") for option in ("-n", "--file", "--platform", "--kernel", "--plan", "--dtype")],
        (f"--platform={SECRET} and more",),
        (f"-n{SECRET} and more",),
        ("--model", f"{SECRET} and more", "Hello"),
        ("--no-such", f"{SECRET} and more"),
        (f"-{SECRET} and more",),
    ],
    ids=lambda args: args[0].replace(SECRET, "S"),
)
def test_values_of_several_words_are_not_quoted(k3port: Any, args: tuple[str, ...]) -> None:
    for more in ((), ("--json",)):
        result = k3port("run", *more, *args)
        assert result.code in (ExitCode.USAGE, ExitCode.FAILED)
        assert SECRET not in result.err + result.out
        assert "\nhint: " in result.err


def test_a_file_whose_name_has_spaces_is_named(k3port: Any, tmp_path: Path) -> None:
    result = k3port("run", "--file", tmp_path / "no such file")
    assert f"the prompt file {tmp_path}/no such file does not exist\nhint: " in result.err


def test_a_prompt_without_its_command(k3port: Any) -> None:
    short, long = k3port("SECRET_A"), k3port("x" * 25)
    hint = 'hint: commands: bench, doctor, kernels, plan, run; a prompt comes after run: k3port run "…"\n'
    assert (short.code, short.err) == (ExitCode.USAGE, f"error: unknown command SECRET_A\n{hint}")
    assert (long.code, long.err) == (ExitCode.USAGE, f"error: unknown command\n{hint}")
    dash = k3port("run", "-SECRET")
    assert "error: unknown option -S\nhint: " in dash.err
    assert "a prompt that starts with - comes after --: k3port run -- PROMPT" in dash.err


def test_unknown_command(k3port: Any) -> None:
    result = k3port("rnu")
    assert (result.code, result.err) == (2, "error: unknown command rnu\nhint: did you mean k3port run?\n")
    early = k3port("--greedy", "run")
    assert early.err == "error: unknown option --greedy\nhint: options of run come after it: k3port run --greedy\n"


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        ([""], None, "the prompt is empty"),
        (["-"], b"", "the prompt on stdin is empty"),
        (["-"], b"\n", "the prompt on stdin is empty"),
        ([], None, "no prompt"),
        ([], b"", "no prompt"),
        ([], b"\xff\xfe", "stdin is not UTF-8 text"),
        (["a\udcff"], None, "the prompt is not UTF-8 text"),
        (["-f", "{tmp}/none.txt"], None, "the prompt file {tmp}/none.txt does not exist"),
        (["-f", "{tmp}"], None, "cannot read the prompt file {tmp}"),
        (["-f", "{tmp}/latin.txt"], None, "the prompt file {tmp}/latin.txt is not UTF-8 text"),
        (["-f", "{tmp}/empty.txt"], None, "the prompt file {tmp}/empty.txt is empty"),
    ],
)
def test_bad_prompts(
    k3port: Any, tiny_checkpoint: Path, tmp_path: Path, args: list[str], stdin: bytes | None, message: str
) -> None:
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    filled = [arg.replace("{tmp}", str(tmp_path)) for arg in args]
    result = k3port("run", "--model", tiny_checkpoint, *filled, stdin=stdin)
    assert (result.code, result.out) == (ExitCode.USAGE, "")
    assert result.err.startswith(f"error: {message.replace('{tmp}', str(tmp_path))}\n")
    assert re.search(r"^hint: .+$", result.err, re.MULTILINE)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no /dev/zero")
def test_a_prompt_without_end(k3port: Any) -> None:
    result = k3port("run", "-f", "/dev/zero")
    assert result.code == ExitCode.USAGE
    assert result.err == "error: the prompt file /dev/zero is larger than 64 MiB\nhint: give a shorter prompt\n"


def test_checkpoints_that_are_not_there(k3port: Any, tmp_path: Path) -> None:
    missing = k3port("run", SECRET, "--model", tmp_path / "none")
    assert (missing.code, missing.out) == (ExitCode.FAILED, "")
    assert missing.err.startswith(f"error: {tmp_path / 'none'} does not exist\nhint: ")
    empty = k3port("run", SECRET, "--model", tmp_path)
    assert (empty.code, empty.out) == (ExitCode.FAILED, "")
    assert "no *.safetensors files" in empty.err
    assert "no config.json" in empty.err


def test_an_installation_without_the_embedded_model(
    k3port: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3port.cli.inputs.resources.files", lambda _: tmp_path)
    result = k3port("run")
    assert result.code == ExitCode.FAILED
    assert result.err.startswith("error: the embedded checkpoint k3-nano is not in this installation\n")
    assert "hint: give the folder of a checkpoint: k3port run --model PATH" in result.err


def test_a_foreign_checkpoint(k3port: Any, copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({"model_type": "llama"}))
    result = k3port("run", SECRET, "--model", copy)
    assert result.code == ExitCode.UNSUPPORTED
    assert "model_type 'llama' is not a model that k3port runs" in result.err
    assert "hint: k3port runs model_type kimi_k3" in result.err


def test_a_switch_that_is_not_supported(k3port: Any, copy: Path) -> None:
    edit_config(copy, num_nextn_predict_layers=1)
    result = k3port("run", SECRET, "--model", copy)
    assert result.code == ExitCode.UNSUPPORTED
    assert "num_nextn_predict_layers = 1 is not supported" in result.err


def test_at_most_five_reasons_are_printed_and_all_are_in_the_document(k3port: Any, copy: Path) -> None:
    for path in sorted(copy.glob("model-*.safetensors")):
        path.write_bytes(b"")
    names = ("tiktoken.model", "tokenizer_config.json")
    for name in names:
        (copy / name).unlink()
    (copy / "config.json").write_text("{")
    result = k3port("run", SECRET, "--model", copy, "--json")
    assert result.code == ExitCode.FAILED
    assert result.err.count("\n  - ") == 6
    reasons = json.loads(result.out)["error"]["reasons"]
    assert len(reasons) > 5
    assert f"  - and {len(reasons) - 5} more\n" in result.err


def test_a_checkpoint_without_tokenizer(k3port: Any, copy: Path) -> None:
    (copy / "tiktoken.model").unlink()
    for more in ((), ("--dry-run",)):
        result = k3port("run", SECRET, "--model", copy, *more)
        assert (result.code, result.out) == (ExitCode.FAILED, "")
        assert result.err.startswith(f"error: {copy} has no tokenizer (tiktoken.model or tokenizer.json)\nhint: ")


def test_a_prompt_that_is_too_long_is_counted_and_not_quoted(k3port: Any, tiny_checkpoint: Path) -> None:
    result = k3port("run", SECRET * 10, "--model", tiny_checkpoint, "--context", "64")
    assert (result.code, result.out) == (ExitCode.UNSUPPORTED, "")
    assert f"the prompt has {10 * len(SECRET)} tokens, the limit is 64" in result.err
    assert re.search(r"^hint: .*--context", result.err, re.MULTILINE)
    assert "kv_tokens" not in result.err
    assert SECRET not in result.err


def test_a_context_that_does_not_fit_in_memory(k3port: Any, tiny_checkpoint: Path) -> None:
    result = k3port("run", SECRET, "--model", tiny_checkpoint, "--dtype", "float64", "--context", 2**31 - 1)
    assert result.code == ExitCode.UNSUPPORTED
    assert result.err.startswith("error: no memory for the states of ")
    assert result.err.endswith("hint: give a smaller --context\n")


def test_numbers_that_are_not_finite_name_the_op(k3port: Any, tmp_path: Path) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("layers.1.self_attn.o_norm.weight"):
                tensor.fill_(torch.nan)

    folder = write_tiny_text_checkpoint(tmp_path / "nan", edit=plant)
    result = k3port("run", SECRET, "--model", folder, "-n", "4", "--json")
    assert result.code == ExitCode.NUMERICS
    assert "first in op gated_norm" in result.err
    assert "in layer 1" in result.err
    document = json.loads(result.out)["error"]
    assert (document["kind"], document["exit_code"]) == ("NumericsError", 4)
    assert SECRET not in result.err + result.out


def test_an_internal_error_is_one_line_without_the_message(
    k3port: Any, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise KeyError(SECRET)

    monkeypatch.setattr("k3port.runtime.runtime.Runtime.load", fail)
    result = k3port("run", SECRET, "--model", tiny_checkpoint)
    assert (result.code, result.out) == (ExitCode.INTERNAL, "")
    assert re.match(r"error: internal error: KeyError at generate.py:\d+ in generate\nhint: .*-v", result.err)
    assert "Traceback" not in result.err
    assert SECRET not in result.err
    verbose = k3port("run", "Hello", "--model", tiny_checkpoint, "-v", "--json")
    assert "Traceback" in verbose.err
    assert json.loads(verbose.out)["error"]["exit_code"] == 5


def test_a_broken_torch_is_an_error_with_a_hint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is broken', name='torch')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    done = subprocess.run(
        [sys.executable, "-m", "k3port", "run", "Hello", "--model", str(tiny_checkpoint)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == ExitCode.FAILED
    assert done.stderr.startswith("error: PyTorch cannot be imported\n  - libtorch is broken\nhint: ")


def test_bad_environment(k3port: Any, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3PORT_THREADS", "two")
    result = k3port("run", "Hello", "--model", tiny_checkpoint)
    assert result.code == ExitCode.USAGE
    assert result.err.startswith("error: cannot read the environment variable K3PORT_THREADS = 'two'\nhint: expected")


def test_unknown_environment_is_a_warning(k3port: Any, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3PORT_THREAD", "2")
    result = k3port("run", "Hello", "--model", tiny_checkpoint, "-n", "1", "--json")
    expected = "unknown environment variable K3PORT_THREAD is ignored; did you mean K3PORT_THREADS?"
    assert f"warning: {expected}" in result.err.splitlines()
    assert json.loads(result.out)["warnings"] == [expected]


COMMANDS = [
    "run Hello -n 1", "run Hello -n 1 --json", "run --dry-run", "run --dry-run --json", "run --help", "--help",
    "--version", "plan", "plan --json", "plan --help", "doctor", "doctor --json", "doctor --help", "kernels",
    "kernels list", "kernels list --json", "kernels list --help", "kernels explain kda", "kernels explain kda --json",
]  # fmt: skip


def with_model(command: str, checkpoint: Path) -> list[str]:
    words = command.split()
    takes_model = words[0] in ("run", "plan") or "explain" in words
    return [*words, *(["--model", str(checkpoint)] if takes_model else [])]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_an_error(
    spawn: Callable[..., subprocess.Popen[bytes]], tiny_checkpoint: Path, command: str
) -> None:
    with open("/dev/full", "wb") as full:
        process = spawn(*with_model(command, tiny_checkpoint), stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.FAILED
    assert err.endswith(
        b"error: cannot write to stdout\n  - No space left on device\n"
        b"hint: free space where it goes, or send it elsewhere\n"
    )
    assert err.count(b"error: ") == 1
    assert b"Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full")
def test_another_error_on_a_full_disk_is_said_once(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    with open("/dev/full", "wb") as full:
        process = spawn("plan", "--json", "--bogus", stdout=full)
        _, err = process.communicate(timeout=60)
        assert process.returncode == ExitCode.USAGE
        assert (err.count(b"error: "), b"Traceback" in err) == (1, False)
        mute = spawn("plan", "--bogus", stderr=full)
        mute.communicate(timeout=60)
        assert mute.returncode == ExitCode.USAGE


@pytest.mark.parametrize("json_mode", [False, True])
def test_ctrl_c(spawn: Callable[..., subprocess.Popen[bytes]], tiny_checkpoint: Path, json_mode: bool) -> None:
    more = ["--json"] if json_mode else []
    process = spawn("run", "Hello", "--model", tiny_checkpoint, "-n", "4000", "--ignore-eos", *more)
    assert process.stderr is not None
    assert process.stdout is not None
    header = process.stderr.readline()
    if not json_mode:
        process.stdout.read1(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert header.startswith(b"k3port ")
    assert err.endswith(b"error: interrupted\n")
    assert b"Traceback" not in err
    if json_mode:
        assert json.loads(out)["error"]["exit_code"] == 130
    else:
        assert out.endswith(b"\n")


@pytest.mark.parametrize("delay", [0.1, 0.4, 0.8, 1.3])
def test_ctrl_c_at_any_time(spawn: Callable[..., subprocess.Popen[bytes]], tiny_checkpoint: Path, delay: float) -> None:
    process = spawn("run", "Hello", "--model", tiny_checkpoint, "-n", "4000", "--ignore-eos", stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    err = process.stderr.read()
    assert (process.wait(timeout=60), err.splitlines()[-1]) == (ExitCode.INTERRUPTED, b"error: interrupted")
    assert (err.count(b"error: "), b"Traceback" in err) == (1, False)


def test_ctrl_c_while_torch_is_imported(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """An import that turns an interrupt into something else, as that of torch does."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1)\n"
        "except BaseException:\n    raise ImportError('broken')\n"
        "raise ImportError('also broken')\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    done = subprocess.run(
        [sys.executable, "-m", "k3port", "run", "Hello", "--model", str(tiny_checkpoint)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, "error: interrupted\n")


@pytest.mark.parametrize("command", ["run Hello -n 2", "--version", "--help", "plan -q", "kernels list"])
def test_a_closed_stdout_is_an_error(tiny_checkpoint: Path, command: str) -> None:
    line = shlex.join([sys.executable, "-m", "k3port", *with_model(command, tiny_checkpoint)]) + " >&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == ExitCode.FAILED
    assert "error: cannot write to stdout\n  - it is closed\n" in done.stderr
    assert "Traceback" not in done.stderr


def in_terminal(checkpoint: Path, **environment: str) -> str:
    """All that a terminal gets from a short run."""
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "k3port", "run", "Hello", "-n", "60", "--seed", "1", "--model", str(checkpoint)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=clean | environment)
    os.close(theirs)
    shown = b""
    # Linux answers EIO once the other side is closed, macOS an empty read.
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return shown.decode()


def test_colour_and_control_characters_on_a_terminal(tiny_checkpoint: Path) -> None:
    coloured, plain = in_terminal(tiny_checkpoint), in_terminal(tiny_checkpoint, NO_COLOR="1")
    lines = coloured.splitlines()
    assert re.fullmatch("\x1b\\[2mk3port .*\x1b\\[0m", lines[0])
    assert re.sub("\x1b\\[[0-9]+m", "", lines[0]) == plain.splitlines()[0]
    # The tokens of the tiny model are bytes, control characters among them; none may reach the terminal.
    assert not [c for c in plain if not c.isprintable() and c not in "\r\n\t"]
