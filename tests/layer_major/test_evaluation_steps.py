"""Steps of every kind: generation, random numbers, metrics, state on modules, errors."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from transformers import PreTrainedModel

from mt_lightning import MegaTrainStrategy
from mt_lightning.engine.window.forward import ForwardWindow, Step
from mt_lightning.huggingface import CausalLMModule

from . import networks as nets
from .evaluate import Batch, Ends, Evaluated, assert_equal, evaluate, loader, paged
from .test_evaluation import VARIED, check, groups, quiet

__all__ = ["groups", "quiet"]

pytestmark = pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")

EVEN = nets.tokens(9, [12])
NUM_TOKENS = 5


# -- generation ---------------------------------------------------------------------------------


class Generating(Evaluated):
    """Generates tokens in prediction, and scores and generates in validation."""

    measures_last = False
    sampling = False
    end: int | None = None

    def generate(self, batch: Batch) -> Tensor:
        assert isinstance(self.network, PreTrainedModel)
        ids = batch["input_ids"]
        return self.network.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=self.sampling,
            use_cache=True,
            eos_token_id=self.end,
            pad_token_id=0,
        )

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.generate(batch)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        found = super().validation_step(batch, batch_idx)
        tokens = self.generate(batch)
        self.log("new", float(tokens[:, -1].sum()), on_step=True, on_epoch=True)
        return {**found, "tokens": tokens}


class Sampling(Generating):
    sampling = True


class Ending(Generating):
    """Some batches meet the end after fewer tokens than others."""

    end = 0


@pytest.mark.parametrize(
    ("model", "subject"),
    [
        ("llama", Generating),
        ("llama", Sampling),
        ("gpt2", Sampling),
        ("qwen3_moe", Generating),
        pytest.param("gpt2", Generating, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", Sampling, marks=pytest.mark.slow),
    ],
)
def test_generation(
    model: str, subject: type[Evaluated], tmp_path: Path, groups: list[int]
) -> None:
    make = nets.zoo_model(model)
    batches = VARIED if model == "llama" else EVEN[:4]
    check(tmp_path, "predict", make, lambda: loader(batches), subject=subject)
    assert max(groups) > 1


def test_a_step_that_scores_and_then_generates(tmp_path: Path, groups: list[int]) -> None:
    check(tmp_path, "validate", nets.zoo_model("llama"), lambda: loader(VARIED), subject=Generating)
    assert max(groups) > 1


def test_results_and_logs_keep_their_order_where_steps_end_in_another(
    tmp_path: Path,
    groups: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, batches = nets.zoo_model("llama"), nets.tokens(9, [9, 16, 12, 5], rows=1)
    long = evaluate(tmp_path, "predict", make, loader(batches), None, subject=Generating)
    monkeypatch.setattr(Ending, "end", int(long["result"][3][0, -3]))
    for kind in ("validate", "predict"):
        expected = evaluate(tmp_path, kind, make, loader(batches), None, subject=Ending)
        strategy = paged(make(), True, 0.9)
        found = evaluate(tmp_path, kind, make, loader(batches), strategy, subject=Ending)
        if kind == "validate":
            # What a step appends itself comes when it ends.
            for outcome in (expected, found):
                outcome["own"]["losses"].sort()
        assert_equal(expected, found)
    lengths = [tokens.shape[1] for tokens in expected["result"]]
    assert lengths != [tokens.shape[1] for tokens in long["result"]]
    assert max(groups) > 1
    assert "in the order in which steps end" in caplog.text


def test_the_weights_are_read_once_per_token_for_all_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = nets.zoo_model("llama")
    read = {}
    for layer_major in (False, True):
        strategy = paged(make(), layer_major)
        evaluate(tmp_path, "predict", make, loader(EVEN), strategy, subject=Generating)
        assert strategy.engine is not None
        read[layer_major] = strategy.engine.stats.bytes_read
    # One batch alone, then eight together: two sweeps per token. What the eight hold between units
    # takes room in which the usual order keeps weights from one token to the next.
    weight_bytes = sum(param.nbytes for param in make().parameters())
    assert read[True] <= 2 * NUM_TOKENS * weight_bytes
    assert read[True] <= read[False] / 4
    told = [r.message for r in caplog.records if "again and again, as generate() does" in r.message]
    assert len(told) == 2
    assert "each token reads 0.001 GiB of them, for each batch" in told[0]
    assert "once for all batches that run together" in told[1]


@pytest.mark.parametrize("subject", [Evaluated, Generating])
def test_what_batches_hold_is_what_was_reserved(
    subject: type[Evaluated], tmp_path: Path, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states, masks, caches of keys and values: counted for every batch here."""
    windows: list[ForwardWindow] = []
    start = ForwardWindow.start

    def counted(self: ForwardWindow, run: Any, view: Any, *, count: bool) -> Step:
        windows.append(self)
        return start(self, run, view, count=True)

    monkeypatch.setattr(ForwardWindow, "start", counted)
    make, batches = nets.zoo_model("llama"), nets.tokens(13, [9, 16, 12, 5, 7])
    strategy = paged(make(), True, 0.8)
    evaluate(tmp_path, "predict", make, loader(batches), strategy, subject=subject)
    assert max(groups) > 1
    assert windows[0].uncounted_bytes == 0


