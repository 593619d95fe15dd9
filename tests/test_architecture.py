"""The rooms of the code and what each may know: docs/architecture.md, enforced. Every rule is shown a violation."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "k3port"
MAX_LINES = 450

# Where a module may be imported (as a prefix of our module names); everywhere else it is forbidden.
VENDOR_ROOMS = {"aiter": "k3port.backends.rocm", "flashinfer": "k3port.backends.cuda"}
VENDOR_PACKAGES = {"aiter", "flashinfer", "triton", "vllm", "sglang", "mori", "pyhip", "cupy"}

# Room -> rooms of this package that it may import from. The import-linter contracts check chains; this checks each
# import statement, lazy ones too, and also what import-linter has no word for.
ALLOWED = {
    "k3port.errors": set(),
    "k3port.settings": {"k3port.errors"},
    "k3port.hookspecs": {"k3port.oracle.spec"},
    "k3port.plugins": {
        "k3port.errors", "k3port.hookspecs", "k3port.oracle.spec", "k3port.oracle.sources", "k3port.oracle.checks",
        "k3port.oracle.profile", "k3port.oracle.admit", "k3port.backends",
    },
    "k3port.ops": {"k3port.errors", "k3port.ops"},
    "k3port.oracle": {"k3port.errors", "k3port.ops.catalog", "k3port.oracle"},
    "k3port.backends": {
        "k3port.errors", "k3port.hookspecs", "k3port.ops", "k3port.oracle.spec", "k3port.oracle.sources",
        "k3port.backends",
    },
    "k3port.model": {"k3port.errors", "k3port.ops", "k3port.model"},
    "k3port.text": {"k3port.errors", "k3port.text"},
    "k3port.runtime": {
        "k3port.__version__", "k3port.errors", "k3port.settings", "k3port.ops", "k3port.oracle", "k3port.plugins",
        "k3port.model", "k3port.text", "k3port.runtime",
    },
}  # fmt: skip

TORCH_FREE = (
    "k3port", "k3port.errors", "k3port.settings", "k3port.hookspecs", "k3port.plugins", "k3port.ops.catalog",
    "k3port.oracle.spec", "k3port.oracle.profile", "k3port.oracle.resolve", "k3port.backends.reference",
    "k3port.backends.cpu", "k3port.backends.cuda", "k3port.backends.rocm", "k3port.model.config",
    "k3port.model.shapes", "k3port.model.weights", "k3port.runtime.planner", "k3port.runtime.preflight",
    "k3port.runtime.request", "k3port.text.tokenizer", "k3port.cli", "k3port.cli.main", "k3port.cli.run",
    "k3port.cli.preview", "k3port.oracle.detect", "k3port.oracle.builtin_checks", "k3port.oracle.package_checks",
    "k3port.cli.doctor", "k3port.cli.doctor_facts", "k3port.cli.plan", "k3port.cli.kernels", "k3port.cli.question",
    "k3port.runtime.prepare", "k3port.runtime.memory", "k3port.cli.check", "k3port.testing.subject",
    "k3port.cli.bench", "k3port.testing.bench.names",
)  # fmt: skip


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def inside(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, under ``if TYPE_CHECKING:`` left out."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parent, base] if base else parent)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def check_imports(module: str, tree: ast.Module, path: Path) -> Iterator[str]:
    room = next((room for room in ALLOWED if inside(module, room)), None)
    for line, name in imports(tree, module, path.name == "__init__.py"):
        top = name.partition(".")[0]
        home = VENDOR_ROOMS.get(top)
        if home is not None and not inside(module, home):
            yield f"{module}:{line} imports {name}: only {home} may"
        if room == "k3port.model" and (top in VENDOR_PACKAGES or top == "os"):
            yield f"{module}:{line} imports {name}: the model knows no {top}"
        if room is not None and top == PACKAGE and not any(inside(name, ok) for ok in ALLOWED[room]):
            yield f"{module}:{line} imports {name}: {room} may not"
        # Nobody but the command line knows the command line; test tools stay out of the product but for two commands.
        tool_doors = ("k3port.cli.check", "k3port.cli.bench")
        for closed, doors in (("k3port.cli", ("k3port.__main__",)), ("k3port.testing", tool_doors)):
            own = inside(module, closed) or module in doors
            if inside(name, closed) and not own:
                yield f"{module}:{line} imports {name}: nothing outside {closed} may"


def check_environment(module: str, tree: ast.Module, path: Path) -> Iterator[str]:
    if module == "k3port.settings":
        return
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.ImportFrom) and node.module == "os" else []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = [node.attr]
        for name in {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"} & set(names):
            yield f"{module}:{node.lineno} uses os.{name}: only k3port.settings reads the environment"


def check_vendor_branches(module: str, tree: ast.Module, path: Path) -> Iterator[str]:
    device_file = re.fullmatch(r"k3port\.backends\.\w+\.device", module)
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        line = getattr(node, "lineno", 0)
        # torch.Tensor.is_cuda is the one attribute of that name which is not ours.
        is_tensor_flag = name == "is_cuda" and isinstance(node, ast.Attribute)
        if re.fullmatch(r"_?is_(rocm|hip|amd|nvidia|cuda)\w*", name) and not is_tensor_flag:
            yield f"{module}:{line} {name}: the vendor is decided by the plan, not by a branch"
        is_version = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.version"
        if is_version and name in ("hip", "cuda") and not device_file:
            yield f"{module}:{line} torch.version.{name}: only backends/*/device.py may ask"


def check_length(module: str, tree: ast.Module, path: Path) -> Iterator[str]:
    lines = path.read_text(encoding="utf-8").count("\n")
    if lines > MAX_LINES:
        yield f"{module} has {lines} lines, the limit is {MAX_LINES}"


Rule = Callable[[str, ast.Module, Path], Iterator[str]]
RULES: tuple[Rule, ...] = (check_imports, check_environment, check_vendor_branches, check_length)


def violations(root: Path, rule: Rule) -> list[str]:
    found = []
    for module, path in modules(root):
        found += rule(module, ast.parse(path.read_text(encoding="utf-8"), str(path)), path)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: Rule) -> None:
    assert violations(ROOT, rule) == []


def test_all_rooms_have_a_rule() -> None:
    """A new top-level room has to be thought about: here, in the contracts and in docs/architecture.md."""
    rooms = {".".join(name.split(".")[:2]) for name, _ in modules(ROOT)} - {PACKAGE}
    free = {"k3port.cli", "k3port.testing", "k3port.__main__"}  # checked from the other side
    assert rooms == set(ALLOWED) | free


PLANTED = [
    ("model/k3.py", "from k3port.oracle.spec import Plan", check_imports, "k3port.model may not"),
    ("model/config.py", "def f():\n    from k3port import plugins", check_imports, "k3port.model may not"),
    ("model/kda.py", "from ..runtime import planner", check_imports, "k3port.model may not"),
    ("model/step.py", "import os", check_imports, "the model knows no os"),
    ("model/mla.py", "import triton.language as tl", check_imports, "the model knows no triton"),
    ("oracle/resolve.py", "import k3port.model.config", check_imports, "k3port.oracle may not"),
    ("oracle/spec.py", "from k3port.ops.table import OpTable", check_imports, "k3port.oracle may not"),
    ("backends/cpu/kda.py", "from k3port.runtime.pools import Pools", check_imports, "k3port.backends may not"),
    ("backends/cpu/moe.py", "from k3port.oracle import resolve", check_imports, "k3port.backends may not"),
    ("ops/moe.py", "from k3port.backends import cpu", check_imports, "k3port.ops may not"),
    ("text/tokenizer.py", "from k3port.settings import get_settings", check_imports, "k3port.text may not"),
    ("runtime/engine.py", "from k3port.backends import cpu", check_imports, "k3port.runtime may not"),
    ("runtime/engine.py", "from k3port.cli import console", check_imports, "nothing outside k3port.cli may"),
    ("runtime/loader.py", "import k3port.testing.synthetic", check_imports, "nothing outside k3port.testing may"),
    ("cli/kernels.py", "from k3port.testing import check", check_imports, "nothing outside k3port.testing may"),
    ("backends/cuda/__init__.py", "from aiter.ops import mha", check_imports, "only k3port.backends.rocm may"),
    ("backends/rocm/__init__.py", "import flashinfer", check_imports, "only k3port.backends.cuda may"),
    ("runtime/threads.py", "import os\nx = os.environ.get('A')", check_environment, "os.environ"),
    ("oracle/profile.py", "from os import getenv", check_environment, "os.getenv"),
    ("runtime/pools.py", "import torch\nx = torch.version.hip", check_vendor_branches, "torch.version.hip"),
    ("ops/norm.py", "def is_rocm() -> bool: ...", check_vendor_branches, "is_rocm"),
    ("backends/cpu/conv.py", "if platform.is_hip(): ...", check_vendor_branches, "is_hip"),
    ("ops/conv.py", "\n" * MAX_LINES, check_length, "lines, the limit is"),
]


@pytest.mark.parametrize(("file", "code", "rule", "message"), PLANTED, ids=[f"{p[0]}: {p[1][:40]!r}" for p in PLANTED])
def test_a_planted_violation_is_found(tmp_path: Path, file: str, code: str, rule: Rule, message: str) -> None:
    target = tmp_path / PACKAGE / file
    target.parent.mkdir(parents=True)
    target.write_text((ROOT / PACKAGE / file).read_text() + "\n" + code + "\n")
    found = violations(tmp_path, rule)
    assert any(message in line for line in found), found


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    target = tmp_path / PACKAGE / "backends/rocm/device.py"
    target.parent.mkdir(parents=True)
    target.write_text("import aiter\nimport torch\nx = torch.version.hip\ny = torch.ones(1).is_cuda\n")
    checked = tmp_path / PACKAGE / "hookspecs.py"
    checked.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from k3port.cli import main\n")
    assert [found for rule in RULES for found in violations(tmp_path, rule)] == []


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command; lint_imports_command()"
    )
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / PACKAGE, root / PACKAGE, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def test_the_contracts_hold(copied: Path) -> None:
    done = lint_imports(copied)
    assert done.returncode == 0, done.stdout + done.stderr


CONTRACTS = {
    "cli > runtime > model > ops": ("model/params.py", "import k3port.runtime.planner"),
    "the model knows no oracle, backend, plugin, setting, vendor or operating system": ("model/step.py", "import os"),
    "the oracle knows the catalog, not the model, the runtime or torch": ("oracle/profile.py", "import torch"),
    "backends know ops and oracle.spec, not the model or the runtime": (
        "backends/cpu/moe.py", "import k3port.model.config",
    ),
    "ops stand alone": ("ops/table.py", "import k3port.oracle.spec"),
    "text needs nothing but errors": ("text/vocabulary.py", "import k3port.model.config"),
}  # fmt: skip


def test_every_contract_catches_a_planted_violation(copied: Path, tmp_path: Path) -> None:
    names = [
        c["name"] for c in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    ]
    assert set(names) == set(CONTRACTS)
    root = Path(shutil.copytree(copied, tmp_path / "broken"))
    for file, code in CONTRACTS.values():
        with (root / PACKAGE / file).open("a") as stream:
            stream.write(f"\n{code}\n")
    done = lint_imports(root)
    assert done.returncode != 0
    for name in CONTRACTS:
        assert re.search(rf"^{re.escape(name)} BROKEN", done.stdout, re.MULTILINE), done.stdout


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in a fresh process after a statement."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_light_modules_load_no_torch() -> None:
    """One process for all; on failure, one per module to name the culprit."""
    heavy = {"torch", "numpy", "transformers", "triton"}
    if heavy & loaded_by(f"import {', '.join(TORCH_FREE)}"):
        found = {name: heavy & loaded_by(f"import {name}") for name in TORCH_FREE}
        assert {name: loaded for name, loaded in found.items() if loaded} == {}


def test_the_registry_imports_no_kernel() -> None:
    loaded = loaded_by("from k3port.plugins import make_registry; make_registry(entry_points=False)")
    assert not loaded & {"torch", *VENDOR_PACKAGES}


def test_importing_the_package_is_quick() -> None:
    """Best of three, less the interpreter's own start: other processes may hold the machine up, never speed it up."""
    code = "import time; t = time.perf_counter(); import k3port; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.3
    assert "torch" not in loaded_by(
        "import k3port; dir(k3port); k3port.K3Error, k3port.SamplingParams, k3port.ExitCode"
    )
