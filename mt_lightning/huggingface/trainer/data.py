"""Datasets as DataLoaders, in the order and with the columns that Hugging Face's Trainer takes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from transformers import TrainingArguments
from transformers.trainer_utils import RemoveColumnsCollator
from transformers.utils import logging as transformers_logging
from typing_extensions import override

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.adapters import base_of
from mt_lightning.huggingface.data.kinds import (
    RAW_COLUMNS,
    UNREAD_MESSAGE,
    kind_of,
    unread_columns,
    unread_words,
)
from mt_lightning.huggingface.trainer.packing import is_packing, packed
from mt_lightning.huggingface.trainer.raw import RowCollator
from mt_lightning.huggingface.trainer.sft import TextCollator, columns, is_sft

log = logging.getLogger(__name__)
# Its verbosity is log_level of the arguments.
_theirs = transformers_logging.get_logger("transformers.trainer")

NUM_ITEMS = "num_items_in_batch"
"""Key of a batch: labels of all batches of its optimizer step."""


def num_samples(dataset: Any) -> int | None:
    """Return the length of a dataset, None where it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def check_dataset(name: str, dataset: Any) -> None:
    """Raise ConfigError for what no DataLoader can read, and for nothing to read."""
    if isinstance(dataset, (str, bytes, Mapping, nn.Module)) or not (
        hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    ):
        raise ConfigError(
            f"{name} is a {type(dataset).__name__}; give a dataset: torch's or Hugging Face's, "
            "with or without a length, or a list of dicts."
        )
    if num_samples(dataset) == 0:
        raise ConfigError(f"{name} is empty: it has 0 samples. Give one with samples in it.")


