"""The part of ``k3port run`` that needs torch: load, stream, report."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from k3port import __version__
from k3port.cli.console import Console
from k3port.cli.preview import plan_lines, plan_summary
from k3port.cli.start import RunOptions, check, header
from k3port.errors import K3Error, NumericsError, TokenizerError

try:
    import torch  # noqa: F401
except Exception as exc:
    # A broken installation raises OSError as often as ImportError.
    raise K3Error(
        "PyTorch cannot be imported", reasons=[str(exc)], hint="install it into this environment: pip install torch"
    ) from exc

from k3port.runtime.runtime import DEFAULT_KV_TOKENS, Runtime

TOKENIZER_FILES = ("tiktoken.model", "tokenizer.json")


@dataclass
class Timings:
    """Clock readings of one run, in seconds."""

    load_s: float = 0.0
    started: float = 0.0
    first: float | None = None
    last: float = 0.0
    tokens: int = 0

    def token(self) -> None:
        """A token is there."""
        self.last = time.perf_counter()
        self.tokens += 1
        if self.first is None:
            self.first = self.last

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None else self.first - self.started

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first one, which is the rate of decode steps."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.tokens - 1) / max(self.last - self.first, 1e-9)

    def record(self, device_peak: int | None) -> dict[str, Any]:
        """As JSON values.

        Args:
            device_peak: most bytes of GPU memory; None where the run was on the host.
        """
        rounded = {
            "load_s": self.load_s,
            "ttft_s": self.ttft_s,
            "decode_tokens_per_s": self.tokens_per_s,
            "total_s": self.last - self.started if self.tokens else None,
        }
        return {
            **{key: None if value is None else round(value, 6) for key, value in rounded.items()},
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_device_bytes": device_peak,
        }


@dataclass
class Answer:
    """What has come so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""


def generate(console: Console, options: RunOptions, prompt: str) -> None:
    """Loads the model, streams the continuation, prints the closing line or the JSON document.

    Raises:
        NumericsError: the model gave numbers that are not finite; names the op.
        K3Error: whatever else goes wrong.
    """
    timings = Timings()
    if not any((options.model / name).exists() for name in TOKENIZER_FILES):
        # The library loads such a checkpoint for callers with token ids; here nothing could come of the load.
        check(options)
    begin = time.perf_counter()
    runtime = Runtime.load(
        options.model,
        platform=options.platform,
        dtype=options.dtype,
        kernels=options.kernels,
        plan=options.plan,
        profiles=options.profiles,
        max_requests=1,
        kv_tokens=options.context_tokens or DEFAULT_KV_TOKENS,
        threads=options.threads,
        allow_reference=options.allow_reference,
    )
    timings.load_s = time.perf_counter() - begin
    _report_start(console, options, runtime)
    if runtime.tokenizer is None:
        raise TokenizerError(
            f"{options.model} has no tokenizer (tiktoken.model or tokenizer.json)",
            hint="add the tokenizer files of the model, or use the library with token ids",
        )
    prompt_ids = runtime.tokenizer.encode(prompt)
    answer = Answer()
    timings.started = time.perf_counter()
    try:
        with contextlib.closing(runtime.stream([prompt_ids], options.sampling)) as events:
            for event in events:
                if event.finish_reason == "error":
                    raise NumericsError(
                        f"the model produced {event.error}",
                        reasons=[f"after {len(prompt_ids)} prompt tokens and {len(answer.token_ids)} new ones"],
                        hint="run again with --dtype float32, or pin the reference kernel of that op with --kernel",
                    )
                timings.token()
                if event.finish_reason != "stop":
                    answer.token_ids.append(event.token_id)
                answer.text.append(event.text)
                answer.finish_reason = event.finish_reason or ""
                console.text(event.text)
    finally:
        console.end_text()
    limit = runtime.max_context_tokens
    if answer.finish_reason == "length" and len(answer.token_ids) < options.sampling.max_tokens:
        console.warn(f"the answer ended at the limit of the context, {limit} tokens")
    if console.json_mode:
        console.document(_document(console, options, runtime, answer, timings, len(prompt_ids)))
    console.note(_closing_line(options, answer, timings, len(prompt_ids), runtime.placement.peak_bytes()))


def _report_start(console: Console, options: RunOptions, runtime: Runtime) -> None:
    for problem in (*runtime.registry.problems, *runtime.plan.warnings, *runtime.weights.notes):
        console.warn(problem)
    # On a GPU the host only starts kernels, on one thread.
    on_host = runtime.placement.on_host
    place = (
        f"threads {runtime.threads.describe()}" if on_host else f"{runtime.placement.name} {runtime.placement.device}"
    )
    console.note(
        header(
            options,
            runtime.plan,
            place,
            f"context {runtime.max_context_tokens}",
        )
    )
    if runtime.note:
        console.note(runtime.note)
    for line in plan_lines(runtime.plan):
        console.detail(line)
    for note in runtime.checkpoint.notes:
        console.detail(f"note: {note}")


def _document(
    console: Console, options: RunOptions, runtime: Runtime, answer: Answer, timings: Timings, prompt_tokens: int
) -> dict[str, Any]:
    return {
        "k3port": __version__,
        "model": options.model_name,
        "text": "".join(answer.text),
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": prompt_tokens,
        "seed": options.sampling.seed,
        "timings": timings.record(runtime.placement.peak_bytes()),
        "plan": plan_summary(runtime.plan),
        "warnings": console.warnings,
        "notes": list(runtime.checkpoint.notes),
    }


def _closing_line(
    options: RunOptions, answer: Answer, timings: Timings, prompt_tokens: int, device_peak: int | None
) -> str:
    parts = [f"prompt {prompt_tokens} tok", f"answer {len(answer.token_ids)} tok"]
    if (ttft := timings.ttft_s) is not None:
        parts.append(f"TTFT {ttft * 1000:.0f} ms" if ttft < 1 else f"TTFT {ttft:.2f} s")
    if (rate := timings.tokens_per_s) is not None:
        parts.append(f"{rate:.1f} tok/s")
    if device_peak is not None:
        parts.append(f"peak {device_peak / 2**30:.1f} GiB on the GPU")
    elif (peak := peak_rss_bytes()) is not None:
        parts.append(f"peak {peak / 2**30:.1f} GiB")
    return " · ".join([*parts, answer.finish_reason, f"seed {options.sampling.seed}"])


def peak_rss_bytes() -> int | None:
    """The most memory that this process had, or None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
