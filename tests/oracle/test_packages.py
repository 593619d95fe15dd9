"""Versions that plans assume: from the profile, this machine's metadata, or a file; nothing is imported to know."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from k3port.errors import UsageError
from k3port.oracle.exclude import excluded_kernels
from k3port.oracle.packages import (
    assume_packages,
    host_versions,
    needed_packages,
    outside_validated,
    read_packages,
)
from k3port.oracle.predicates import reject
from k3port.oracle.profile import get_profile
from k3port.oracle.spec import KernelSpec, OpQuery, Requires
from k3port.oracle.symbols import has_symbol, missing_symbols, module_file

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def run(text: str, name: str = "packages.txt") -> Path:
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return run


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the module path, with a package whose import would fail."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "fakelib"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return tmp_path


def install(site: Path, name: str, version: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def spec(*packages: str, symbols: tuple[str, ...] = ()) -> KernelSpec:
    return KernelSpec("cuda.x", "linear", "a:b", "stub", requires=Requires(packages=packages, symbols=symbols))


# --- the three choices


def test_the_profile_is_assumed_where_the_platform_is_elsewhere() -> None:
    profile = get_profile("b200")
    for choice, here in ((None, False), ("profile", True)):
        found = assume_packages(choice, profile, [spec("torch", symbols=("nowhere:x",))], here=here)
        assert (found.versions, found.source, found.missing_symbols) == (profile.packages, "profile", frozenset())
    assert found.versions["flashinfer-python"] == "0.7.4"


@pytest.mark.parametrize(("choice", "here"), [(None, True), ("host", False)])
def test_the_host_is_asked_without_importing_anything(site: Path, choice: str | None, here: bool) -> None:
    install(site, "Fake_Lib", "1.2.3+rocm")
    (site / "fakelib" / "ops.py").write_text("def there(): ...\n")
    specs = [spec("fake.lib>=1", "absent-lib", symbols=("fakelib.ops:there", "fakelib.ops:gone"))]
    found = assume_packages(choice, get_profile("b200"), specs, here=here)
    assert found.source == "host"
    assert found.versions["fake-lib"] == "1.2.3+rocm"
    assert "absent-lib" not in found.versions and "flashinfer-python" not in found.versions
    assert found.missing_symbols == {"fakelib.ops:gone"}
    assert "fakelib" not in sys.modules


def test_a_missing_symbol_is_the_reason_of_a_refusal(site: Path) -> None:
    install(site, "fakelib", "1.0")
    kernel = spec("fakelib", symbols=("fakelib:gone",))
    profile = get_profile("cpu")
    found = assume_packages("host", profile, [kernel], here=True)
    target = profile.target(found.versions, found.source, missing_symbols=found.missing_symbols)
    rejection = reject(kernel, OpQuery("linear", None, {}, "float32"), target)
    assert rejection is not None and (rejection.code, "fakelib:gone" in rejection.detail) == ("SYMBOL_MISSING", True)


def test_a_file_is_named_as_the_source(write: Write) -> None:
    found = assume_packages(str(write("flashinfer-python==0.6.16\n")), get_profile("b200"), [], here=True)
    assert (found.versions, found.source) == ({"flashinfer-python": "0.6.16"}, "packages.txt")


def test_metadata_without_a_version_counts_as_absent(site: Path) -> None:
    (site / "halflib-1.dist-info").mkdir()
    (site / "halflib-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: halflib\n")
    assert host_versions(["halflib", "packaging"]).keys() == {"packaging"}


def test_the_packages_that_kernels_need() -> None:
    assert needed_packages([spec("FlashInfer_Python>=0.6", "torch"), spec()]) == {"flashinfer-python", "torch"}


# --- files


def test_pip_freeze(write: Write) -> None:
    text = (
        "# a comment\n\n--index-url https://example.org\n-i https://example.org\n"
        "Torch==2.14.0+cu130  # GPU\ntriton === 3.7.0\nfla_core==0.6.0; python_version >= '3'\n"
        "old==1.0; python_version < '3'\nextra==1; extra == 'dev'\n"
        "k3port @ file:///src/k3port\n-e git+https://example.org/x.git@0#egg=editable\n-e .\n"
        "amd-aiter @ https://example.org/amd_aiter-0.1.26%2Brocm7-cp311-cp311-linux_x86_64.whl#sha256=0\n"
        "hashed==1.5 \\\n    --hash=sha256:00\nranged>=2\nstar==1.*\n"
    )
    assert read_packages(write(text)) == {
        "torch": "2.14.0+cu130",
        "triton": "3.7.0",
        "fla-core": "0.6.0",
        "amd-aiter": "0.1.26+rocm7",
        "hashed": "1.5",
    }


@pytest.mark.parametrize(
    "text", ['{"Torch": "2.14.0"}', '[{"name": "torch", "version": "2.14.0"}]', '\ufeff\n {"torch": "2.14.0"}']
)
def test_json(write: Write, text: str) -> None:
    assert read_packages(write(text, "packages.json")) == {"torch": "2.14.0"}


BAD = {
    "no requirement": ("torch==2.0\n???\n", 2, "not a requirement"),
    "another file": ("torch==2.0\n-r base.txt\n", 2, "other files are not followed"),
    "a constraint file": ("--constraint base.txt\n", 1, "other files are not followed"),
    "no version": ("torch==2.0\n\ntriton>=3\n", 3, "triton has no exact version: write triton==VERSION"),
    "a folder": ("triton @ file:///src/triton\n", 1, "triton has no exact version"),
    "an editable": ("-e git+https://example.org/t.git#egg=triton\n", 1, "triton has no exact version"),
    "not a version": ("a===x.y\n", 1, "'x.y' is not a version"),
    "two versions": ("torch==2.0\nTorch==2.1\n", 2, "torch is both 2.0 and 2.1"),
    "nothing": ("# nothing\n", 1, "no package with a version"),
    "an empty file": ("", 1, "no package with a version"),
    "broken JSON": ('{\n"torch": "2.0",\n}\n', 3, "not JSON"),
    "a JSON number": (
        '{\n"a": "1",\n"torch": 2.0\n}\n',
        3,
        "expected a name and a version as text, found 'torch': 2.0",
    ),
    "a JSON list of names": ('[\n"torch"\n]\n', 2, "expected a name and a version"),
    "a JSON version": ('{\n"a": "1",\n"torch": "newest"\n}\n', 3, "torch: 'newest' is not a version"),
}


@pytest.mark.parametrize(("text", "line", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_one_error_with_its_line(write: Write, text: str, line: int, message: str) -> None:
    file = write(text)
    with pytest.raises(UsageError) as caught:
        read_packages(file, needed=["Triton"])
    assert caught.value.message.startswith(f"{file}:{line}: ")
    assert message in caught.value.message
    assert "--packages takes profile, host, or a file" in caught.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, reason in (("absent", "No such file"), ("", "Is a directory"), ("bytes", "not UTF-8 text")):
        with pytest.raises(UsageError) as caught:
            read_packages(tmp_path / name)
        assert caught.value.message == f"cannot read the package file {tmp_path / name}"
        assert reason in caught.value.reasons[0]


# --- validated ranges


@pytest.mark.parametrize(
    ("version", "warns"), [("3.7.0", False), ("3.7.9+rocm", False), ("3.8.0", True), ("3.6.0", True), ("odd", True)]
)
def test_b23_a_version_outside_the_validated_range_is_a_warning_with_evidence(version: str, warns: bool) -> None:
    found = outside_validated(get_profile("mi355"), {"triton": version, "torch": "9"})
    assert len(found) == warns
    if warns:
        text = str(found[0])
        assert f"triton {version}" in text and ">=3.7,<3.8" in text
        assert "InferenceX#2852" in text and "1.5 s" in text


def test_b23_other_platforms_and_absent_packages_do_not_warn() -> None:
    assert outside_validated(get_profile("mi355"), {}) == []
    assert outside_validated(get_profile("h200"), {"triton": "3.8.0"}) == []
    assert all(not outside_validated(get_profile(n), get_profile(n).packages) for n in ("mi350x", "mi355x"))


# --- symbols


MODULE = '''
"""Doc that mentions documented_only."""
import os.path, json as js
from .other import taken as renamed
from .stars import *
if True:
    def in_if(): ...
try:
    from nowhere import optional
except ImportError:
    optional_missing = None
else:
    in_else = 1
with open("x") as f:
    in_with = 2
class Class:
    inside = 1
    def method(self): ...
async def coroutine(): ...
plain = 1
annotated: int = 2
first, (second, *third) = range(3)
def function():
    local = 1
'''


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("os", True), ("js", True), ("json", False), ("renamed", True), ("taken", False), ("in_if", True),
        ("optional", True), ("optional_missing", True), ("in_else", True), ("in_with", True), ("Class", True),
        ("Class.method", True), ("inside", False), ("coroutine", True), ("plain", True), ("annotated", True),
        ("second", True), ("third", True), ("function", True), ("local", False), ("documented_only", False),
        ("from_star", True), ("deep_star", True), ("not_in_star", False),
    ],
)  # fmt: skip
def test_names_of_a_module(site: Path, name: str, there: bool) -> None:
    sub = site / "fakelib" / "sub"
    sub.mkdir()
    (sub / "__init__.py").write_text("")
    (sub / "ops.py").write_text(MODULE)
    (sub / "stars.py").write_text("from fakelib.deep import *\nfrom .ops import *\nfrom_star = 1\n")
    (site / "fakelib" / "deep.py").write_text("deep_star = 1\n")
    assert has_symbol(f"fakelib.sub.ops:{name}") is there
    assert "fakelib" not in sys.modules


def test_lazy_names_submodules_and_packages(site: Path) -> None:
    lazy = site / "fakelib" / "lazy"
    lazy.mkdir()
    (lazy / "__init__.py").write_text("_NAMES = {'late': '.x'}\ndef __getattr__(name): ...\n")
    (lazy / "mod.py").write_text("from . import *\n")
    assert missing_symbols(["fakelib.lazy:late", "fakelib.lazy:mod", "fakelib.lazy:", "fakelib.lazy.mod:late"]) == set()
    assert missing_symbols(["fakelib.lazy:never", "fakelib.gone:x", "absentlib:x", "absentlib.sub:x"]) == {
        "fakelib.lazy:never",
        "fakelib.gone:x",
        "absentlib:x",
        "absentlib.sub:x",
    }
    (lazy / "__init__.py").write_text("'''late'''\n_NAMES = {'late': '.x'}\n")
    from k3port.oracle import symbols

    symbols._bindings.cache_clear()
    assert not has_symbol("fakelib.lazy:late")


def test_compiled_modules_are_searched_as_text(site: Path) -> None:
    (site / "fakelib" / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF\0kernel_v2\0")
    assert has_symbol("fakelib._C:kernel_v2")
    assert not has_symbol("fakelib._C:kernel_v3")


def test_files_that_do_not_parse_have_no_names(site: Path) -> None:
    (site / "fakelib" / "broken.py").write_text("def (\n")
    assert not has_symbol("fakelib.broken:x")
    assert module_file("fakelib.broken") == site / "fakelib" / "broken.py"
    assert module_file("sys") is None


# --- kernels that people exclude

NAMES = ("rocm.aiter_mla_asm", "rocm.aiter_moe", "cuda.mla", "cpu.linear")


def test_patterns_and_names_exclude_kernels() -> None:
    assert excluded_kernels(["rocm.aiter_*", "cpu.linear"], NAMES, {}) == {
        "rocm.aiter_mla_asm": "K3PORT_DISABLE=rocm.aiter_*",
        "rocm.aiter_moe": "K3PORT_DISABLE=rocm.aiter_*",
        "cpu.linear": "K3PORT_DISABLE=cpu.linear",
    }
    assert excluded_kernels([], NAMES, {"linear": "cpu.linear"}) == {}


def test_b05_an_explicit_choice_beats_a_family_switch() -> None:
    found = excluded_kernels(["rocm.aiter_*"], NAMES, {"mla_attend@decode": "rocm.aiter_mla_asm"})
    assert found == {"rocm.aiter_moe": "K3PORT_DISABLE=rocm.aiter_*"}


def test_b05_the_same_kernel_pinned_and_excluded_names_both_sources() -> None:
    with pytest.raises(UsageError) as caught:
        excluded_kernels(["rocm.aiter_mla_asm"], NAMES, {"mla_attend": "rocm.aiter_mla_asm"})
    assert "--kernel or K3PORT_KERNELS" in caught.value.message and "K3PORT_DISABLE" in caught.value.message
    assert caught.value.reasons == ("mla_attend=rocm.aiter_mla_asm",)


@pytest.mark.parametrize(
    ("pattern", "hint"), [("cpu.linaer", "did you mean cpu.linear?"), ("triton.*", "k3port kernels list")]
)
def test_a_pattern_of_nothing_is_an_error(pattern: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        excluded_kernels([pattern], NAMES, {})
    assert caught.value.message == f"K3PORT_DISABLE: no kernel is named {pattern}" and hint in caught.value.hint


def test_the_file_of_a_plan_changes_its_answer(write: Write) -> None:
    """A version from a file reaches the predicates, under the file's name."""
    file = write(json.dumps({"fakelib": "1.0"}), "old.json")
    kernel = spec("fakelib>=2")
    found = assume_packages(str(file), get_profile("cpu"), [kernel], here=True)
    target = get_profile("cpu").target(found.versions, found.source)
    rejection = reject(kernel, OpQuery("linear", None, {}, "float32"), target)
    assert rejection is not None
    assert (rejection.code, rejection.detail) == ("PACKAGE_VERSION", "needs fakelib>=2, old.json has 1.0")
