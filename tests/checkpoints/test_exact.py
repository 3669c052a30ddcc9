"""A run goes on exactly from whatever checkpoint it saved, and says so where it cannot."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

import mt_lightning as mt

from ..resume.run import StoppedError, Told, assert_goes_on_as, paged, train
from .runs import linked

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:The dirpath has changed",
)

ANEW = "begins the data of its epoch anew"


@cache
def straight(**settings: Any) -> Told:
    """Return a plain run that nothing interrupted."""
    return train("auto", **settings)


def run(
    root: Path,
    name: str,
    saving: Callback,
    *,
    linking: bool = False,
    durability: str = "checkpoint",
    ckpt_path: Path | None = None,
    **settings: Any,
) -> Told:
    module = train(
        paged(root / name, durability=durability),
        plugins=[linked() if linking else mt.PagedCheckpointIO()],
        more_callbacks=[saving],
        seed=99 if ckpt_path else 0,
        ckpt_path=ckpt_path,
        **settings,
    )
    module.trainer.strategy._close()
    return module


def every(root: Path, steps: int = 1, **settings: Any) -> ModelCheckpoint:
    defaults = {"filename": "{step}", "save_top_k": -1, "every_n_train_steps": steps}
    return ModelCheckpoint(root / "ck", **{**defaults, **settings})


def at_validation(root: Path, **settings: Any) -> ModelCheckpoint:
    return every(root, **{"every_n_train_steps": None, **settings})


def at_epoch_end(root: Path) -> ModelCheckpoint:
    return at_validation(root, save_on_train_epoch_end=True)


class SaveAt(Callback):
    """Saves one checkpoint in the middle of a batch; may stop the run before the batch ends."""

    def __init__(self, path: Path, step: int, *, stop: bool = False) -> None:
        self.path, self.step, self.stop = path, step, stop

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            if self.stop:
                raise StoppedError


WORKERS = {"workers": 2, "noisy": True}
GATHERED = {"accumulate_grad_batches": 3, "max_steps": 7}
KINDS: dict[str, tuple[Callable[[Path], ModelCheckpoint], int, dict[str, Any]]] = {
    "first step": (lambda root: every(root, 1), 1, {}),
    "mid-epoch": (lambda root: every(root, 6), 6, {}),
    "second epoch, workers": (lambda root: every(root, 13), 13, WORKERS),
    "step before an epoch's end": (lambda root: every(root, 11), 11, {}),
    "validation": (at_validation, 8, {}),
    "validation in the second epoch, workers": (at_validation, 15, WORKERS),
    "epoch's end": (at_epoch_end, 11, {}),
    "epoch's end, workers": (at_epoch_end, 11, WORKERS),
    "validation among gathered batches": (at_validation, 2, GATHERED),
}


# As a linked one or with workers they run always.
SELDOM = ("step before an epoch's end", "validation", "epoch's end")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] if kind in SELDOM else []) for kind in KINDS],
)
def test_it_goes_on_exactly_from_a_standard_file(tmp_path: Path, kind: str) -> None:
    saving, step, settings = KINDS[kind]
    run(tmp_path, "a", saving(tmp_path), **{**settings, "max_steps": step + 1})
    path = tmp_path / "ck" / f"step={step}.ckpt"
    in_batch = saving not in (at_validation, at_epoch_end)
    assert Path(f"{path}.run").exists() == in_batch
    for file in (tmp_path / "ck").iterdir():
        if file.name.split(".")[0] != path.stem:
            file.unlink()
    second = run(tmp_path, "b", saving(tmp_path), ckpt_path=path, **settings)
    assert assert_goes_on_as(straight(**settings), second) == step * settings.get(
        "accumulate_grad_batches", 1
    )
    # What was saved already is not saved again under another name.
    assert not [file for file in (tmp_path / "ck").iterdir() if "-v1" in file.name]


@pytest.mark.parametrize(("saving", "step"), [(at_validation, 8), (at_epoch_end, 11)])
def test_it_goes_on_exactly_from_a_linked_one(tmp_path: Path, saving: Any, step: int) -> None:
    run(tmp_path, "a", saving(tmp_path), linking=True, max_steps=step + 1)
    path = tmp_path / "ck" / f"step={step}.ckpt"
    second = run(tmp_path, "b", saving(tmp_path), linking=True, ckpt_path=path)
    assert assert_goes_on_as(straight(), second) == step


def test_last_is_found_again_and_again(tmp_path: Path) -> None:
    last: Any = "last"
    for stop in (5, 9):
        run(
            tmp_path,
            str(stop),
            every(tmp_path, 2, save_top_k=0, save_last=True),
            ckpt_path=last if stop > 5 else None,
            stop=stop - {5: 0, 9: 4}[stop],
        )
        assert sorted(f.name for f in (tmp_path / "ck").iterdir()) == ["last.ckpt", "last.ckpt.run"]
    end = run(tmp_path, "end", every(tmp_path, 2, save_top_k=0, save_last=True), ckpt_path=last)
    assert assert_goes_on_as(straight(), end) == 8


def test_it_goes_on_from_the_end_of_a_fit_and_from_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "end.ckpt"
    for name, since, end in (("a", None, 9), ("b", path, 13)):
        module = train(
            paged(tmp_path / name, durability="step"), max_steps=end, ckpt_path=since, seed=end
        )
        module.trainer.save_checkpoint(path)
        assert not Path(f"{path}.run").exists()
        module.trainer.strategy._close()
    last = train(paged(tmp_path / "c"), seed=1, ckpt_path=path)
    assert assert_goes_on_as(train("auto", seed=9), last) == 13


def test_it_goes_on_from_what_an_error_left(tmp_path: Path) -> None:
    saving = at_validation(tmp_path, save_on_exception=True)
    run(tmp_path, "a", saving, stop=6)
    path = tmp_path / "ck" / "step=6.ckpt"
    second = run(tmp_path, "b", at_validation(tmp_path), ckpt_path=path)
    assert assert_goes_on_as(straight(), second) == 6


@pytest.mark.parametrize("linking", [False, True])
def test_a_checkpoint_that_is_loaded_and_saved_elsewhere_keeps_its_state(
    tmp_path: Path, linking: bool
) -> None:
    run(tmp_path, "a", every(tmp_path, 6), linking=linking, max_steps=7)
    io, path, url = mt.PagedCheckpointIO(), tmp_path / "ck" / "step=6.ckpt", "memory://six.ckpt"
    io.save_checkpoint(io.load_checkpoint(path), url)
    io.save_checkpoint(io.load_checkpoint(url), tmp_path / "one.ckpt")
    io.remove_checkpoint(path)
    second = run(tmp_path, "b", every(tmp_path, 6), ckpt_path=tmp_path / "one.ckpt")
    assert assert_goes_on_as(straight(), second) == 6


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of step 6, saved in the middle of its batch, and another beside it."""
    root = tmp_path_factory.mktemp("six")
    for name in ("some", "other"):
        run(root, name, SaveAt(root / f"{name}.ckpt", 6), max_steps=7)
    return root / "some.ckpt"