# -- random numbers -----------------------------------------------------------------------------


class Drawing(Evaluated):
    """Draws before, between and after units; how much, `count` says."""

    def count(self, batch_idx: int) -> int:
        return 5

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        before = torch.rand(3)
        loss = self.network(**batch).loss * torch.rand(self.count(batch_idx)).mean()
        self.log("drawn", before.sum() + loss + torch.rand(1).sum(), on_step=True)
        return {"loss": loss, "batch_idx": batch_idx}

    def on_validation_batch_end(self, *_: Any) -> None:
        torch.rand(2)


class DrawingMore(Drawing):
    def count(self, batch_idx: int) -> int:
        return 5 + batch_idx % 3


def test_random_numbers_are_those_of_the_usual_order(tmp_path: Path, groups: list[int]) -> None:
    check(tmp_path, "validate", nets.Tiny, lambda: loader(VARIED), subject=Drawing)
    assert max(groups) > 1


def test_other_random_numbers_are_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = paged(nets.Tiny())
    evaluate(tmp_path, "validate", nets.Tiny, loader(VARIED), strategy, subject=DrawingMore)
    assert "draws different numbers of random numbers" in caplog.text


# -- state --------------------------------------------------------------------------------------


class Listed(Metric):
    """Keeps what it is given, in order."""

    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, value: Tensor) -> None:
        self.values.append(value.detach().reshape(1))

    def compute(self) -> Tensor:
        scale = torch.arange(1, len(self.values) + 1)
        return (torch.cat(self.values) * scale).sum()


