"""Turn documentation files (HTML, man pages, POD, Mallard, dictd, Python source) into plain text paragraphs."""

from __future__ import annotations

import gzip
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lxml import etree, html

_BLOCK = (
    "p div section article main body blockquote ul ol dl dt dd li h1 h2 h3 h4 h5 h6 table tr pre figure figcaption"
    " details summary hr form fieldset center address caption thead tbody header aside title note steps item page"
    " list terms synopsis screen listing"
)
_DROP = (
    "script style nav header footer noscript svg img form button input select head iframe object math sup"
    " link info media credit"
)
BLOCK, DROP = frozenset(_BLOCK.split()), frozenset(_DROP.split())
DROP_CLASS = re.compile(
    r"\b(sphinxsidebar\w*|related|navheader|navfooter|toc|toctree-wrapper|contents|headerlink|footer|breadcrumbs?"
    r"|nav\w*|sidebar\w*|menu|search\w*|indextable|head|foot|header-panel|node|highlight-none|viewcode\w*"
    r"|src\w*|rightside|since|stab|out-of-band|banner|skip|section-toc|menu-\w+|bottomlinks|toplang|langselector"
    r"|mdn|linenos|lineno|copyright|edit|bd-sidebar\w*|api_stability_\w+|srclink|prev-next\w*|chlink\w*)\b"
)
DROP_ID = re.compile(r"^(toc|nav\w*|footer|header|sidebar|preamble|menu|comments_section|column2|quickview)$")
SPACE = re.compile(r"[ \t\r\n\f\xa0]+")


def _skip(node: etree._Element) -> bool:
    if not isinstance(node.tag, str):
        return True
    tag = node.tag.rsplit("}", 1)[-1].lower()
    if tag in DROP:
        return True
    cls = node.get("class")
    if cls and tag not in ("body", "html", "code", "span", "pre", "main") and DROP_CLASS.search(cls):
        return True
    ident = node.get("id")
    return bool(ident and tag != "body" and DROP_ID.match(ident))


def _walk(node: etree._Element, out: list[str]) -> None:
    """Append text pieces; ``\\0`` marks a paragraph break, ``\\1`` prefixes a preformatted block."""
    tag = node.tag.rsplit("}", 1)[-1].lower()
    if tag in ("pre", "screen", "listing"):
        out.append("\0\1" + "".join(node.itertext()).strip("\n").replace("\xa0", " ") + "\0")
        return
    if tag == "br":
        out.append(" ")
        return
    if tag == "table" and len(node.findall(".//tr")) > 0:
        widest = max(len(row) for row in node.iter() if row.tag == "tr")
        if widest > 3:
            return
    block = tag in BLOCK
    if block:
        out.append("\0")
    if tag in ("li", "item"):
        out.append("- ")
    if node.text:
        out.append(node.text)
    for child in node:
        if not _skip(child):
            _walk(child, out)
        if child.tail:
            out.append(child.tail)
    if tag in ("td", "th"):
        out.append("  ")
    if block:
        out.append("\0")


def tree_text(root: etree._Element) -> str:
    """Text of a parsed document: paragraphs joined by blank lines, white space collapsed outside of code blocks."""
    out: list[str] = []
    _walk(root, out)
    paragraphs: list[str] = []
    pending = ""
    for piece in "".join(out).split("\0"):
        if piece.startswith("\1"):
            code = re.sub(r"[ \t]+\n", "\n", piece[1:]).rstrip()
            if code.strip():
                paragraphs.append(code)
            continue
        text = SPACE.sub(" ", piece).strip().replace("¶", "")
        if text == "-":
            pending = "- "
        elif text:
            paragraphs.append(pending + text)
            pending = ""
    return "\n\n".join(paragraphs)


def from_html(data: bytes) -> str:
    """Main content of an HTML page (falls back to the whole body)."""
    if len(data) > 4_000_000:
        return ""
    try:
        root = html.document_fromstring(data, parser=html.HTMLParser(encoding="utf-8", remove_comments=True))
    except (etree.ParserError, ValueError):
        return ""
    for query in (
        './/*[@role="main"]',
        ".//main",
        './/div[@class="body"]',
        ".//article",
        './/div[@id="content"]',
        './/section[@id="main-content"]',
        './/div[@id="page-content"]',
    ):
        found = root.findall(query)
        if found:
            return tree_text(found[0])
    body = root.find(".//body")
    return tree_text(body if body is not None else root)


def from_mallard(data: bytes) -> str:
    """A GNOME help page (Mallard XML)."""
    try:
        return tree_text(etree.fromstring(data, parser=etree.XMLParser(remove_comments=True, recover=True)))
    except etree.XMLSyntaxError:
        return ""


def from_man(data: bytes) -> str:
    """A man page, by way of ``mandoc -T html``."""
    if data[:4] == b".so ":
        return ""
    try:
        command = ["mandoc", "-T", "html", "-O", "fragment"]
        run = subprocess.run(command, input=data, capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return from_html(b"<html><body>" + run.stdout + b"</body></html>")


def from_pod(data: bytes) -> str:
    """A Perl POD file, unwrapped."""
    script = "use Pod::Text; Pod::Text->new(width=>100000,indent=>0,quotes=>'none')->parse_from_file('-','-')"
    run = subprocess.run(["perl", "-e", script], input=data, capture_output=True, timeout=60, check=False)
    return run.stdout.decode("utf-8", "replace")


def from_dict(data: bytes) -> Iterator[str]:
    """Entries of a dictd file in groups of about 2,000 characters: head words start at column 0."""
    text = data.decode("utf-8", "replace").replace("{", "").replace("}", "")
    group: list[str] = []
    size = 0
    for entry in re.split(r"\n(?=\S)", text):
        body = "\n".join(re.sub(r"^ {1,8}", "", line) for line in entry.splitlines())
        chunks = [SPACE.sub(" ", chunk).strip() for chunk in re.split(r"\n\s*\n", body)]
        entry = "\n\n".join(chunk for chunk in chunks if chunk)
        group.append(entry)
        size += len(entry)
        if size > 2000:
            yield "\n\n".join(group)
            group, size = [], 0
    if group:
        yield "\n\n".join(group)


def convert(path: Path, kind: str) -> list[str]:
    """All documents in one file."""
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    if kind == "html":
        return [from_html(data)]
    if kind == "man":
        return [from_man(data)]
    if kind == "pod":
        return [from_pod(data)]
    if kind == "mallard":
        return [from_mallard(data)]
    if kind == "dict":
        return list(from_dict(data))
    if kind == "gcide":
        data = re.sub(rb" *\\[^\\\n]{1,60}\\,?", b",", data)  # pronunciation
        marks = rb"\n *\[(1913 Webster|WordNet[^\]]*|PJC|RP|RDH|JC)[^\]]*\]|\[=(\w)\]"
        return list(from_dict(re.sub(marks, rb"\2", data)))
    if kind == "python":
        return [data.decode("utf-8", "replace")]
    raise ValueError(f"unknown kind {kind}")
