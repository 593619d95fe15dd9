"""The wheel: what is in it, and that it runs from another folder without the source tree."""

from __future__ import annotations

import email
import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from tiny_text import write_tiny_text_checkpoint

ROOT = Path(__file__).parents[2]


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of a venv with the wheel, which sees torch and the others of this environment."""
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", venv, cwd=venv)
    run(venv / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=venv)
    (packages,) = venv.glob("lib/python*/site-packages")
    # A path line, unlike a site folder, does not follow the .pth files there: an editable k3port stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(next(n for n in names if n.endswith("METADATA"))))
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {name.split("/")[0] for name in names} == {"k3port", wheel.name.partition("-py3")[0] + ".dist-info"}
    assert "k3port/platforms.yaml" in names
    assert not [name for name in names if "__pycache__" in name]
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "k3port").rglob("*") if p.is_file()}
    missing = {name for name in sources if "__pycache__" not in name} - names
    assert missing == set()
    assert "k3port = k3port.cli.main:main" in entry_points
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in base if line.startswith(("triton", "flashinfer", "amd-aiter", "transformers"))]
    assert any(line.startswith("torch>=") for line in base)


def test_it_runs_from_another_folder(installed: Path, tmp_path: Path) -> None:
    code = (
        "import json, k3port; from k3port.oracle.profile import builtin_file, load_profiles; "
        "print(json.dumps([k3port.__file__, str(builtin_file()), list(load_profiles())]))"
    )
    package, profiles, names = json.loads(run(installed / "python", "-c", code, cwd=tmp_path).stdout)
    assert Path(package).is_relative_to(installed.parent)
    assert Path(profiles) == Path(package).parent / "platforms.yaml"
    assert "cpu" in names
    assert run(installed / "k3port", "--version", cwd=tmp_path).stdout.startswith("k3port ")
    folder = write_tiny_text_checkpoint(tmp_path / "tiny")
    done = run(installed / "k3port", "run", "Hello", "--model", folder, "-n", "4", "--json", cwd=tmp_path)
    assert len(json.loads(done.stdout)["token_ids"]) <= 4


def test_the_embedded_model_writes_text(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "k3port", "run", "-n", "16", "--seed", "1", cwd=tmp_path)
    assert len(done.stdout.strip()) > 8
    assert "k3-nano" in done.stderr
