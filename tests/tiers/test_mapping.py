from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers import mapping as mapping_room
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.mapping import PrivateMapping, pagemap_is_trustworthy
from mt_lightning.tiers.store import FileStore

NAME = "p00000.weight.0"
PAGE = 4096
Fill = Callable[..., Frame]


@pytest.fixture(params=["page map", "comparison"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FileStore:
    if request.param == "comparison":
        monkeypatch.setattr(mapping_room, "pagemap_is_trustworthy", lambda: False)
    elif not pagemap_is_trustworthy():
        pytest.skip("no page map on this kernel")
    return FileStore([tmp_path])


def stored(store: FileStore, frame: Frame) -> None:
    store.create(NAME, frame.nbytes)
    store.write(NAME, 0, frame.memory)


def test_written_ranges(store: FileStore, filled: Fill) -> None:
    frame = Frame(20 * PAGE)
    frame.tensor.view(torch.float32).fill_(1.5)
    stored(store, frame)
    mapping = store.map_private(NAME, 0, frame.nbytes)
    first = mapping.tensor(0, 2 * PAGE).view(torch.float32)
    second = mapping.tensor(8 * PAGE + 64, 4 * PAGE).view(torch.float32)
    third = mapping.tensor(16 * PAGE, 4 * PAGE).view(torch.float32)
    assert first.sum() + second.sum() + third.sum() > 0
    assert mapping.written_ranges() == []
    parameter = torch.nn.Parameter(first, requires_grad=False)
    parameter.data.mul_(2)
    assert mapping.written_ranges() == [(0, 2 * PAGE)]
    second.numpy()[0] = 7
    third[-1] = 8
    assert mapping.written_ranges() == [(0, 2 * PAGE), (8 * PAGE, 9 * PAGE), (19 * PAGE, 20 * PAGE)]
    back = Frame(frame.nbytes)
    store.read(NAME, 0, back.memory)
    assert back.memory == frame.memory


def test_ranges_are_relative_to_a_mapping_in_the_middle(store: FileStore, filled: Fill) -> None:
    stored(store, filled(16 * PAGE))
    mapping = store.map_private(NAME, 5 * PAGE, 4 * PAGE)
    view = mapping.tensor(0, 4 * PAGE)
    assert torch.equal(view, filled(16 * PAGE).tensor[5 * PAGE : 9 * PAGE])
    view[PAGE : 3 * PAGE] += 1
    assert mapping.written_ranges() == [(PAGE, 3 * PAGE)]


def test_ranges_across_the_chunks_they_are_read_in(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, filled: Fill
) -> None:
    monkeypatch.setattr(mapping_room, "_ENTRIES_PER_READ", 4)
    stored(store, filled(BLOCK_BYTES + 4 * PAGE))
    mapping = store.map_private(NAME, 0, BLOCK_BYTES + 4 * PAGE)
    view = mapping.tensor(0, mapping.nbytes)
    view[BLOCK_BYTES - 2 * PAGE : BLOCK_BYTES + 2 * PAGE] += 1
    assert mapping.written_ranges() == [(BLOCK_BYTES - 2 * PAGE, BLOCK_BYTES + 2 * PAGE)]


def test_written_bytes_can_be_read_back_after_replace(store: FileStore, filled: Fill) -> None:
    stored(store, filled(4 * PAGE))
    mapping = store.map_private(NAME, 0, 4 * PAGE)
    view = mapping.tensor(0, 4 * PAGE)
    view[0] += 1
    store.replace(NAME)
    assert mapping.written_ranges() == [(0, PAGE)]
    assert torch.equal(view[PAGE:], filled(4 * PAGE).tensor[PAGE:])


def test_copy_in_memory_has_the_same_interface() -> None:
    data = np.random.default_rng(0).bytes(3 * PAGE)
    mapping = PrivateMapping.of_bytes(data)
    assert mapping.written_ranges() == []
    view = mapping.tensor(PAGE, PAGE)
    view[5] += 1
    assert mapping.written_ranges() == [(PAGE, 2 * PAGE)]
    assert mapping.alive
    del view
    assert not mapping.alive
    assert mapping.tensor(0, 0).numel() == 0


def test_storage_covers_just_the_range(tmp_path: Path, filled: Fill) -> None:
    store = FileStore([tmp_path])
    stored(store, filled(4 * PAGE))
    view = store.map_private(NAME, 0, 4 * PAGE).tensor(64, 128)
    assert view.untyped_storage().nbytes() == 128
    assert view.storage_offset() == 0
    assert torch.equal(view, filled(4 * PAGE).tensor[64:192])


def test_mapping_is_unmapped_with_its_last_tensor(tmp_path: Path, filled: Fill) -> None:
    def is_listed() -> bool:
        with open("/proc/self/maps") as maps:
            return str(store.path_of(NAME)) in maps.read()

    store = FileStore([tmp_path])
    stored(store, filled(4 * PAGE))
    view = store.map_private(NAME, 0, 4 * PAGE).tensor(0, PAGE)
    gc.collect()
    assert is_listed()
    assert torch.equal(view, filled(4 * PAGE).tensor[:PAGE])
    del view
    assert not is_listed()


def test_a_forked_child_may_drop_what_its_parent_maps(tmp_path: Path, filled: Fill) -> None:
    frame = filled(4 * PAGE)
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        mapping_ref = frame._mapping
        del frame.tensor, frame._storage, frame.memory
        os._exit(0 if mapping_ref() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert frame.memory == filled(4 * PAGE).memory
