"""Other people's layouts, written as ours, read back as equal tasks (cases D3 and D4; `mmrl.data_convert`)."""

import base64
import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmrl.data import DatasetConfig, read_tasks
from mmrl.data_convert import Conversion, reading_section
from mmrl.errors import DataError

URI = "data:image/png;base64," + base64.b64encode(b"inline").decode()
LAYOUTS = {
    "plain": ([{"prompt": "2 + 2?", "answer": 4, "level": "easy"}, {"prompt": "x", "answer": "y", "level": None}], {}),
    "problem": ([{"problem": "2 + 2?", "solution": "4", "source": {"book": "a", "page": 3}}], {}),
    "chat": ([{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
                            {"role": "assistant", "content": "a"}, {"role": "user", "content": "q2"}], "answer": "1"}], {}),
    "conversations": ([{"conversations": [{"from": "human", "value": "<image>why?"}, {"from": "gpt", "value": "so"}],
                        "image": "a.png"}], {}),
    "string": ([{"message": str([{"role": "user", "content": "it's <image>"}]), "images": ["a.png"]}], {}),
    "images": ([{"prompt": "<image> or <image>?", "images": ["a.png", URI]}, {"prompt": "none <image>", "hint": 1}], {}),
    "video": ([{"prompt": "?", "videos": [["a.png", "sub/b.png"]]},
               {"prompt": "?", "video": {"video": "c.mp4", "fps": 2, "audio": "d.wav"}},
               {"prompt": "?", "audio": "d.wav"}], {}),
    "mapped": ([{"instruction": "q", "output": "o", "question": "left alone", "rank": 3}],
               {"columns": {"prompt": "instruction", "answer": "output", "difficulty": "rank"}}),
    "unmapped": ([{"prompt": "q", "difficulty": "hard", "solution": "long"}],
                 {"columns": {"difficulty": None, "answer": None}}),
    "template": ([{"prompt": "q <image>", "image": "a.png", "id": 7, "domain": "d", "difficulty": 0.5,
                   "demonstration": "so"}], {"system": "be brief", "prompt_template": "Q: {prompt} Think."}),
}  # fmt: skip


def write(folder, rows):
    for name in ("a.png", "sub/b.png", "c.mp4", "d.wav"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def converted(tasks, output, **options):
    conversion = Conversion(tasks, output, **options)
    assert list(conversion.run()) == list(range(len(tasks)))
    return read_tasks(conversion.reading_config, base_dir=output.parent)


def comparable(task):
    """A task without its place; a column that is null is one that the row lacks."""
    return dataclasses.replace(
        task, source="", columns={key: value for key, value in task.columns.items() if value is not None}
    )


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_d3_d4_every_layout_reads_back_as_equal_tasks(tmp_path, layout, suffix):
    rows, config = LAYOUTS[layout]
    write(tmp_path, rows)
    tasks = read_tasks(DatasetConfig(path="rows.jsonl", **config), base_dir=tmp_path)
    again = converted(tasks, tmp_path / f"out.{suffix}")
    assert [comparable(task) for task in again] == [comparable(task) for task in tasks]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_media_can_be_put_into_the_file(tmp_path, suffix):
    write(tmp_path, LAYOUTS["images"][0][:1] + LAYOUTS["video"][0])
    tasks = read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)
    (tmp_path / "elsewhere").mkdir()
    again = converted(tasks, tmp_path / "elsewhere" / f"out.{suffix}", embed_media=True)
    for name in ("a.png", "sub/b.png", "c.mp4", "d.wav"):
        (tmp_path / name).unlink()
    media = [part.get(part["type"]) for task in again for part in task.messages[0]["content"] if part["type"] != "text"]
    assert media == [b"a.png", b"inline", [b"a.png", b"sub/b.png"], {"video": b"c.mp4", "fps": 2, "audio": b"d.wav"}, b"d.wav"]


def test_d4_bytes_of_parquet_and_null_stay_what_they_are(tmp_path):
    images = [[{"bytes": b"pixels", "path": "gone.png"}], None]
    pq.write_table(pa.table({"prompt": ["<image>?", "!"], "images": images, "answer": [1.5, None]}), tmp_path / "rows.parquet")
    tasks = read_tasks(DatasetConfig(path="rows.parquet"), base_dir=tmp_path)
    for name in ("out.parquet", "out.jsonl"):
        assert [comparable(task) for task in converted(tasks, tmp_path / name)] == [comparable(task) for task in tasks]


def test_paths_are_relative_below_the_folder_and_whole_outside_of_it(tmp_path):
    write(tmp_path, [{"prompt": "?", "image": "sub/b.png"}])
    tasks = read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)
    inside, outside = Conversion(tasks, tmp_path / "out.jsonl"), Conversion(tasks, tmp_path / "other/out.jsonl")
    for conversion in (inside, outside):
        list(conversion.run())
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert row == {"id": "rows.jsonl:1", "messages": [{"role": "user", "content": [
        {"type": "image", "image": "sub/b.png"}, {"type": "text", "text": "?"}]}]}  # fmt: skip
    assert reading_section(inside.reading_config) == f"path: {tmp_path / 'out.jsonl'}"
    assert "allow_outside_root: true" in reading_section(outside.reading_config)
    assert comparable(read_tasks(outside.reading_config, base_dir=tmp_path)[0]) == comparable(tasks[0])


def test_what_cannot_be_written_names_the_row_and_leaves_no_file(tmp_path):
    pq.write_table(pa.table({"prompt": ["a", "b"], "blob": [None, b"\x00"]}), tmp_path / "rows.parquet")
    tasks = read_tasks(DatasetConfig(path="rows.parquet"), base_dir=tmp_path)
    with pytest.raises(DataError, match=r"rows.parquet:2: .*bytes.*; jsonl cannot hold it, .parquet may"):
        list(Conversion(tasks, tmp_path / "out.jsonl").run())
    write(tmp_path, [{"prompt": "a", "level": 1}, {"prompt": "b", "level": [1]}])
    tasks = read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)
    with pytest.raises(DataError, match=r"rows.jsonl:1 and the next 1 rows: a column has values of different types"):
        list(Conversion(tasks, tmp_path / "out.parquet").run())
    write(tmp_path, [{"prompt": "a", "gold": "1", "answer": "taken"}])
    tasks = read_tasks(DatasetConfig(path="rows.jsonl", columns={"answer": "gold"}), base_dir=tmp_path)
    with pytest.raises(DataError, match=r"rows.jsonl:1: column 'answer' is passed on to rewards as it is"):
        list(Conversion(tasks, tmp_path / "out.jsonl").run())
    assert sorted(path.name for path in tmp_path.glob("*out*")) == []
    with pytest.raises(DataError, match=r"ends in \.jsonl or \.parquet"):
        Conversion(tasks, tmp_path / "out.csv")


def test_a_row_that_cannot_be_read_stops_the_conversion_with_its_number(tmp_path):
    write(tmp_path, [{"prompt": "a"}, {"prompt": 7}])
    tasks = read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)
    with pytest.raises(DataError, match=r"rows.jsonl:2: prompt: wrong type"):
        list(Conversion(tasks, tmp_path / "out.jsonl").run())
