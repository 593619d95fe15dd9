"""Build the k3-nano corpus: download Debian documentation packages, convert, clean, de-duplicate, split.

Usage: ``python data.py --work DIR [--no-download]``. Writes ``DIR/train.txt``, ``DIR/heldout.txt`` (documents
separated by a NUL byte, UTF-8) and ``manifest.json`` beside this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import unicodedata
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from convert import convert
from sources import SOURCES, Source

HERE = Path(__file__).resolve().parent
SEPARATOR = "\0"
HELDOUT_SHARE = 0.02
MIN_DOCUMENT = 400
PLAIN = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": " - ",
        "\u2026": "...",
        "\u00ad": None,
        "\u200b": None,
        "\ufeff": None,
        "\u2010": "-",
        "\u2011": "-",
        "\u2212": "-",
        "\u2022": "-",
        "\u00a0": " ",
        "\ufffd": None,
        "\0": None,
    }
)
LICENCE = re.compile(
    r"permission is (hereby )?granted|without warranty|as is\W|all rights reserved|redistribution and use"
    r"|licensed under|copyright (\(c\)|©|\d{4})|free software foundation|under the terms of|license, version"
    r"|^copyright\b",
    re.IGNORECASE,
)
DEBRIS = re.compile(
    r"^(- )?((prev(ious)?|next|up|home|top|contents|index|table of contents|search|navigation|note"
    r"|available languages)\b.{0,60}$|go to the (first|previous)|\[ ?(prev|up|next|top|contents)"
    r"|last (updated|modified)|this page|enter search"
    r"|created using sphinx|built with|submit correction|if you see anything in the doc|home page|source code:"
    r"|updated: \d|main configuration \[|small\. fast\. reliable|class signature$|expand description$|run$|see the vcl"
    r"|the resulting type after applying|performs the \S+ operation|\[?\d+\]?\.?$|[-*.]$|\(?<?none>?\)?$)",
    re.IGNORECASE,
)


def digest(text: str, size: int = 12) -> bytes:
    """Short hash that decides about duplicates and about the split."""
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def is_prose_like(paragraph: str) -> bool:
    """False for tables of numbers, hex dumps, ASCII art and text that is not English."""
    if len(paragraph) < 40:
        return True
    letters = sum(c.isalpha() for c in paragraph)
    foreign = sum(ord(c) > 127 for c in paragraph)
    digits = sum(c.isdigit() for c in paragraph)
    spaces = paragraph.count(" ") + paragraph.count("\n")
    if spaces > 0.6 * len(paragraph) or foreign > 0.04 * len(paragraph):
        return False
    solid = len(paragraph) - spaces
    return letters > 0.6 * solid and digits < 0.2 * solid


def clean(text: str, python: bool) -> list[str]:
    """Normalised paragraphs of one document without debris, licence text and tables."""
    text = unicodedata.normalize("NFC", text).translate(PLAIN).replace("\t", "    ").replace("\r", "")
    text = re.sub(r"[^\n\x20-\x7e\u00a1-\uffff]", "", text)
    if python:
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        return [] if LICENCE.search(text[:300]) else text.split("\n\n")
    kept = []
    for paragraph in text.split("\n\n"):
        paragraph = paragraph.strip("\n").rstrip()
        if not paragraph.strip() or DEBRIS.match(paragraph) or not is_prose_like(paragraph):
            continue
        if len(paragraph) < 2000 and LICENCE.search(paragraph):
            continue
        kept.append(re.sub(r"\[(source|edit|src)\]", "", paragraph))
    return thin_out(kept)


def thin_out(paragraphs: list[str]) -> list[str]:
    """Drop what is left of tables and index lists: runs of more than six short paragraphs in a row."""
    kept: list[str] = []
    run: list[str] = []
    for paragraph in [*paragraphs, "x" * 60]:
        if len(paragraph) < 40 and "\n" not in paragraph:
            run.append(paragraph)
            continue
        kept.extend(run if len(run) <= 6 else run[-1:])
        run = []
        kept.append(paragraph)
    return kept[:-1]


def load_package(job: tuple[Source, str]) -> list[tuple[str, str, list[str]]]:
    """(package, path, paragraphs) of every usable file of one unpacked package."""
    source, root = job
    include, exclude = re.compile(source.include), re.compile(source.exclude)
    paths = [p for p in sorted(Path(root).rglob("*")) if p.is_file() and not p.is_symlink()]
    chosen = [p for p in paths if include.search(str(p)) and not exclude.search(str(p)[len(root) :])]
    # A capped package gives an even sample of its files rather than the first ones of the alphabet.
    chosen.sort(key=lambda p: digest(str(p)[len(root) :]))
    found, total = [], 0
    for path in chosen:
        for number, text in sorted(enumerate(convert(path, source.kind)), key=lambda item: digest(item[1])):
            paragraphs = clean(text, source.kind == "python")
            size = sum(map(len, paragraphs))
            if size < MIN_DOCUMENT:
                continue
            found.append((source.package, f"{str(path)[len(root) :]}#{number}", paragraphs))
            total += size
            if total > source.cap_mb * 1e6:
                break
        if total > source.cap_mb * 1e6:
            break
    return found


def deduplicate(documents: list[tuple[str, str, list[str]]]) -> list[tuple[str, str, str]]:
    """Keep the first copy of each paragraph of 60 or more characters, and documents that stay long enough.

    Two documents that share most of their text collapse into one, and no long paragraph can be on both sides of
    the held-out split.
    """
    seen: set[bytes] = set()
    kept = []
    for package, path, paragraphs in documents:
        fresh: list[str] = []
        for paragraph in paragraphs:
            if len(paragraph) >= 60:
                key = digest(re.sub(r"\W+", " ", paragraph.lower()))
                if key in seen:
                    continue
                seen.add(key)
            elif fresh and fresh[-1] == paragraph:
                continue
            fresh.append(paragraph)
        # Headings and stubs alone are no document: ask for real paragraphs.
        real = sum(len(p) for p in fresh if len(p) >= 60)
        if real < max(MIN_DOCUMENT * 0.75, 0.6 * sum(map(len, fresh))):
            continue
        kept.append((package, path, "\n\n".join(fresh).strip()))
    return kept


def fetch(packages: Path) -> None:
    """Download with the ordinary Debian client; keep what is already there."""
    packages.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        if not list(packages.glob(f"{source.package}_*.deb")):
            subprocess.run(["apt-get", "download", "-q", source.package], cwd=packages, check=True)


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--no-download", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if not args.no_download:
        fetch(args.work / "deb")
    jobs, entries = [], {}
    for source in SOURCES:
        package = next((args.work / "deb").glob(f"{source.package}_*.deb"))
        root = args.work / "x" / source.package
        if not root.exists():
            subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
        command = ["dpkg-deb", "-f", str(package), "Version"]
        version = subprocess.run(command, capture_output=True, text=True, check=True)
        entries[source.package] = {
            "package": source.package,
            "version": version.stdout.strip(),
            "licence": source.licence,
            "origin": "Debian 12 (bookworm), main",
            "file": package.name,
            "sha256": hashlib.sha256(package.read_bytes()).hexdigest(),
            "documents": 0,
            "bytes_used": 0,
        }
        jobs.append((source, str(root)))
    jobs.sort(key=lambda job: -job[0].cap_mb)
    with ProcessPoolExecutor(args.processes) as pool:
        documents = [d for found in pool.map(load_package, jobs) for d in found]
    documents.sort(key=lambda d: digest(d[0] + d[1]))
    kept = deduplicate(documents)
    parts: dict[str, list[str]] = {"train": [], "heldout": []}
    for package, path, text in kept:
        share = int.from_bytes(digest("split" + package + path, 4), "big") / 2**32
        parts["heldout" if share < HELDOUT_SHARE else "train"].append(text)
        entries[package]["documents"] += 1
        entries[package]["bytes_used"] += len(text.encode())
    outputs = {}
    for name, texts in parts.items():
        data = SEPARATOR.join(texts).encode()
        (args.work / f"{name}.txt").write_bytes(data)
        outputs[name] = {"documents": len(texts), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        print(name, outputs[name])
    manifest = {"outputs": outputs, "sources": sorted(entries.values(), key=lambda e: -e["bytes_used"])}
    (HERE / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
