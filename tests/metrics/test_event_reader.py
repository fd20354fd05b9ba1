"""Scalars of event files are those that TensorBoard's own reader finds, and damage costs what is damaged only."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.util import tensor_util

from mgpu_slurm.metrics import event_reader
from mgpu_slurm.metrics.event_frames import find_records, framed
from mgpu_slurm.metrics.event_reader import EventFile, read_files
from mgpu_slurm.rank.torchvision_adapter import import_torchvision
from tests.metrics.event_files import Point, bits, opened, read_by_tensorboard, restarted, scalar, write


def points(file: EventFile) -> dict[str, list[Point]]:
    return {
        tag: [
            (step, bits(value), time)
            for step, value, time in zip(found.steps.tolist(), found.values.tolist(), found.times.tolist(), strict=True)
        ]
        for tag, found in file.scalars.items()
    }


def read(path: Path) -> EventFile:
    (file,) = read_files([path])
    return file


def check(path: Path, *, at_least: int) -> None:
    file = read(path)
    assert points(file) == read_by_tensorboard(path)
    assert file.damaged == 0
    assert sum(map(len, points(file).values())) >= at_least


# -- what writers write


@pytest.mark.parametrize("options", [{}, {"new_style": True}, {"double_precision": True}], ids=["old", "new", "double"])
def test_reads_files_written_by_torch(tmp_path: Path, options: dict[str, Any]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(300):
            writer.add_scalar("loss", 1 / (step + 1), step, **options)
            writer.add_scalar("valid/accuracy", step / 300, step * 1000, **options)
            writer.add_scalar("tiny", 1e-42 if step % 2 else math.nan, step, **options)
        writer.add_text("words", "no number")
        writer.add_histogram("weights", np.arange(100.0))
    (path,) = tmp_path.iterdir()
    check(path, at_least=900)


def test_reads_files_written_by_tensorboardx(tmp_path: Path) -> None:
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(200):
            writer.add_scalar("loss", 1 / (step + 1), step)
            writer.add_scalar("accuracy", step / 200, step)
        writer.add_histogram("weights", np.arange(100.0))
    (path,) = tmp_path.iterdir()
    check(path, at_least=400)


def test_reads_lightning_files_and_hyperparameters(tmp_path: Path) -> None:
    # lightning imports it, which fails beside a torch without CUDA
    import_torchvision()
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    logger.log_hyperparams({"lr": 0.5, "layers": 3, "name": "small"})
    for step in range(50):
        logger.log_metrics({"loss": 1 / (step + 1), "epoch": step // 10}, step)
    logger.finalize("success")
    (path,) = tmp_path.glob("*tfevents*")
    check(path, at_least=100)
    assert read(path).config == {"lr": 0.5, "layers": 3.0, "name": "small"}


@pytest.mark.parametrize("options", [{}, {"new_style": True}, {"double_precision": True}], ids=["old", "new", "double"])
def test_uniform_records_are_read_in_bulk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(500):
            for tag in ("loss", "accuracy", "lr"):
                writer.add_scalar(tag, 1 / (step + 1), step * 100, **options)
    (path,) = tmp_path.iterdir()
    singly: list[int] = []
    monkeypatch.setattr(event_reader, "_read_one", lambda file, table, place, columns: singly.append(place))
    assert sum(map(len, points(read(path)).values())) == 1500
    # the file's first record
    assert singly == [0]


# -- whatever can be written

TIMES = some.floats(0, 2e9)
STEPS = some.integers(-(2**63), 2**63 - 1) | some.integers(0, 300)
SINGLE = some.floats(width=32)
TAGS = some.sampled_from(["loss", "acc", "längs", "a/b/c", "x" * 130]) | some.text("ab\0é", min_size=1, max_size=3)


def tensor_value(tag: str, tensor: TensorProto, plugin: str) -> Summary.Value:
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin)) if plugin else None
    return Summary.Value(tag=f"tensor {plugin} {tag}", tensor=tensor, metadata=metadata)


def packed(number: float, kind: Any) -> TensorProto:
    """As TensorFlow writes arrays: their bytes."""
    proto = tensor_util.make_tensor_proto(number, dtype=kind)
    del proto.float_val[:], proto.double_val[:]
    proto.tensor_content = np.asarray(number, kind).tobytes()
    return proto


TENSORS = (
    some.builds(lambda number: tensor_util.make_tensor_proto(number, dtype=np.float32), SINGLE)
    | some.builds(lambda number: tensor_util.make_tensor_proto(number, dtype=np.float64), some.floats())
    | some.builds(packed, SINGLE, some.just(np.float32))
    | some.builds(packed, some.floats(), some.just(np.float64))
    | some.builds(tensor_util.make_tensor_proto, some.lists(SINGLE, min_size=2), some.just(np.float32))
)
VALUES = some.builds(lambda tag, number: Summary.Value(tag=tag, simple_value=number), TAGS, SINGLE) | some.builds(
    tensor_value, TAGS, TENSORS, some.sampled_from(["", "scalars", "pr_curves"])
)
EVENTS = some.builds(
    lambda time, step, values: Event(wall_time=time, step=step, summary=Summary(value=values)),
    TIMES,
    STEPS,
    some.lists(VALUES, min_size=1, max_size=1) | some.lists(VALUES, max_size=3),
) | some.builds(restarted, STEPS)


@given(some.lists(EVENTS, max_size=40))
def test_finds_the_same_scalars_as_tensorboard(said: list[Event]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "events.out.tfevents.1.host", [opened(1.0), *said])
        check(path, at_least=0)
        file = read(path)
        assert file.started == 1.0
        assert file.restarts == [
            (place + 1, event.step) for place, event in enumerate(said) if event.HasField("session_log")
        ]


def test_files_read_together_keep_their_own_points(tmp_path: Path) -> None:
    paths = [
        write(
            tmp_path / f"events.out.tfevents.{number}.host",
            [opened(number), *(scalar(f"tag{(number + step) % 3}", step, number + step / 8) for step in range(200))],
        )
        for number in range(5)
    ]
    empty = write(tmp_path / "events.out.tfevents.9.host", [])
    together = read_files([*paths, empty])
    assert [points(file) for file in together] == [*(points(read(path)) for path in paths), {}]
    assert [file.started for file in together] == [0, 1, 2, 3, 4, math.inf]


def test_tensors_of_another_plugin_are_not_scalars(tmp_path: Path) -> None:
    number = tensor_util.make_tensor_proto(1.0, dtype=np.float32)
    values = [tensor_value("x", number, "pr_curves"), *(Summary.Value(tag="tensor pr_curves x", tensor=number),) * 3]
    said = [Event(step=step, summary=Summary(value=[value])) for step, value in enumerate(values)]
    assert read(write(tmp_path / "tfevents", said)).scalars == {}


# -- damage

# the checksums of records up to 512 bytes are computed side by side
RECORDS = some.lists(some.binary(max_size=40) | some.binary(min_size=511, max_size=513), min_size=2, max_size=8)


def found_in(data: bytes) -> list[bytes]:
    (records,) = find_records([data])
    return [data[start : start + length] for start, length in zip(records.starts, records.lengths, strict=True)]


def found_damaged(data: bytes) -> int:
    (records,) = find_records([data])
    return records.damaged


@given(RECORDS, some.data())
def test_changed_byte_loses_only_its_record(records: list[bytes], data: some.DataObject) -> None:
    whole = bytearray(b"".join(map(framed, records)))
    place = data.draw(some.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(some.integers(1, 255))
    ends = np.cumsum([len(framed(record)) for record in records])
    hit = int(np.searchsorted(ends, place, side="right"))
    assert found_in(bytes(whole)) == records[:hit] + records[hit + 1 :]
    assert found_damaged(bytes(whole)) == 1


@given(RECORDS, some.data())
def test_cut_in_the_middle_loses_no_other_record(records: list[bytes], data: some.DataObject) -> None:
    whole = b"".join(map(framed, records))
    first, last = sorted(data.draw(some.tuples(*[some.integers(0, len(whole))] * 2)))
    ends = np.cumsum([0, *(len(framed(record)) for record in records)])
    bounds = zip(records, ends, ends[1:], strict=False)
    left = iter(found_in(whole[:first] + whole[last:]))
    # two halves of equal records may make one again
    assert all(record in left for record, start, stop in bounds if stop <= first or start >= last)


@given(RECORDS, some.data())
def test_unfinished_last_record_is_not_damage(records: list[bytes], data: some.DataObject) -> None:
    whole = b"".join(map(framed, records))
    stop = data.draw(some.integers(0, len(whole)))
    ends = np.cumsum([len(framed(record)) for record in records])
    assert found_in(whole[:stop]) == records[: int(np.searchsorted(ends, stop, side="right"))]
    assert found_damaged(whole[:stop]) == 0


def test_damaged_file_loses_no_record_of_another(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}-tfevents", [scalar("loss", step, step) for step in range(9)]) for name in "abc"]
    damaged = bytearray(paths[1].read_bytes())
    damaged[-5] ^= 1
    paths[1].write_bytes(damaged)
    files = read_files(paths)
    assert [file.damaged for file in files] == [0, 1, 0]
    assert [len(file.scalars["loss"].steps) for file in files] == [9, 8, 9]


def test_gap_of_zeros_and_noise_is_skipped(tmp_path: Path) -> None:
    first, second = ([scalar("loss", step, step) for step in steps] for steps in (range(50), range(50, 90)))
    path = write(tmp_path / "tfevents", first)
    noise = np.random.default_rng(0).bytes(5000)
    rest = b"".join(framed(event.SerializeToString()) for event in second)
    path.write_bytes(path.read_bytes() + bytes(100_000) + noise + rest)
    file = read(path)
    assert file.scalars["loss"].steps.tolist() == list(range(90))
    assert file.damaged == 1


def test_record_that_is_not_an_event_counts_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "tfevents"
    path.write_bytes(framed(scalar("loss", 1, 0.5).SerializeToString()) + framed(b"\xff\xff\xff"))
    file = read(path)
    assert (list(file.scalars), file.damaged) == (["loss"], 1)
