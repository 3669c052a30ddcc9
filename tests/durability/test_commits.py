"""What is written when: by steps, by commits, and by runs that choose themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from mt_lightning.engine.durability import COMMIT_INTERVAL_S
from mt_lightning.tiers.commit import CommitLog, CommitRecord

from .nets import PAGE, Tiny, adamw, assert_same, fit, momentum, paged, smallest_gb

NUM_STEPS = 5


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the steps that are committed from now on."""
    steps: list[int] = []
    write = CommitLog.write

    def noted(self: CommitLog, record: CommitRecord) -> None:
        write(self, record)
        steps.append(record.step)

    monkeypatch.setattr(CommitLog, "write", noted)
    return steps


class Counts(Callback):
    """Notes what was written before the first step."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.before = trainer.strategy.engine.stats.bytes_written


@pytest.mark.parametrize("clip", [None, 0.5], ids=["usual", "clipped"])
@pytest.mark.parametrize(("durability", "times"), [("checkpoint", 1), ("step", NUM_STEPS)])
def test_bytes_written(
    tmp_path: Path, commits: list[int], durability: str, times: int, clip: float | None
) -> None:
    counts, strategy = Counts(), paged(tmp_path, durability=durability)
    module = Tiny(adamw, scaled=True)
    fit(module, strategy, max_steps=NUM_STEPS, callbacks=[counts], gradient_clip_val=clip)
    # One whole set of files is what one commit names.
    files = [path.stat().st_size - PAGE for path in tmp_path.glob("pages/*.1")]
    assert sum(files) >= 12 * sum(param.numel() for param in module.parameters())
    assert strategy.engine.stats.bytes_written - counts.before == times * sum(files)
    assert len(set(commits)) == times + 1
    assert commits[-1] == NUM_STEPS
    plan = strategy.engine.plan
    assert plan.written_bytes == (sum(files) if durability == "step" else 0)
    assert plan.commit_bytes == (0 if durability == "step" else sum(files))


def test_bytes_written_while_half_of_the_state_fits(tmp_path: Path) -> None:
    """What stays is written once, what does not in every step."""
    settings: dict[str, Any] = {"_slice_bytes": 16384}
    least = smallest_gb(Tiny(adamw), **settings)
    layers = 3 * 9 * PAGE
    counts, strategy = Counts(), paged(tmp_path, max_ram_gb=least + 3 * layers / 2**30, **settings)
    fit(Tiny(adamw), strategy, max_steps=NUM_STEPS, callbacks=[counts])
    plan = strategy.engine.plan
    assert 0 < plan.written_bytes < 2 * layers < plan.commit_bytes
    files = sum(path.stat().st_size - PAGE for path in tmp_path.glob("pages/*.1"))
    assert plan.written_bytes + plan.commit_bytes == files
    written = strategy.engine.stats.bytes_written - counts.before
    assert written == NUM_STEPS * plan.written_bytes + plan.commit_bytes


class Clock(Callback):
    """A clock that goes on by some minutes with every batch."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += COMMIT_INTERVAL_S / 3


def test_commits_every_few_minutes(tmp_path: Path, commits: list[int]) -> None:
    clock = Clock()
    fit(Tiny(adamw), paged(tmp_path, _clock=clock), max_steps=8, callbacks=[clock])
    # A step is committed during the next one: its updates wait for the next forward.
    assert commits == [0, 2, 5, 8]


class Saves(Callback):
    """Saves in the middle of a batch, when its step has been taken."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def test_a_saved_checkpoint_is_a_commit(tmp_path: Path, commits: list[int]) -> None:
    saves = Saves(tmp_path / "a.ckpt")
    fit(Tiny(adamw), paged(tmp_path / "pages"), max_steps=NUM_STEPS, callbacks=[saves])
    assert commits == [0, 3, NUM_STEPS]
    plain = Tiny(adamw)
    fit(plain, max_steps=3)
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value), name


def test_model_checkpoint_commits(tmp_path: Path, commits: list[int]) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    settings = {"callbacks": [saves], "enable_checkpointing": True}
    plain, module = Tiny(adamw), Tiny(adamw)
    fit(plain, max_steps=NUM_STEPS)
    fit(module, paged(tmp_path / "pages"), max_steps=NUM_STEPS, **settings)
    assert commits == [0, 2, 4, NUM_STEPS]
    assert_same(module, plain)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_weights_that_were_loaded_are_safe_after_one_step(
    tmp_path: Path, commits: list[int]
) -> None:
    """Without a step they could not be gone on with."""
    trainer = fit(Tiny(adamw), paged(), max_steps=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    commits.clear()
    module = Tiny(adamw)
    strategy = paged(tmp_path / "pages")
    fit(module, strategy, max_steps=6, ckpt_path=tmp_path / "a.ckpt")
    first = [step for step in commits if step]
    assert first[0] == 1
    assert first[-1] == 4


@pytest.mark.parametrize("make", [adamw, momentum])
def test_auto_chooses(tmp_path: Path, make: Any) -> None:
    values = 2 if make is adamw else 1
    everything = (2 + values) * 3 * 9 * PAGE / 2**30
    settings: dict[str, Any] = {"durability": "auto", "_slice_bytes": 16384}
    least = smallest_gb(Tiny(make), **settings)
    for room, chosen, schedule in (
        (0.0, "step", "eager"),
        (0.8, "step", "eager"),
        (1.0, "checkpoint", "deferred"),
        (9.0, "checkpoint", "deferred"),
    ):
        strategy = paged(max_ram_gb=least + room * everything, **settings)
        fit(Tiny(make), strategy, max_steps=1)
        plan = strategy.engine.plan
        assert (plan.durability, plan.schedule) == (chosen, schedule), room
        words = " ".join(place for _, _, place in plan.rows())
        assert "TB a day" in words
        assert ("every step is committed" in words) == (chosen == "step")
        assert ("every 5 minutes" in words) == (chosen == "checkpoint")
