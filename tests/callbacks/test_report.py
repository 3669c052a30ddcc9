"""PagingReport: one page that needs nothing beside it, true to the run."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from mt_lightning import PagingReport, PagingTrace
from mt_lightning.callbacks.tables import format_bytes
from mt_lightning.errors import StorageError
from mt_lightning.tiers.filesystem import files_bytes
from mt_lightning.tiers.spans import listening

Fit = Callable[..., Trainer]

PLOTS = ["disk", "loss", "memory", "speed", "time", "timeline", "traffic"]


class Page(HTMLParser):
    """What a browser finds in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.sources: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == [], "a tag is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        assert not {"href", "onload", "style"} & found.keys()
        self.sources += [found["src"] or ""] if "src" in found else []
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_holds_all_plots_and_the_figures_of_the_run(fit: Fit, tmp_path: Path) -> None:
    report = PagingReport()
    fit([report], max_steps=6)
    folder = tmp_path / "paging_report"
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted([*(f"{name}.png" for name in PLOTS), "report.html"])
    page = Page((folder / "report.html").read_text())
    pngs = [
        base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in page.sources
    ]
    assert sorted(pngs) == sorted((folder / f"{name}.png").read_bytes() for name in PLOTS)
    assert all(png.startswith(b"\x89PNG") and len(png) > 4000 for png in pngs)
    text = " ".join(page.texts)
    assert "6 optimizer steps; " in text
    written = sum(record.written_bytes for record in report.records) / 6
    assert format_bytes(written) in text
    assert "TB written per day" in text


def test_losses_are_those_of_the_steps(fit: Fit) -> None:
    losses: list[float] = []

    class Watch(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, module: LightningModule, outputs: dict, *_: object
        ) -> None:
            losses.append(float(outputs["loss"]))

    report = PagingReport()
    fit([report, Watch()], max_steps=5)
    assert report._course.losses == losses
    assert len(report._course.disk_bytes) == len(report._course.process_bytes) == 5


@pytest.mark.parametrize("max_steps", [1, 2])
def test_a_short_run_has_a_page(fit: Fit, tmp_path: Path, max_steps: int) -> None:
    fit([PagingReport()], max_steps=max_steps)
    text = (tmp_path / "paging_report" / "report.html").read_text()
    assert f"{max_steps} optimizer steps" in text
    assert (tmp_path / "paging_report" / "timeline.png").exists()
    assert not listening()


def test_a_trace_beside_it_keeps_its_spans(fit: Fit, tmp_path: Path) -> None:
    fit([PagingTrace(tmp_path / "trace.json", steps=(2, 4)), PagingReport()], max_steps=6)
    steps = set(re.findall(r"step \((\d)\)", (tmp_path / "trace.json").read_text()))
    assert steps == {"2", "3", "4"}
    assert (tmp_path / "paging_report" / "report.html").exists()


@pytest.mark.parametrize("report_first", [False, True])
def test_a_trace_of_the_same_steps_keeps_its_spans(
    fit: Fit, tmp_path: Path, report_first: bool
) -> None:
    callbacks: list[Callback] = [PagingTrace(tmp_path / "trace.json"), PagingReport()]
    fit(callbacks[::-1] if report_first else callbacks, max_steps=6)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    starts = sorted(e["ts"] for e in events if e.get("name", "").startswith("step ("))
    forwards = [e["ts"] for e in events if e.get("name", "").startswith("forward")]
    assert len(starts) == 3
    assert max(forwards) > starts[-1]
    assert not listening()


def test_a_folder_that_cannot_be_made_is_refused_before_training(fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = PagingReport(tmp_path / "file" / "report")
    with pytest.raises(StorageError, match=r"set PagingReport\(directory=\.\.\.\)"):
        fit([report], max_steps=2)
    assert report.records == []


def test_a_folder_that_is_lost_costs_the_report_and_not_the_fit(
    fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Lose(Callback):
        def on_train_end(self, *_: object) -> None:
            (tmp_path / "paging_report").rmdir()

    trainer = fit([PagingReport(), Lose()], max_steps=2)
    assert trainer.global_step == 2
    assert "the report is not written whole" in caplog.text


def test_nobody_listens_after_an_error_in_the_first_step(fit: Fit) -> None:
    class Fail(Callback):
        def on_train_batch_end(self, *_: object) -> None:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fit([Fail(), PagingReport()], max_steps=1)
    assert not listening()


def test_titles_are_text(fit: Fit, tmp_path: Path) -> None:
    from mt_lightning.callbacks.report_page import page_html

    report = PagingReport()
    costs = []
    close = report.on_close
    report.on_close = lambda trainer, cost: (costs.append(cost), close(trainer, cost))[1]  # type: ignore[method-assign]
    fit([report], max_steps=2)
    page = Page(page_html("<script>alert(1)</script>", costs[0], {}))
    assert "script" not in page.tags
    assert any("<script>alert(1)</script>" in text for text in page.texts)


def test_linked_files_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 16))
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "c").write_bytes(bytes(1 << 12))
    assert files_bytes([tmp_path]) == (1 << 16) + (1 << 12)