def copied(path: Path, to: Path) -> Path:
    for end in ("", ".run"):
        shutil.copy(f"{path}{end}", f"{to / path.name}{end}")
    return to / path.name


@pytest.fixture(scope="module")
def plain(six: Path) -> Told:
    """Return what plain Lightning makes of it."""
    return train("auto", seed=99, ckpt_path=six)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _missing(path: Path, _: Path) -> None:
    Path(f"{path}.run").unlink()


def _flipped(path: Path, _: Path) -> None:
    flip(Path(f"{path}.run"), 4000)


def _cut(path: Path, _: Path) -> None:
    file = Path(f"{path}.run")
    file.write_bytes(file.read_bytes()[:20])


def _foreign(path: Path, six: Path) -> None:
    # Of another run, and of the same step.
    shutil.copy(six.parent / "other.ckpt.run", f"{path}.run")


def _folder(path: Path, six: Path) -> None:
    _missing(path, six)
    Path(f"{path}.run").mkdir()


DAMAGE = {
    "is not there": _missing,
    "is damaged": _flipped,
    "the run is damaged": _cut,
    "belongs to another checkpoint": _foreign,
    "is no file": _folder,
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_without_its_state_it_goes_on_as_plain_lightning_does(
    tmp_path: Path, six: Path, plain: Told, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(six, tmp_path)
    DAMAGE[reason](path, six)
    with caplog.at_level(logging.WARNING):
        found = run(tmp_path, "b", SaveAt(path, -1), ckpt_path=path)
    (line,) = [m for m in caplog.messages if ANEW in m]
    assert reason in line
    assert found.batches == plain.batches
    assert plain.batches[0][0] == 6
    for name, value in plain.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_a_state_inside_that_is_damaged_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, "a", at_validation(tmp_path), max_steps=9)
    path = tmp_path / "ck" / "step=8.ckpt"
    flip(path, path.read_bytes().index(b"MTCKRUN\1") + 500)
    run(tmp_path, "b", at_validation(tmp_path), ckpt_path=path)
    assert [m for m in caplog.messages if ANEW in m and "damaged" in m]


def test_plain_lightning_reads_what_holds_the_state(tmp_path: Path) -> None:
    run(tmp_path, "a", at_epoch_end(tmp_path), max_steps=12)
    path = tmp_path / "ck" / "step=11.ckpt"
    plain = train("auto", seed=99, ckpt_path=path, more_callbacks=[at_epoch_end(tmp_path)])
    assert [batch[0] for batch in plain.batches] == list(range(11, 17))
    loaded = Told.load_from_checkpoint(path, stop=None)
    kept = torch.load(path, weights_only=True)["state_dict"]
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, kept[name]), name


