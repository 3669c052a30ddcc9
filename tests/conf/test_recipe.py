"""`recipe=auto` chooses what fits and is fast, says why, and leaves alone what was given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from mt_lightning.commands import recipe
from mt_lightning.commands.recipe import apply, choose
from mt_lightning.commands.settings import complete_arguments
from mt_lightning.errors import BudgetError, ConfigError

from .test_conf import compose_run

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_LIGHTNING_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def free(monkeypatch: pytest.MonkeyPatch, mib: float) -> None:
    monkeypatch.setattr(recipe, "ram_limit_bytes", lambda _: int(recipe.RAM_SHARE * mib * MIB))


def settings_of(*arguments: str) -> DictConfig:
    return compose_run(*complete_arguments(["model=tiny", "recipe=auto", *arguments]))


def chosen(*arguments: str) -> dict[str, Any]:
    given = {word.partition("=")[0] for word in arguments}
    return {one.name: one.value for one in choose(settings_of(*arguments), given)}


def test_a_large_machine_needs_no_tricks(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1100)
    assert chosen("data.batch_size=2") == {
        "strategy.max_ram_gb": 0.85,
        "data.batch_size": 2,
        "trainer.accumulate_grad_batches": 1,
        "strategy.optimizer_compression": False,
        "strategy.recompute": "auto",
    }


def test_samples_of_a_step_stay_where_batches_must_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 48)
    settings = settings_of("data.batch_size=64", "data.sequence_length=256")
    choices = choose(settings)
    apply(settings, choices)
    assert settings.data.batch_size < 64
    assert settings.data.batch_size * settings.trainer.accumulate_grad_batches == 64
    assert all(choice.why for choice in choices)
    assert OmegaConf.select(settings, "strategy.max_ram_gb") <= 0.8 * 48 / 1024


def test_what_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1024)
    given = ["strategy.max_ram_gb=0.3", "strategy.optimizer_compression=lossless"]
    found = chosen(*given, "strategy.recompute=true", "data.batch_size=4")
    assert "strategy.max_ram_gb" not in found
    assert found["strategy.optimizer_compression"] == "lossless"
    assert found["strategy.recompute"] is True
    assert found["data.batch_size"] == 4


def test_bits_are_given_up_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # What has no room waits for a slow drive: fewer bytes are faster.
    monkeypatch.setattr(recipe, "_ASSUMED_DRIVE_BYTES_PER_S", 1e6)
    free(monkeypatch, 1024)
    short = ["strategy.max_ram_gb=0.005", "data.sequence_length=32"]
    assert chosen(*short)["strategy.optimizer_compression"] in (False, "lossless")
    assert chosen(*short, "recipe.lossy=true")["strategy.optimizer_compression"] is True


def test_what_cannot_fit_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1)
    with pytest.raises(BudgetError, match=r"recipe=auto found no settings.*The cheapest change: "):
        chosen()


def test_no_memory_at_all_is_refused_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 0)
    with pytest.raises(BudgetError, match=r"recipe=auto found no settings") as refused:
        chosen()
    assert "0.0 GiB" not in str(refused.value)


def test_a_full_drive_is_to_be_freed_or_another_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1024)
    monkeypatch.setattr(recipe, "free_bytes", lambda _: 0)
    with pytest.raises(
        BudgetError, match=r"free 2 GiB of each drive, or name others in offload_dir"
    ):
        chosen()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strategy=auto"], "strategy=auto has none"),
        (["optimizer._target_=torch.optim.Rprop"], "does not know what torch.optim.Rprop keeps"),
        (["trainer.accelerator=cuda"], "plans for the CPU"),
    ],
)
def test_runs_that_cannot_be_planned_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(*arguments)


def test_a_machine_whose_accelerator_would_be_taken_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of the recipe alone: an optimizer of torch would ask a driver that is not there.
    seen = SimpleNamespace(accelerator=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr(recipe, "torch", seen)
    with pytest.raises(ConfigError, match=r"not for trainer\.accelerator=auto on this machine"):
        chosen()
    assert "strategy.max_ram_gb" in chosen("trainer.accelerator=cpu")


def test_short_names_of_a_precision_are_known_and_others_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, 1100)
    for short, name in (("bf16", "bf16-mixed"), ("32", "32-true")):
        asked = [f"trainer.precision={precision}" for precision in (short, name)]
        assert chosen(asked[0]) == chosen(asked[1])
    with pytest.raises(ConfigError, match=r"trainer\.precision=64-true.*bf16-mixed"):
        chosen("trainer.precision=64-true")
