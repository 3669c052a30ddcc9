"""What happens to a module: one fit, or fits with something else in between."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from mt_lightning.plugins.linked import RUN_STATE
from mt_lightning.plugins.run_file import RUN_ID

from . import zoo
from .outcome import Outcome
from .recipe import NUM_EPOCHS, NUM_VAL_BATCHES, Recipe
from .subject import Subject, make_subject

MakeStrategy = Callable[[], Strategy | None]


@dataclass(kw_only=True)
class Session:
    """The trainers, modules and records of one run of a recipe."""

    recipe: Recipe
    directory: Path
    make_strategy: MakeStrategy
    """Makes the strategy of the next trainer; None stands for plain Lightning."""
    outcome: Outcome = field(default_factory=Outcome)
    num_fits: int = 0
    schedules: set[str] = field(default_factory=set)
    """How the paged fits updated: eager | deferred."""

    def trainer(self, **settings: Any) -> Trainer:
        callbacks = [Recorder(self), *settings.pop("callbacks", [])]
        strategy = self.make_strategy()
        if strategy is not None:
            settings["strategy"] = strategy
            callbacks.append(EndWhereItRounds())
        if self.recipe.clip != "none":
            settings["gradient_clip_val"] = 0.5 if self.recipe.clip == "norm" else 1e-3
            settings["gradient_clip_algorithm"] = self.recipe.clip
        settings.setdefault("max_epochs", NUM_EPOCHS)
        return Trainer(
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=self.recipe.num_accumulated,
            precision=self.recipe.precision,
            num_sanity_val_steps=1,
            log_every_n_steps=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
            default_root_dir=self.directory,
            callbacks=callbacks,
            **settings,
        )

    def loader(self, *, seed: int = 1, train: bool = False) -> DataLoader:
        count = self.recipe.num_batches if train else NUM_VAL_BATCHES
        return DataLoader(
            zoo.batches(self.recipe.model, count, seed), batch_size=None, shuffle=train
        )

    def fit(self, trainer: Trainer, subject: Subject, **settings: Any) -> None:
        """Fit and record what the module is afterwards."""
        settings.setdefault("val_dataloaders", self.loader(seed=2))
        trainer.fit(subject, self.loader(train=True), **settings)
        self.num_fits += 1
        name = f"fit{self.num_fits}"
        self.outcome.add(f"{name}/losses", subject.losses)
        self.outcome.add(f"{name}/global_step", trainer.global_step)
        self.outcome.add(f"{name}/rng", torch.get_rng_state())
        self.outcome.add_module(name, subject)

    def fit_more(self, trainer: Trainer, subject: Subject) -> None:
        """Fit for one more epoch with the same trainer."""
        trainer.fit_loop.max_epochs += 1
        self.fit(trainer, subject)


class Recorder(Callback):
    """Records the metrics of every evaluation, and the checkpoint at the end of every fit."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.num_evaluations = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.num_evaluations += 1
        name = f"fit{self.session.num_fits + 1}/evaluation{self.num_evaluations}"
        self.session.outcome.add(name, dict(trainer.callback_metrics))

    on_test_end = on_validation_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            self.session.schedules.add(engine.plan.schedule)
        save_checkpoint(self.session, trainer, f"fit{self.session.num_fits + 1}/checkpoint")


class RoundingError(Exception):
    """The order of work adds some gradients in another order: there are no bits to compare."""


class EndWhereItRounds(Callback):
    """Ends a paged run as soon as it was found, and named, that its order of work rounds."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if "the same but for rounding" in trainer.strategy.engine.plan.order_reason:
            raise RoundingError


class Peek(Callback):
    """Reads the weights, generates and saves in the middle of an epoch and of a window."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            name = f"fit{self.session.num_fits + 1}/peek{trainer.current_epoch}"
            peek(self.session, pl_module, name)
            save_checkpoint(self.session, trainer, f"{name}/checkpoint")


def save_checkpoint(session: Session, trainer: Trainer, name: str) -> None:
    """Save a standard checkpoint and record what it holds."""
    path = session.directory / "recorded.ckpt"
    trainer.save_checkpoint(path)
    checkpoint = standard(path)
    del checkpoint["callbacks"]  # paths
    session.outcome.add(name, checkpoint)


def standard(path: Path) -> dict[str, Any]:
    """Load what plain Lightning has in a checkpoint too; paged runs add how to go on exactly."""
    checkpoint = torch.load(path, weights_only=True)
    return {k: v for k, v in checkpoint.items() if k not in (RUN_STATE, RUN_ID)}