def test_a_checkpoint_and_the_file_beside_it_go_together(tmp_path: Path) -> None:
    saving = every(tmp_path, monitor="step", mode="max", save_top_k=2, save_last=True)
    run(tmp_path, "a", saving, max_steps=7)
    names = ["last.ckpt", "step=6.ckpt", "step=7.ckpt"]
    both = sorted([*names, *(f"{name}.run" for name in names)])
    assert sorted(file.name for file in (tmp_path / "ck").iterdir()) == both
    io = mt.PagedCheckpointIO()
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "ck" / "last.ckpt")
    assert "state" in io.load_checkpoint(tmp_path / "link.ckpt")["megatrain_run"]
    for name in names:
        io.remove_checkpoint(tmp_path / "ck" / name)
    assert not list((tmp_path / "ck").iterdir())


def test_an_older_file_at_the_same_path_is_never_taken(
    tmp_path: Path, six: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(six, tmp_path)
    stale = Path(f"{path}.run").read_bytes()
    run(tmp_path, "b", SaveAt(path, 6, stop=True), stop=99)
    assert Path(f"{path}.run").read_bytes() != stale
    # As kill -9 leaves it: saved again, and the batch never ended.
    Path(f"{path}.run").write_bytes(stale)
    run(tmp_path, "c", SaveAt(path, -1), ckpt_path=path, max_steps=7)
    assert [m for m in caplog.messages if ANEW in m and "belongs to another" in m]
    # What is not ours is neither written over nor deleted.
    Path(f"{path}.run").write_text("notes")
    run(tmp_path, "d", SaveAt(path, 3), max_steps=4)
    mt.PagedCheckpointIO().remove_checkpoint(path)
    assert Path(f"{path}.run").read_text() == "notes"


@pytest.mark.parametrize("late", [False, True])
def test_weights_that_a_hook_wrote_have_no_state(
    tmp_path: Path, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "some.ckpt"

    class Writing(SaveAt):
        def write(self, module: Any) -> None:
            weights = {k: v.clone() for k, v in module.state_dict().items()}
            module.load_state_dict({k: v * 2 for k, v in weights.items()})

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == self.step and not late:
                trainer.save_checkpoint(path)
                self.write(module)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == self.step and late:
                self.write(module)
                trainer.save_checkpoint(path)

    run(tmp_path, "a", Writing(path, 4), max_steps=6)
    assert not Path(f"{path}.run").exists()
    run(tmp_path, "b", SaveAt(path, -1), ckpt_path=path, max_steps=5)
    assert [m for m in caplog.messages if ANEW in m]


def test_other_settings_begin_the_epoch_anew(
    tmp_path: Path, six: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(six, tmp_path)
    run(tmp_path, "b", SaveAt(path, -1), ckpt_path=path, accumulate_grad_batches=2, max_steps=8)
    assert [m for m in caplog.messages if ANEW in m and "accumulate_grad_batches is 2" in m]


def test_weights_alone_have_no_state(tmp_path: Path) -> None:
    run(tmp_path, "a", every(tmp_path, 3, save_weights_only=True), max_steps=4)
    (path,) = (tmp_path / "ck").iterdir()
    assert not {"megatrain_run", "megatrain_run_id"} & set(torch.load(path, weights_only=True))
