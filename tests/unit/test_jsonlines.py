"""Files of JSON lines that grow for as long as a run: parts that are packed, read as one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from geomesh_p2p.jsonlines import JsonLines, parts, read_lines
from geomesh_p2p.lab.histories import find_history_files
from tests.process.sites import until


def test_files_that_grow_become_packed_parts_and_are_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, part_bytes=10_000)
    for number in range(2000):
        lines.append({"number": number, "text": "as long as a line may be"})
    lines.close()
    assert len(parts(path)) >= 5
    assert path.stat().st_size < 10_000
    assert [json.loads(line)["number"] for line in read_lines(path)] == list(range(2000))
    JsonLines(path).close()  # packs what an end in between has left
    until(lambda: all(part.suffix == ".gz" for part in parts(path)), "all parts to be packed", 60.0)
    assert [json.loads(line)["number"] for line in read_lines(path)] == list(range(2000))
    assert sum(part.stat().st_size for part in parts(path)) < 2000 * 50 / 4


def test_a_file_becomes_a_part_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines = JsonLines(path, part_bytes=1000)
    lines.append({"number": 1})
    reading = read_lines(path)
    assert next(reading) == '{"number":1}'
    lines.append({"number": 2, "text": "x" * 1000})
    assert [json.loads(line)["number"] for line in reading] == [2], "neither twice nor not at all"
    assert [json.loads(line)["number"] for line in read_lines(path)] == [1, 2]
    lines.close()


@pytest.mark.parametrize("crash", ["a part not packed", "half packed", "packed and not yet gone"])
def test_a_crash_while_a_part_is_packed_loses_nothing(crash: str, tmp_path: Path) -> None:
    part, packed = tmp_path / "history-000001.jsonl", tmp_path / "history-000001.jsonl.gz"
    part.write_text('{"number":1}\n')
    (tmp_path / "history.jsonl").write_text('{"number":2}\n')
    if crash == "half packed":
        packed.with_name(packed.name + ".partial").write_bytes(b"half")
    elif crash == "packed and not yet gone":
        packed.write_bytes(gzip.compress(part.read_bytes()))
    for _ in range(2):
        assert list(read_lines(tmp_path / "history.jsonl")) == ['{"number":1}', '{"number":2}']
        JsonLines(tmp_path / "history.jsonl").close()
        until(lambda: [path.name for path in tmp_path.glob("history-*")] == [packed.name], "one packed part", 60.0)


def test_a_damaged_part_shows_as_a_line_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "history-000001.jsonl.gz").write_bytes(gzip.compress(b'{"number":1}\n' * 1000)[:-20])
    (tmp_path / "history.jsonl").write_text('{"number":2}\n')
    *_, damaged, last = read_lines(tmp_path / "history.jsonl")
    assert (damaged, last) == ("history-000001.jsonl.gz is damaged", '{"number":2}')


@pytest.mark.parametrize("part", ["history-000001.jsonl", "history-000001.jsonl.gz"])
def test_a_crash_between_two_parts_loses_nothing(part: str, tmp_path: Path) -> None:
    """The newest has become a part, and there is no file to write to yet."""
    line = b'{"number":1}\n'
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / part).write_bytes(gzip.compress(line) if part.endswith(".gz") else line)
    (found,) = find_history_files([tmp_path])
    assert found == (tmp_path / "peer" / "history.jsonl").resolve()
    assert list(read_lines(found)) == ['{"number":1}']
    with pytest.raises(FileNotFoundError):
        list(read_lines(tmp_path / "history.jsonl"))
