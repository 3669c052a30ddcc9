"""`mt.Trainer` trains as Hugging Face's Trainer does: losses, log, order of the data."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments

import mt_lightning as mt
from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import session
from mt_lightning.huggingface.loading import smollm2_directory
from tests.huggingface.trainer_cases import arguments, gpt2, llama, losses, samples


@pytest.fixture(autouse=True)
def session_of_its_own() -> Iterator[None]:
    yield
    session.reset()


def test_the_snippet_runs_as_written(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    run_snippet(tmp_path / "model", samples(128), tmp_path)


@pytest.mark.slow
def test_the_snippet_runs_on_smollm2(tmp_path: Path) -> None:
    run_snippet(smollm2_directory(), samples(128, length=8), tmp_path)


def run_snippet(path: Path, ds: Any, folder: Path) -> None:
    mt.init(offload_dir=folder / "pages", max_vram_gb=80, optimizer_compression=True)
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    before = model.get_input_embeddings().weight.detach().clone()
    output = mt.Trainer(
        model=model,
        train_dataset=ds,
        args=TrainingArguments(
            per_device_train_batch_size=1,
            gradient_accumulation_steps=128,
            output_dir=str(folder / "out"),
            num_train_epochs=1,
            disable_tqdm=True,
        ),
    ).train()
    assert output.global_step == len(ds) // 128
    assert output.training_loss == pytest.approx(output.metrics["train_loss"])
    assert not torch.equal(before, model.get_input_embeddings().weight)
    saved = AutoModelForCausalLM.from_pretrained(folder / f"out/checkpoint-{output.global_step}")
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), saved.parameters(), strict=True)
    )


SMOOTHED = {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0, "optim": "sgd"}
LINEAR = {"lr_scheduler_type": "linear", "warmup_steps": 0.2, "logging_steps": 3}


@pytest.mark.parametrize(
    ("make", "settings", "options"),
    [
        (llama, {}, {}),
        (llama, {**SMOOTHED, **LINEAR}, {}),
        # Dropout and tied weights, under a budget of a fraction of the model, unit by unit.
        (gpt2, {}, {"layer_major": True, "max_ram_gb": 0.0008}),
    ],
    ids=["defaults", "smoothed and linear", "small budget"],
)
def test_losses_are_those_of_hugging_face(
    make: Callable[[], PreTrainedModel],
    settings: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    # 21 samples: a short batch and a short window end every epoch.
    data = samples(21)
    theirs = transformers.Trainer(
        model=make(), train_dataset=data, args=arguments(tmp_path / "theirs", **settings)
    )
    their_output = theirs.train()
    mt.init(offload_dir=tmp_path / "pages", **options)
    ours = mt.Trainer(
        model=make(), train_dataset=data, args=arguments(tmp_path / "ours", **settings)
    )
    output = ours.train()
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-5)
    assert output.training_loss == pytest.approx(their_output.training_loss, abs=1e-5)
    assert ours.state.total_flos == theirs.state.total_flos
    their_log, log = theirs.state.log_history[:-1], ours.state.log_history[:-1]
    for mine, other in zip(log, their_log, strict=True):
        clips = bool(theirs.args.max_grad_norm)
        assert mine.keys() == other.keys() - (set() if clips else {"grad_norm"})
        assert mine == pytest.approx({key: other[key] for key in mine}, abs=1e-5)
    for name, param in ours.model.named_parameters():
        torch.testing.assert_close(param, theirs.model.get_parameter(name), atol=1e-6, rtol=1e-5)


class Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class Columns(Rows):
    """Has what a Dataset of Hugging Face has."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__([{**row, "text": "left out"} for row in rows])

    @property
    def column_names(self) -> list[str]:
        return list(self.rows[0])

    def remove_columns(self, names: list[str]) -> Rows:
        return Rows([{k: v for k, v in row.items() if k not in names} for row in self.rows])