class LoaderMaker:
    """Makes the loaders of one Trainer.

    Args:
        args: Their settings.
        model: Its forward says which columns are taken.
        collate: Makes a batch of a list of samples.
        label_names: Columns that are taken besides.
        input_name: The column whose length is that of a sample.
    """

    def __init__(
        self,
        args: TrainingArguments,
        model: nn.Module,
        collate: Callable[[list[Any]], Any],
        label_names: list[str],
        input_name: str,
    ) -> None:
        self._args = args
        self._model = model
        self._collate = collate
        self._input_name = input_name
        taken = list(inspect.signature(base_of(model).forward).parameters)
        self._taken = taken
        self._columns = [*taken, *sorted({"label", "label_ids", *label_names})]
        if isinstance(collate, RowCollator):
            self._columns += RAW_COLUMNS
        if is_sft(args):
            self._columns += columns(args)

    def training(self, dataset: Any) -> DataLoader[Any]:
        """Return the loader of the training data.

        Raises:
            ConfigError: No column fits the model, or no batch comes out.
        """
        args = self._args
        dataset = self._packed("train_dataset", dataset, evaluates=False)
        sampler: Sampler[int] | None = None
        if not isinstance(dataset, IterableDataset):
            sampler = self._train_sampler(dataset)
        loader = self._loader("train_dataset", dataset, args.train_batch_size, sampler)
        if sampler is not None and len(loader) == 0:
            raise ConfigError(
                f"train_dataset has {num_samples(dataset)} samples, fewer than a batch of "
                f"{args.train_batch_size}, and dataloader_drop_last=True drops them. Set it to "
                "False, or a smaller per_device_train_batch_size."
            )
        return loader

    def evaluation(self, dataset: Any, name: str = "eval_dataset") -> DataLoader[Any]:
        """Return the loader of data to evaluate on, in their order."""
        dataset = self._packed(name, dataset, evaluates=True)
        iterable = isinstance(dataset, IterableDataset) or num_samples(dataset) is None
        sampler = None if iterable else self._eval_sampler(dataset)
        return self._loader(name, dataset, self._args.eval_batch_size, sampler)

    def _packed(self, name: str, dataset: Any, *, evaluates: bool) -> Any:
        if not is_packing(self._args, evaluates=evaluates):
            return dataset
        if not isinstance(self._collate, TextCollator):
            raise ConfigError(
                "packing=True, and a data_collator is given, which does not know where samples of "
                "a row begin. Leave it out, or give mt.TextDataModule's rows and collator."
            )
        return packed(name, dataset, self._args, self._collate.tokenizer)

    def _train_sampler(self, dataset: Any) -> Sampler[int]:
        strategy = getattr(self._args, "train_sampling_strategy", "random")
        if num_samples(dataset) is None:
            raise ConfigError(
                f"train_dataset is a {type(dataset).__name__} without a length; derive it from "
                "torch.utils.data.IterableDataset, or give it __len__."
            )
        if strategy == "sequential":
            return SequentialSampler(dataset)
        if strategy == "group_by_length":
            batch = self._args.train_batch_size * self._args.gradient_accumulation_steps
            return self._by_length(dataset, batch, None)
        data_seed = self._args.data_seed
        return SeededSampler(dataset, self._args.seed if data_seed is None else data_seed)

    def _eval_sampler(self, dataset: Any) -> Sampler[int]:
        if getattr(self._args, "train_sampling_strategy", "random") != "group_by_length":
            return SequentialSampler(dataset)
        data_seed = self._args.data_seed
        seed = self._args.seed if data_seed is None else data_seed
        generator = torch.Generator().manual_seed(seed)
        return self._by_length(dataset, self._args.eval_batch_size, generator)

    def _by_length(
        self, dataset: Any, batch_size: int, generator: torch.Generator | None
    ) -> Sampler[int]:
        from transformers.trainer_pt_utils import LengthGroupedSampler

        column = self._args.length_column_name
        known = column in (getattr(dataset, "column_names", None) or ())
        return LengthGroupedSampler(
            batch_size,
            dataset=dataset,
            lengths=list(dataset[column]) if known else None,
            model_input_name=self._input_name,
            generator=generator,
        )

    def _loader(
        self, name: str, dataset: Any, batch_size: int, sampler: Sampler[int] | None
    ) -> DataLoader[Any]:
        args, collate = self._args, self._collate
        if isinstance(collate, (RowCollator, TextCollator)):
            _tell_unread(name, dataset, getattr(args, "dataset_text_field", "text"))
        if args.remove_unused_columns:
            if sampler is not None and hasattr(dataset, "remove_columns"):
                dataset = self._without_unused(name, dataset)
            else:
                collate = RemoveColumnsCollator(
                    collate, self._columns, _theirs, type(self._model).__name__, name
                )
        settings: dict[str, Any] = {
            "num_workers": args.dataloader_num_workers,
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        for name, field in (
            ("multiprocessing_context", "dataloader_multiprocessing_context"),
            ("in_order", "dataloader_in_order"),
        ):
            if hasattr(args, field):
                settings[name] = getattr(args, field)
        if sampler is not None:
            settings |= {"sampler": sampler, "drop_last": args.dataloader_drop_last}
        return DataLoader(dataset, batch_size=batch_size, collate_fn=collate, **settings)

    def _without_unused(self, name: str, dataset: Any) -> Any:
        names = list(dataset.column_names)
        if isinstance(self._collate, RowCollator) and not set(names) & set(self._taken):
            kind_of(names)  # says which column is missing
        unused = [column for column in names if column not in self._columns]
        if len(unused) == len(names):
            raise ConfigError(
                f"no column of {name} ({', '.join(names)}) is one that the forward of "
                f"{type(self._model).__name__} takes ({', '.join(self._columns)}). Tokenise the "
                "data, or set remove_unused_columns=False."
            )
        if unused:
            _theirs.info("columns of %s that the model does not take: %s", name, ", ".join(unused))
        return dataset.remove_columns(unused)


def _tell_unread(name: str, dataset: Any, text_field: str) -> None:
    """Warn of columns of texts and conversations that no token comes from."""
    names = getattr(dataset, "column_names", None)
    if names is None and num_samples(dataset) and hasattr(dataset, "__getitem__"):
        first = dataset[0]
        names = list(first) if isinstance(first, Mapping) else None
    ours = ["text" if each == text_field else each for each in names or ()]
    if "input_ids" in ours or not set(ours) & set(RAW_COLUMNS):
        return
    kind = kind_of(ours)
    if unread := unread_columns(ours, kind):
        log.warning(UNREAD_MESSAGE, *unread_words(name, unread, kind))


class SeededSampler(RandomSampler):
    """A random order that seed and epoch decide, as accelerate's seedable sampler has it.

    Args:
        dataset: What is ordered; it has a length.
        seed: Of epoch 0; epoch n has `seed + n`.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        super().__init__(dataset, generator=torch.Generator())
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; Lightning calls it."""
        self._epoch = epoch

    @override
    def __iter__(self) -> Iterator[int]:
        """Yield every index once."""
        assert self.generator is not None
        self.generator.manual_seed(self._seed + self._epoch)
        yield from super().__iter__()


class WindowLoader:
    """Takes the batches of an optimizer step together, so that each can be told how many items.

    A loss that is a mean over the labels of all batches of a step needs to know their number
    before the first of them runs.

    Args:
        loader: Gives the batches.
        num_batches: Batches of a step; the last one of an epoch may have fewer.
        count: Returns the number of items of the batches of a step.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        num_batches: int,
        count: Callable[[list[Any]], Tensor | int | None],
    ) -> None:
        self._loader = loader
        self._num_batches = num_batches
        self._count = count
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.sampler = loader.sampler
        self.batch_sampler = loader.batch_sampler
        self.generator = loader.generator
        self.persistent_workers = loader.persistent_workers
        self.num_workers = loader.num_workers

    def __len__(self) -> int:
        """Return the number of batches; TypeError where nobody knows it."""
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches with the key `num_items_in_batch`, where items can be counted."""
        batches = iter(self._loader)
        while window := list(islice(batches, self._num_batches)):
            for batch in window:
                if not isinstance(batch, Mapping):
                    raise ConfigError(
                        f"a training batch is a {type(batch).__name__}; mt.Trainer needs mappings "
                        "from the names of the model's inputs to tensors. Give a data_collator "
                        "that makes them."
                    )
            count = self._count(window)
            scale = len(window)
            for batch in window:
                yield {**batch, NUM_ITEMS: (count, scale)}
