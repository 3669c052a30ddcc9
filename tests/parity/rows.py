"""The rows of the matrix: which recipes run, over which link, under which budget."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

from . import zoo
from .cover import pairwise_cover
from .flows import FLOWS
from .optimizers import OPTIMIZERS
from .recipe import Recipe

RECIPE_FACTORS: dict[str, tuple[Any, ...]] = {
    "model": zoo.MODELS,
    "structure": (
        "usual",
        "tied",
        "odd_sizes",
        "non_contiguous",
        "int_buffer",
        "called_twice",
        "unused_even",
        "data_branch",
        "no_grad_forward",
        "hf_checkpointing",
        "checkpointed",
        "added_last",
        "resized",
    ),
    "flow": (*FLOWS, "resume_plain_paged", "resume_paged_plain", "resume_paged_paged"),
    "optimizer": OPTIMIZERS,
    "control": ("automatic", "none_sometimes", "manual", "two_optimizers", "gan"),
    "clip": ("none", "norm", "value"),
    "accumulate": ("1", "3", "3_leftover"),
    "groups": ("one", "no_decay", "frozen_base", "frozen_between"),
    "schedule": ("constant", "cosine", "one_cycle"),
    "precision": ("32-true", "bf16-mixed"),
    "dropout": ("off", "on"),
    "num_threads": (1, 2),
}
PLACE_FACTORS: dict[str, tuple[Any, ...]] = {
    "slices": ("usual", "tiny"),
    "link": ("host", "delayed"),
    "budget": ("smallest", "tight", "fits"),
    "state": ("raw", "lossless"),
    "durability": ("step", "checkpoint"),
    "recompute": ("auto", "never", "always"),
}
_PLACES_OF_EVERY_MODEL = {
    "slices": ("tiny",),
    "state": ("lossless",),
    "durability": ("checkpoint",),
    "recompute": ("never", "always"),
}
_LARGE_FACTORS = {"model", "structure", "flow", "optimizer"}
_MIDDLE = {"control", "groups"}
DEFAULTS = {field.name: field.default for field in fields(Recipe)} | {
    "slices": "usual",
    "link": "host",
    "budget": "smallest",
    "state": "raw",
    "durability": "step",
    "recompute": "auto",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One test: a recipe, and where its bytes live."""

    recipe: Recipe
    slices: str = "usual"
    """usual | tiny: how finely the update of an element-wise optimizer is cut."""
    link: str = "host"
    """host | delayed (copies happen late and out of order)."""
    budget: str = "smallest"
    """smallest (that works) | tight (10 % more) | fits (nothing has to leave)."""
    state: str = "raw"
    """raw | lossless: how optimizer state is kept on disk."""
    durability: str = "step"
    """step | checkpoint: when steps are committed."""
    recompute: str = "auto"
    """auto (where graphs of units find no room) | never | always."""

    @property
    def name(self) -> str:
        """The model, what is not plain about the recipe, and the place."""
        place = {name: getattr(self, name) for name in PLACE_FACTORS}
        values = asdict(self.recipe) | place
        changed = [
            f"{'accumulate' if name == 'accumulate' else ''}{value}"
            if name != "num_threads"
            else f"{value}threads"
            for name, value in values.items()
            if name not in ("model", "link", "budget") and value != DEFAULTS[name]
        ]
        return "+".join([self.recipe.model, *changed]) + f"/{self.link}/{self.budget}"


def is_allowed(row: dict[str, Any]) -> bool:
    """Say whether plain Lightning and the network can run a (partial) row at all."""
    model, structure, control = row.get("model"), row.get("structure"), row.get("control")
    is_manual = control in ("manual", "two_optimizers", "gan")
    if is_manual and (row.get("clip", "none") != "none" or row.get("accumulate", "1") != "1"):
        return False  # Lightning leaves both to the module
    if structure in ("hf_checkpointing", "resized") and model in zoo.USER_WRITTEN:
        return False
    if structure in ("tied", "resized") and model in zoo.VISION:
        return False
    if (control, row.get("clip"), row.get("accumulate")) == ("none_sometimes", "value", "1"):
        return False  # torch fails to clip no gradients at all by value
    if row.get("recompute", "auto") == "never" and row.get("budget", "fits") != "fits":
        return False  # what graphs take is not known before the first step
    # Lightning lets a fused optimizer handle the scaling of gradients and refuses to clip them.
    return not (
        row.get("precision") == "bf16-mixed"
        and row.get("optimizer") == "fused_adamw"
        and (row.get("clip", "none") != "none" or control == "manual")
    )


def needs_wide_cover(first: str, second: str) -> bool:
    """Say whether all pairs of values of two factors must occur.

    All but the pairs within the four factors with most values, which alone would take more rows
    than everything else: they meet by chance. The full product has each model with each of them.
    """
    return not {first, second} <= _LARGE_FACTORS


def needs_cover(first: str, second: str) -> bool:
    """Say the same of a cover that takes fewer rows: the next two factors meet those by chance."""
    pair = {first, second}
    return needs_wide_cover(first, second) and not (pair & _LARGE_FACTORS and pair & _MIDDLE)


def covering_assignments() -> list[dict[str, Any]]:
    """Cover every pair of values that `needs_cover` names, in about fifty rows."""
    return pairwise_cover({**RECIPE_FACTORS, **PLACE_FACTORS}, is_allowed, needs_cover)


def covering_rows() -> list[Row]:
    """Return the rows of the pairwise cover."""
    return [_row(assignment) for assignment in covering_assignments()]


def wide_rows() -> list[Row]:
    """Return those of the wide cover, about eighty."""
    factors = {**RECIPE_FACTORS, **PLACE_FACTORS}
    return [_row(each) for each in pairwise_cover(factors, is_allowed, needs_wide_cover)]


def product_rows() -> list[Row]:
    """Every model with every single feature, over every link and under every budget.

    Rows with equal recipes follow each other.
    """
    assignments = [
        {"model": model, **feature, **dict(zip(("link", "budget"), place, strict=True))}
        for model in zoo.MODELS
        for feature in _features()
        for place in product(PLACE_FACTORS["link"], PLACE_FACTORS["budget"])
    ]
    rows: dict[Recipe, list[Row]] = {}
    for row in (_row(each) for each in assignments if is_allowed(each)):
        rows.setdefault(row.recipe, []).append(row)
    return [row for group in rows.values() for row in group]


def _features() -> list[dict[str, Any]]:
    """Return the plain case, every single deviation, and the ones that come in twos."""
    single = [
        {name: value}
        for name, values in {**RECIPE_FACTORS, **_PLACES_OF_EVERY_MODEL}.items()
        if name != "model"
        for value in values
        if value != DEFAULTS[name]
    ]
    tiny_slices = [{"optimizer": name, "slices": "tiny"} for name in OPTIMIZERS[1:]]
    lossless = [{"optimizer": name, "state": "lossless"} for name in OPTIMIZERS[1:]]
    return [{}, *single, *tiny_slices, *lossless]


def _row(assignment: dict[str, Any]) -> Row:
    recipe = {name: value for name, value in assignment.items() if name in RECIPE_FACTORS}
    place = {name: value for name, value in assignment.items() if name in PLACE_FACTORS}
    return Row(recipe=Recipe(**recipe), **place)
