"""What TensorBoard reads of a run."""

from __future__ import annotations

import sys

import pytest
from event_examples import BARE, DENSE, EVENTS, LAYER, RUN, SCALARS, STEP
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import outergrad as og
from made_up_run import TRAVELS, events
from outergrad.core.run_figures import GROUPS, figures


def record(folder, told):
    recorder = og.TensorBoard(folder)
    for event in told:
        recorder.record(event)
    recorder.close()


def read(folder) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    accumulator.Reload()
    return accumulator


@pytest.fixture(scope="module")
def board(tmp_path_factory) -> EventAccumulator:
    folder = tmp_path_factory.mktemp("board")
    record(folder, events(rank=1, sites=2, steps=60, every=10, start=1.7e9))
    return read(folder / "site-1")


def test_figures_of_a_layer_are_beside_those_of_other_layers(board):
    tags = board.Tags()["scalars"]
    for name in TRAVELS:
        assert {f"effective_rank/{name}", f"sent_bytes/{name}", f"cosine/{name}"} <= {*tags}
    groups = {tag.split("/")[0] for tag in tags if "/" in tag}
    assert groups <= {*GROUPS}


def test_values_and_steps(board):
    sent = board.Scalars("step/total_sent_bytes")
    assert [(e.step, e.value) for e in sent] == [
        (step, 30_000 + 9_000 * (step + 1)) for step in range(0, 60, 10)
    ]
    assert len(board.Scalars("step/seconds")) == 5
    assert len(board.Scalars("loss")) == 60
    assert [e.step for e in board.Scalars("accuracy")] == [50]


def test_singular_values_are_histograms(board):
    histograms = board.Histograms("log10_singular_values/encoder.0.weight")
    assert [h.step for h in histograms] == [*range(0, 60, 10)]
    assert histograms[0].histogram_value.num == 16


def test_texts(board):
    assert {"run/text_summary", "travels/head.weight/text_summary"} <= {*board.Tags()["tensors"]}
    (run,) = board.Tensors("run/text_summary")
    text = run.tensor_proto.string_val[0].decode()
    assert "| method | RankDAD(rank=4) |" in text
    assert "| encoder.0.weight | 64 x 32 |" in text
    assert len(board.Tensors("travels/head.weight/text_summary")) == 1


def test_a_change_of_the_way_is_told(tmp_path):
    ways = [LAYER, LAYER, BARE, og.events.Layer(**{**vars(LAYER), "travels": "dense"})]
    record(tmp_path, ways)
    told = read(tmp_path / "site-1").Tensors("travels/encoder.0.weight/text_summary")
    assert [t.tensor_proto.string_val[0] for t in told] == [b"low rank", b"dense"]


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_what_was_not_measured_is_left_out(event):
    assert None not in figures(event).values()


def test_what_means_nothing_for_the_way_is_left_out():
    tags = {tag.split("/")[0] for tag in figures(DENSE)}
    assert not tags & {"rows", "kept_rows", "compress_s", "replay_s"}
    assert {"rows", "kept_rows", "compress_s"} <= {tag.split("/")[0] for tag in figures(LAYER)}


def test_where_training_goes_on_what_came_later_is_hidden(tmp_path):
    told = events(rank=0, sites=2, steps=60, every=10, start=1.7e9)
    again = og.events.Run(**{**vars(told[0]), "step": 30})
    record(tmp_path, told)
    record(tmp_path, [again, *(e for e in told[1:] if 30 <= e.step < 40)])
    kept = read(tmp_path / "site-0").Scalars("step/sent_bytes")
    assert [e.step for e in kept] == [0, 10, 20, 30]


def test_closed_and_opened_again(tmp_path):
    recorder = og.TensorBoard(str(tmp_path))
    recorder.close()
    for event in (STEP, SCALARS):
        recorder.record(event)
        recorder.close()
    assert {"step/seconds", "loss"} <= {*read(tmp_path / "site-1").Tags()["scalars"]}


def test_every_is_1_or_more(tmp_path):
    with pytest.raises(ValueError, match="every=0; use 1 or more"):
        og.TensorBoard(tmp_path, every=0)


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ImportError, match=r"pip install 'tensorboard>=2.15'"):
        og.TensorBoard(tmp_path)


def test_a_run_without_anything_else(tmp_path):
    record(tmp_path, [RUN])
    assert read(tmp_path / "site-1").Tags()["scalars"] == []