class Measuring(Evaluated):
    """Updates metrics in the middle of a step, in every way."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.listed = Listed()
        self.many = MetricCollection({"a": MeanMetric(), "b": SumMetric()}, prefix="many_")

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        for _ in range(1 + batch_idx % 2):
            loss = self.network(**batch).loss
        self.listed(loss)
        self.many.update(loss)
        self.log("listed", self.listed, on_step=True, on_epoch=True)
        self.log_dict(self.many, on_step=False, on_epoch=True)
        second = self.network(**batch).loss
        self.log("second", second, on_step=True, on_epoch=True)
        return super().validation_step(batch, batch_idx)


def test_metrics_are_updated_in_the_order_of_batches(tmp_path: Path, groups: list[int]) -> None:
    check(tmp_path, "validate", nets.Tiny, lambda: loader(VARIED), subject=Measuring)
    assert max(groups) > 1


class Collecting(Evaluated):
    """Hooks collect what blocks make; the step reads it in the end, in one of two ways."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.features: list[Tensor] = []
        self.latest: dict[str, Tensor] = {}
        self.found: list[Any] = []
        for name, block in network.blocks.named_children():  # type: ignore[union-attr]
            block.register_forward_hook(functools.partial(self._collect, name))

    def _collect(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features.append(output)
        self.latest[name] = output

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        result = super().validation_step(batch, batch_idx)
        self.found.append([each.mean() for each in (*self.features, *self.latest.values())])
        self.features.clear()
        return result


def test_what_hooks_collect_is_of_one_batch(tmp_path: Path, groups: list[int]) -> None:
    check(tmp_path, "validate", nets.Tiny, lambda: loader(VARIED), subject=Collecting)
    assert max(groups) > 1


class Hooking(Evaluated):
    """Registers hooks for the time of a pass; one batch in three leaves none."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        caught: list[Tensor] = []

        def catch(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            caught.append(output.mean())
            return output * (1 + batch_idx)

        blocks = self.network.blocks if batch_idx % 3 else []
        handles = [block.register_forward_hook(catch) for block in blocks]  # type: ignore[union-attr]
        result = super().validation_step(batch, batch_idx)
        for handle in handles:
            handle.remove()
        self.log("caught", torch.stack([*caught, torch.zeros(())]).sum(), on_step=True)
        return {**result, "caught": caught}


def test_hooks_for_the_time_of_a_pass_are_of_one_batch(tmp_path: Path, groups: list[int]) -> None:
    check(tmp_path, "validate", nets.Tiny, lambda: loader(VARIED), subject=Hooking)
    assert max(groups) > 1


class Attacking(Evaluated):
    """Moves the input of the blocks along a gradient, and looks at the loss there."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        with torch.enable_grad():
            hidden = self.network.embed(batch["input_ids"]).detach().requires_grad_()  # type: ignore[operator]
            x = hidden
            for block in self.network.blocks:  # type: ignore[union-attr]
                x = block(x)
            (grad,) = torch.autograd.grad(x.square().mean(), hidden)
        moved = hidden.detach() + 0.1 * grad.sign()
        for block in self.network.blocks:  # type: ignore[union-attr]
            moved = block(moved)
        self.log("moved", moved.square().mean(), on_step=True, on_epoch=True)
        return super().validation_step(batch, batch_idx)


def test_a_step_that_differentiates(tmp_path: Path, groups: list[int]) -> None:
    settings = {"subject": Attacking, "inference_mode": False}
    check(tmp_path, "validate", nets.Tiny, lambda: loader(VARIED), **settings)
    assert max(groups) > 1


class Carrying(Evaluated):
    """Each batch begins with what the one before it has left there, between units."""

    length = 0

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        network.blocks[1].register_forward_pre_hook(self._carry)  # type: ignore[union-attr,index]

    def _carry(self, block: nn.Module, args: tuple[Tensor, ...]) -> Any:
        self.length = max(self.length, args[0].shape[1])
        return (args[0] * self.length,)


def test_numbers_carried_from_batch_to_batch_keep_the_usual_order(
    tmp_path: Path, groups: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mt_lightning")
    settings = {"subject": Carrying, "layer_major": "auto"}
    check(tmp_path, "validate", nets.Tiny, lambda: loader(VARIED), **settings)
    assert groups == [1]
    assert "validation_step changes length between units" in caplog.text


# -- errors -------------------------------------------------------------------------------------


class Failing(Evaluated):
    """The sixth batch fails between two units."""

    error: type[BaseException] = RuntimeError
    now = 0

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        network.blocks[1].register_forward_pre_hook(self._fail)  # type: ignore[union-attr,index]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.now = batch_idx
        return super().validation_step(batch, batch_idx)

    def _fail(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self.now == 5:
            raise self.error("batch 5")


class Stopping(Failing):
    error = StopIteration


class Signal(BaseException):
    """Comes from outside, as Ctrl-C does."""


class Interrupted(Failing):
    error = Signal


class Left(pl.Callback):
    """What is there when an exception has ended the loop."""

    seen: Any = None
    pins = 0

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        progress = trainer.validate_loop.batch_progress
        self.seen = progress.state_dict(), module.num_steps, module.losses, module.begun
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        assert gc.isenabled()
        if isinstance(trainer.strategy, MegaTrainStrategy):
            assert trainer.strategy.engine is not None
            run = trainer.strategy.engine.live.run
            resident = set(run.build.resident)
            entries = [e for e in run.pool.entries() if e.page.index not in resident]
            self.pins = sum(entry.pins for entry in entries)
            assert not run.budget.by_purpose["waiting steps"]
            assert trainer.strategy.engine.live.window is None
            assert "validation_step" not in vars(trainer.strategy)
            assert isinstance(module.mean.update, type(MeanMetric().update))
            assert "log" not in vars(trainer.validate_loop._results)


@pytest.mark.parametrize("subject", [Failing, Interrupted])
def test_an_error_comes_at_its_batch_and_leaves_nothing_behind(
    subject: type[Evaluated], tmp_path: Path, groups: list[int]
) -> None:
    seen = []
    for strategy in (None, paged(nets.Tiny())):
        left = Left()
        with pytest.raises(subject.error, match="batch 5"):  # type: ignore[attr-defined]
            evaluate(
                tmp_path,
                "validate",
                nets.Tiny,
                loader(VARIED),
                strategy,
                subject=subject,
                callbacks=(left,),
            )
        assert not left.pins
        seen.append(left.seen)
    assert groups == [1, 8]
    # All batches before it have ended; those after it have begun, and nothing else.
    (progress, *expected), (found_progress, *found) = seen
    if subject is Failing:
        assert_equal(progress, found_progress)
        assert_equal(expected[:2], found[:2])
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Step and not each.dead]


def test_a_step_that_raises_stop_iteration_ends_the_loop(tmp_path: Path) -> None:
    check(tmp_path, "validate", nets.Tiny, lambda: loader(VARIED[:6]), subject=Stopping)
    expected = evaluate(tmp_path, "test", nets.Tiny, loader(VARIED), None, subject=Stopping)
    strategy = paged(nets.Tiny())
    found = evaluate(tmp_path, "test", nets.Tiny, loader(VARIED), strategy, subject=Stopping)
    assert_equal(expected["result"], found["result"])
    assert_equal(expected["ends"], found["ends"])


class Broken(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        yield from VARIED[:5]
        raise OSError("batch 5 cannot be read")


@pytest.mark.parametrize("kind", ["validate", "predict"])
def test_a_loader_that_fails_does_so_behind_its_batches(
    kind: str, tmp_path: Path, groups: list[int]
) -> None:
    seen = []
    for strategy in (None, paged(nets.Tiny())):
        ends = Ends()
        with pytest.raises(OSError, match="cannot be read"):
            evaluate(
                tmp_path,
                kind,
                nets.Tiny,
                DataLoader(Broken(), batch_size=None),
                strategy,
                callbacks=(ends,),
            )
        seen.append(ends.seen)
    assert len(seen[0]) == 4
    assert_equal(*seen)
    assert groups == [1, 3]


# -- a ready module -----------------------------------------------------------------------------


class Continuing(CausalLMModule):
    """Goes on with prompts of several lengths."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model.generate(  # type: ignore[operator]
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=4,
            do_sample=True,
            top_k=20,
            num_return_sequences=2,
            pad_token_id=0,
            eos_token_id=None,
        )


def padded(batches: list[Batch]) -> list[Batch]:
    """Let the rows of each batch begin at different places."""
    for number, batch in enumerate(batches):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, : 1 + number % 3] = 0
        del batch["labels"]
    return batches


def test_a_causal_language_model(tmp_path: Path, groups: list[int]) -> None:
    batches = padded(nets.tokens(9, [9, 16, 12, 5]))
    found = []
    for is_paged in (False, True):
        module = Continuing(nets.zoo_model("llama")())
        strategy = paged(module.model, "auto") if is_paged else "auto"
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=strategy,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            default_root_dir=tmp_path,
        )
        torch.manual_seed(3)
        logged = trainer.validate(module, loader(batches), verbose=False)
        logged += trainer.test(module, loader(batches), verbose=False)
        tokens = trainer.predict(module, loader(batches))
        found.append({"logged": logged, "tokens": tokens, "rng": torch.get_rng_state()})
    assert_equal(*found)
    assert groups[:4] == [1, 8, 1, 8]
    assert sum(groups) == 3 * 9
    assert max(groups[4:]) > 1
