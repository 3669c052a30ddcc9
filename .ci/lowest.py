"""Print the lowest release of each requirement that pyproject.toml allows, as pip's constraints.

Run: python .ci/lowest.py [EXTRA ...] > constraints-lowest.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def lowest(requirement: str) -> str:
    """Return `NAME==VERSION` for `NAME[EXTRA]>=VERSION`."""
    parsed = Requirement(requirement)
    bounds = [spec.version for spec in parsed.specifier if spec.operator == ">="]
    if len(bounds) != 1:
        raise SystemExit(f"{requirement}: one lower bound is needed, written >=VERSION")
    return f"{parsed.name}=={bounds[0]}"


def main() -> None:
    """Print those of the package, and of the extras that are named."""
    path = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    groups = [project["dependencies"]]
    groups += [project["optional-dependencies"][extra] for extra in sys.argv[1:]]
    print("\n".join(sorted({lowest(line) for group in groups for line in group})))


if __name__ == "__main__":
    main()
