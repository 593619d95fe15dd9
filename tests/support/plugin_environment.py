"""A throwaway Python environment that sees what this one has, to install the example into and to remove it from."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "k3port-example-kernel"


@dataclass(frozen=True)
class Environment:
    """An environment in ``folder``; commands run in ``work``, an empty folder."""

    folder: Path
    work: Path

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """A shell command with the environment's programs first; stderr is apart."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("K3PORT_", "PIP_", "TRITON_", "PYTHON"))}
        variables = {
            **kept,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.folder),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INDEX": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            ["bash", "-c", command], cwd=self.work, env=variables, capture_output=True, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def ok(self, command: str) -> str:
        """What a command that must succeed prints on stdout."""
        done = self.run(command)
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def files(self) -> dict[str, bytes]:
        """Every file of the environment and of the example's folder, with its content."""
        return {
            str(path): path.read_bytes()
            for root in (self.folder, self.work)
            for path in sorted(root.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }


def new_environment(folder: Path) -> Environment:
    """An environment without packages of its own; pip, hatchling, torch and k3port are those of this one."""
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    here = [str(ROOT), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    (packages / "shared.pth").write_text("\n".join(dict.fromkeys(here)) + "\n")
    for program, module in (("k3port", "k3port"), ("pip", "pip"), ("pytest", "pytest -p no:cacheprovider")):
        script = folder / "venv" / "bin" / program
        script.write_text(f'#!/bin/sh\nexec "{folder / "venv" / "bin" / "python"}" -m {module} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    work = folder / "work"
    work.mkdir()
    return Environment(folder / "venv", work)


def copy_example(environment: Environment) -> None:
    """Puts the example into the folder that commands run in."""
    ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache")
    shutil.copytree(EXAMPLE, environment.work / EXAMPLE.name, ignore=ignored)