@pytest.mark.parametrize("kind", [Rows, Columns, Stream])
def test_every_kind_of_dataset_gives_the_same_batches(
    kind: Callable[[list[Any]], Any], tmp_path: Path
) -> None:
    rows = [{**row, "number": 1.0} for row in samples(16)]  # a column that no model takes
    results = []
    for name, make in (("theirs", transformers.Trainer), ("ours", mt.Trainer)):
        args = arguments(tmp_path / name, max_steps=3, data_seed=7)
        trainer = make(model=llama(), train_dataset=kind(rows), args=args)
        trainer.train()
        results.append(losses(trainer))
    assert results[1] == pytest.approx(results[0], abs=1e-5)
    assert len(results[0]) == 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("rows", "epoch"), [([], 1), (iter(samples(8)), 2)], ids=["empty", "used up"]
)
def test_a_stream_that_gives_no_batch_is_refused(rows: Any, epoch: int, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=30)
    trainer = mt.Trainer(model=llama(), train_dataset=Stream(rows), args=args)
    with pytest.raises(ConfigError, match=f"train_dataset gave no batch in epoch {epoch}, after"):
        trainer.train()


def test_the_same_cells_can_be_run_again(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        mt.init(offload_dir=tmp_path / "pages", max_ram_gb=0.5)
        trainer = mt.Trainer(
            model=llama(), train_dataset=samples(16), args=arguments(tmp_path, max_steps=3)
        )
        trainer.train()
        results.append(losses(trainer))
        gc.collect()
    again = trainer.train()  # from the weights that are there, as transformers does
    assert results[0] == results[1]
    assert again.global_step == 3
    assert losses(trainer)[0] < results[0][0]


def refused(match: str, **given: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        mt.Trainer(**given)


def test_bad_input_is_refused_by_name(tmp_path: Path) -> None:
    model, args = llama(), arguments(tmp_path)
    with pytest.raises(ConfigError, match="args is a list; the arguments are"):
        mt.Trainer(model, samples(2))  # type: ignore[arg-type]
    refused("model is a str; give the module", model="smollm2", args=args)
    refused("no option 'train_data'; did you mean 'train_dataset'", model=model, train_data=[])
    refused("does not take model_init: call it", model_init=llama)
    refused("train_dataset is empty", model=model, args=args, train_dataset=[])
    refused("train_dataset is a str", model=model, args=args, train_dataset="data.json")
    refused(
        "eval_strategy='steps', and there is no",
        model=model,
        args=arguments(tmp_path, eval_strategy="steps"),
    )
    with pytest.raises(ConfigError, match="give mt.Trainer"):
        mt.Trainer(model, args).train()
    with pytest.raises(ConfigError, match="Set max_steps"):
        mt.Trainer(
            model, arguments(tmp_path, max_steps=-1), train_dataset=Stream(samples(2))
        ).train()
    with pytest.raises(ConfigError, match=r"sequences of 80 tokens.*takes 64.*max_position"):
        mt.Trainer(model, args, train_dataset=samples(8, length=80)).train()
    without_labels = [{"input_ids": row["input_ids"]} for row in samples(8)]
    with pytest.raises(ConfigError, match="returned no loss.*DataCollatorForLanguageModeling"):
        mt.Trainer(model, args, train_dataset=without_labels).train()
    with pytest.raises(ConfigError, match="no option 'offload_dirr'; did you mean 'offload_dir'"):
        mt.init(offload_dirr=tmp_path)
    with pytest.raises(ConfigError, match="max_vram_gb=.*: give a positive number of GiB"):
        mt.init(80, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="offload_dir=80: give a directory"):
        mt.init(80)  # type: ignore[arg-type]


def test_without_accelerate_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args, find_spec = arguments(tmp_path), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "accelerate" else find_spec(name)
    )
    refused(r"needs accelerate.*pip install 'mt-lightning\[trainer\]'", model=llama(), args=args)


class Quantised(torch.Tensor):
    pass


def test_models_that_cannot_be_paged_are_refused(tmp_path: Path) -> None:
    packed = llama()
    packed.lm_head.weight = torch.nn.Parameter(torch.ones(3).as_subclass(Quantised))
    refused("lm_head.weight is a Quantised, no plain tensor", model=packed)
    spread = llama()
    spread.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    refused("a device_map that spreads it", model=spread)
    frozen = llama().requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of LlamaForCausalLM is trained"):
        mt.Trainer(frozen, arguments(tmp_path), train_dataset=samples(8)).train()