def peek(session: Session, module: LightningModule, name: str) -> None:
    """Record the state dict and what the network makes of a prompt."""
    session.outcome.add(f"{name}/state_dict", dict(module.state_dict()))
    batch = zoo.batches(session.recipe.model, 1, seed=5)[0]
    network = module.network
    network.eval()
    with torch.no_grad():
        session.outcome.add(f"{name}/logits", network(**batch).logits)
    if session.recipe.model in zoo.GENERATIVE:
        tokens = network.generate(
            batch["input_ids"][:, :4],
            attention_mask=torch.ones(2, 4, dtype=torch.long),
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            use_cache=session.recipe.structure != "called_twice",
        )
        session.outcome.add(f"{name}/generated", tokens)
    network.train()


# --- flows ---------------------------------------------------------------------------------------


def fit(session: Session) -> None:
    session.fit(session.trainer(), make_subject(session.recipe))


def fit_validate_fit(session: Session) -> None:
    subject, trainer = make_subject(session.recipe), session.trainer()
    session.fit(trainer, subject)
    trainer.validate(subject, session.loader(seed=3), verbose=False)
    session.fit_more(trainer, subject)


def two_trainers(session: Session) -> None:
    subject = make_subject(session.recipe)
    session.fit(session.trainer(), subject)
    session.fit(session.trainer(max_epochs=1), subject)


def two_val_loaders(session: Session) -> None:
    loaders = [session.loader(seed=2), session.loader(seed=3)]
    session.fit(session.trainer(), make_subject(session.recipe), val_dataloaders=loaders)


def peeks(session: Session) -> None:
    subject, trainer = make_subject(session.recipe), session.trainer(callbacks=[Peek(session)])
    session.fit(trainer, subject)
    peek(session, subject, "between")
    session.fit_more(trainer, subject)


def copies(session: Session) -> None:
    """Copy the parked module twice, write to one copy, train the other and the original."""
    subject = make_subject(session.recipe)
    session.fit(session.trainer(), subject)
    copied = copy.deepcopy(subject)
    pickled = copied
    # Both put hooks into the network that are local functions.
    if session.recipe.model not in zoo.MIXTURES and session.recipe.structure != "hf_checkpointing":
        pickled = pickle.loads(pickle.dumps(subject))
    session.outcome.add_module("copied", copied)
    session.outcome.add_module("pickled", pickled)
    session.fit(session.trainer(max_epochs=1), pickled)
    for parameter in copied.parameters():
        parameter.data.zero_()
    session.outcome.add_module("original", subject)
    session.fit(session.trainer(max_epochs=1), subject)


def edited(session: Session) -> None:
    """Write to the parked parameters in four ways, three of which no version counter sees."""
    subject = make_subject(session.recipe)
    session.fit(session.trainer(), subject)
    for index, parameter in enumerate(subject.parameters()):
        if index % 5 == 0:
            with torch.no_grad():
                parameter.mul_(0.9)
        elif index % 5 == 1:
            parameter.data.mul_(0.8)
        elif index % 5 == 2:
            parameter.data = parameter.data * 0.7
        elif index % 5 == 3:
            array = parameter.detach().numpy()
            array *= 0.6
    session.fit(session.trainer(max_epochs=1), subject)


def evaluations(session: Session) -> None:
    subject, trainer = make_subject(session.recipe), session.trainer()
    session.fit(trainer, subject)
    trainer.test(subject, session.loader(seed=3), verbose=False)
    fresh = session.trainer()
    fresh.validate(subject, session.loader(seed=3), verbose=False)
    session.outcome.add("predicted", fresh.predict(subject, session.loader(seed=4)))
    session.outcome.add_module("evaluated", subject)


def first_leg(session: Session) -> Path:
    """Fit for one epoch, with a checkpoint at its end; return the path."""
    trainer = session.trainer(callbacks=[_saver(session)], max_epochs=1)
    session.fit(trainer, make_subject(session.recipe))
    path = session.directory / "epoch=0.ckpt"
    torch.save(standard(path), path)
    return path


def second_leg(session: Session, path: Path) -> None:
    """Resume with a new module and a new trainer.

    Never in the middle of an epoch: plain Lightning starts its data again there.
    """
    torch.manual_seed(99)  # a standard checkpoint holds no RNG
    trainer = session.trainer(callbacks=[_saver(session)])
    session.fit(trainer, make_subject(session.recipe), ckpt_path=path)


def _saver(session: Session) -> ModelCheckpoint:
    return ModelCheckpoint(session.directory, filename="{epoch}", save_top_k=-1)


FLOWS = {
    "fit": fit,
    "fit_validate_fit": fit_validate_fit,
    "two_trainers": two_trainers,
    "two_val_loaders": two_val_loaders,
    "peeks": peeks,
    "copies": copies,
    "edited": edited,
    "evaluations": evaluations,
}
RESUMES = {
    # flow: (first leg paged, second leg paged)
    "resume_plain_plain": (False, False),
    "resume_plain_paged": (False, True),
    "resume_paged_plain": (True, False),
    "resume_paged_paged": (True, True),
}
