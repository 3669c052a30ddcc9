"""What holds for the repository as a whole: sizes, names, dependencies."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mt_lightning"
OURS = ("mt_lightning", "mt_lightning_command")
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400
VAGUE_NAMES = {"utils", "common", "core", "misc", "helpers", "manager"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_is_over_400_lines() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_names_say_what_is_inside() -> None:
    words = {
        path: set(re.split(r"[/_.]", str(path.relative_to(PACKAGE)).lower())) for path in SOURCES
    }
    assert {str(path): found for path, ws in words.items() if (found := ws & VAGUE_NAMES)} == {}


def test_every_folder_says_what_it_is_for() -> None:
    for folder in {path.parent for path in SOURCES}:
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert docstring, f"{folder.relative_to(ROOT)}/__init__.py has no docstring"


def test_every_import_is_a_declared_dependency(project: dict[str, Any]) -> None:
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    extras = project["optional-dependencies"]
    for_users = [line for name in ("examples", "trainer", "data", "peft") for line in extras[name]]
    optional = {canonicalize_name(Requirement(line).name) for line in for_users}
    providers = importlib.metadata.packages_distributions()
    undeclared: dict[str, set[str]] = {}
    for path in SOURCES:
        for module, is_deferred in _imports(ast.parse(path.read_text())):
            if module in sys.stdlib_module_names or module in OURS:
                continue
            distributions = {canonicalize_name(name) for name in providers.get(module, [module])}
            # What an extra brings may be missing: only a function may import it.
            allowed = declared | optional if is_deferred else declared
            if not distributions & allowed:
                undeclared.setdefault(module, set()).add(str(path.relative_to(ROOT)))
    # A second copy of Lightning's code: used when the user has imported it, never required.
    undeclared.pop("pytorch_lightning", None)
    assert undeclared == {}


def _imports(tree: ast.Module) -> list[tuple[str, bool]]:
    """Top-level names that are imported, each with whether a function does so."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    deferred = {id(node) for function in functions for node in ast.walk(function)}
    for_types = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
    ]
    never_run = {id(node) for branch in for_types for node in ast.walk(branch)}
    found = []
    for node in ast.walk(tree):
        if id(node) in never_run:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name.split(".")[0], id(node) in deferred) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.module.split(".")[0], id(node) in deferred))
    return found


def test_every_dependency_is_pinned_for_the_tests(project: dict[str, Any]) -> None:
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): str(pin.specifier).lstrip("=") for pin in pins}
    for requirement in (Requirement(line) for group in groups for line in group):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} has no pin in constraints.txt"
        assert version in requirement.specifier, f"{requirement} excludes the tested {version}"


def test_an_install_never_replaces_a_torch_that_will_do(project: dict[str, Any]) -> None:
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    lines = [Requirement(line) for group in groups for line in group]
    (bound,) = [line for line in lines if canonicalize_name(line.name) == "torch"]
    assert [spec.operator for spec in bound.specifier] == [">="]
    assert not {"torchvision", "torchaudio", "triton"} & {line.name for line in lines}


def test_the_lowest_releases_are_those_of_the_project(project: dict[str, Any]) -> None:
    """`make test-lowest` installs them."""
    command = [sys.executable, ROOT / ".ci" / "lowest.py", "trainer"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    pins = {pin.name: pin for pin in map(Requirement, shown)}
    extra = project["optional-dependencies"]["trainer"]
    wanted = [Requirement(line) for line in [*project["dependencies"], *extra]]
    assert {one.name for one in wanted} == set(pins)
    for one in wanted:
        (version,) = (spec.version for spec in pins[one.name].specifier)
        assert f">={version}" == str(one.specifier)


def test_no_path_of_one_machine_is_in_a_file() -> None:
    pattern = re.compile(rb"(?<![\w.\-])/(?:home|root|Users|work)/\w")
    found = {}
    for path in _tracked_files():
        if match := pattern.search(path.read_bytes()):
            found[str(path.relative_to(ROOT))] = match.group()
    assert found == {}
