"""Rows of awkward files become tasks or are refused by file, row and field (cases M3 to M5, M7, D1 to D6, T6)."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.chat import media_parts, plain_text
from mmrl.data import DatasetConfig, read_tasks
from mmrl.data_files import RowError
from mmrl.data_media import MediaRoot, resolve_medium
from mmrl.data_rows import row_to_task
from mmrl.errors import DataError


def write_jsonl(folder, *rows, name="rows.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def tasks_of(folder, *rows, **config):
    return read_tasks(DatasetConfig(path=write_jsonl(folder, *rows), **config), base_dir=folder)


def task_of(folder, row, **config):
    (task,) = tasks_of(folder, row, **config)
    return task


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"pixels")


def shown(task):
    """The last turn in short: text as it is, media as their references."""
    return [part["text"] if part["type"] == "text" else part[part["type"]] for part in task.messages[-1]["content"]]


# D1: damaged jsonl


def test_a_damaged_jsonl_gives_its_readable_rows_and_names_the_bad_lines(tmp_path):
    lines = [f'{{"prompt": "question {number}", "answer": "{number}"}}' for number in range(1, 10)]
    lines[3] = ""  # line 4 is blank
    lines[6] = '{"prompt": "question 7", "answer": "7",}'
    lines[8] = '{"prompt": "quest'
    (tmp_path / "bad.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())

    tasks = read_tasks(DatasetConfig(path="bad.jsonl"), base_dir=tmp_path)
    read, refused = {}, []
    for index in range(len(tasks)):
        try:
            read[tasks.place(index)] = tasks[index].answer
        except RowError as error:
            refused.append(str(error))

    assert read == {f"bad.jsonl:{line}": str(line) for line in (1, 2, 3, 5, 6, 8)}
    assert [message.split(": ")[:3] for message in refused] == [
        ["bad.jsonl:7", "row", "trailing comma"],
        ["bad.jsonl:9", "row", "not JSON"],
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'["prompt"]', "not an object"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8"),
        (b'{"prompt": ' + b"[" * 200_000, "not JSON"),
        (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_line_that_is_no_row_is_refused_with_its_number(tmp_path, line, reason):
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    tasks = read_tasks(DatasetConfig(path="bad.jsonl"), base_dir=tmp_path)
    assert plain_text(tasks[0]) == "user: good"
    with pytest.raises(RowError, match=f"^bad.jsonl:2: row: {reason}"):
        tasks[1]


# D2: columns


def test_d2_a_missing_prompt_lists_the_columns_and_the_closest_name(tmp_path):
    with pytest.raises(
        RowError, match=r"rows.jsonl:1: prompt: missing column: .*found columns: promt, gold\..*'promt' is meant"
    ):
        task_of(tmp_path, {"promt": "why?", "gold": "so"})


def test_a_mapped_column_that_no_row_has_is_refused_when_the_file_is_opened(tmp_path):
    with pytest.raises(
        DataError, match=r"columns.images names 'picture', which is not among its columns; did you mean 'pictures'"
    ):
        tasks_of(tmp_path, {"prompt": "why?", "pictures": []}, columns={"images": "picture"})


def test_a_row_without_the_mapped_answer_is_refused_by_number(tmp_path):
    tasks = tasks_of(tmp_path, {"prompt": "a", "gold": "1"}, {"prompt": "b", "golf": "2"}, columns={"answer": "gold"})
    assert tasks[0].answer == "1"
    with pytest.raises(RowError, match=r"rows.jsonl:2: answer: missing column: expected gold; found columns: prompt, golf"):
        tasks[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 3}, r"prompt: wrong type: found int \(3\); expected text or a list of messages"),
        ({"prompt": None}, r"prompt: empty prompt: column 'prompt' is null"),
        ({"prompt": "  "}, r"prompt: empty prompt"),
        ({"prompt": []}, r"prompt: wrong type: found list"),
        ({"messages": "no list"}, r"messages: wrong type: .*set columns: {prompt: messages}"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]: unknown role: found 'robot'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\]: unknown role: found \['user'\]"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content: wrong type: found int"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, r"messages\[0\].content\[0\]: unknown part"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, r"messages: no user turn"),
        ({"prompt": "x", "answer": ["1", "2"]}, r"answer: wrong type: found list"),
        ({"prompt": "x", "answer": float("nan")}, r"answer: NaN answer"),
        ({"prompt": "x", "difficulty": "hard"}, r"difficulty: wrong type: found str.*columns: {difficulty: null}"),
        ({"prompt": "x", "images": 7}, r"images\[0\]: wrong type: found int"),
        (
            {"prompt": "x", "messages": [{"role": "user", "content": "y"}]},
            r"prompt: two prompts: columns 'prompt' and 'messages'",
        ),
    ],
)
def test_d2_a_value_of_the_wrong_kind_names_the_row_the_field_and_what_was_found(tmp_path, row, message):
    with pytest.raises(RowError, match=rf"^rows.jsonl:1: {message}"):
        task_of(tmp_path, row)


@pytest.mark.parametrize("as_text", [json.dumps, str])
def test_d2_messages_stored_as_a_string_are_parsed(tmp_path, as_text):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "it's 5 o'clock"}]
    task = task_of(tmp_path, {"message": as_text(messages)})
    assert plain_text(task) == "system: be brief\nuser: it's 5 o'clock"


def test_text_that_looks_like_messages_stays_text_in_a_prompt_column(tmp_path):
    text = '[{"role": "user", "content": "x"}]'
    assert shown(task_of(tmp_path, {"prompt": text})) == [text]


# D3: other people's layouts


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": [{"role": "user", "content": "2 + 2?"}], "answer": 4}, {}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}], "answer": 4}, {}),
        ({"prompt": [{"role": "user", "content": "2 + 2?"}], "reward": {"truth": "4"}}, {"answer": "reward.truth"}),
        ({"prompt": "2 + 2?", "answer": "4"}, {}),
        ({"problem": "2 + 2?", "solution": "4"}, {}),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}, {}),
        ({"instruction": "2 + 2?", "output": "4"}, {"prompt": "instruction", "answer": "output"}),
    ],
)
def test_every_layout_of_a_question_reads_as_the_same_task(tmp_path, row, columns):
    task = task_of(tmp_path, row, columns=columns)
    assert task.messages == ({"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]},)
    assert task.answer == "4"


def test_the_last_assistant_turn_is_imitated_and_earlier_ones_are_kept(tmp_path):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns], "answer": "gold"}
    task = task_of(tmp_path, row)
    assert plain_text(task) == "user: a\nassistant: b\nuser: c"
    assert (task.answer, task.demonstration) == ("gold", "d")


def test_other_columns_reach_reward_terms_and_mapped_ones_do_not(tmp_path):
    row = {"prompt": "x", "answer": "1", "level": 3, "options": ["a", "b"], "source_id": 17, "kind": "algebra"}
    task = task_of(tmp_path, row, columns={"difficulty": "level", "id": "source_id", "domain": "kind"})
    assert (task.id, task.domain, task.difficulty) == ("17", "algebra", 3.0)
    assert task.columns == {"options": ["a", "b"]}


def test_a_column_mapped_to_one_thing_is_no_alias_of_another(tmp_path):
    task = task_of(tmp_path, {"prompt": "x", "solution": "long text"}, columns={"demonstration": "solution"})
    assert (task.answer, task.demonstration) == ("", "long text")


def test_a_column_mapped_to_null_is_left_alone(tmp_path):
    task = task_of(tmp_path, {"prompt": "x", "difficulty": "hard"}, columns={"difficulty": None})
    assert (task.difficulty, task.columns) == (None, {"difficulty": "hard"})


def test_system_prompt_and_template_surround_the_question_and_a_row_keeps_its_own_system_turn(tmp_path):
    touch(tmp_path, "a.png")
    own = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "q <image>"}], "image": "a.png"}
    config = {"system": "be brief", "prompt_template": 'Q: {prompt}\nReply as {"answer": ...}.'}
    plain, with_own = tasks_of(tmp_path, {"prompt": "why?"}, own, **config)
    assert plain_text(plain) == 'system: be brief\nuser: Q: why?\nReply as {"answer": ...}.'
    assert plain_text(with_own) == 'system: own\nuser: Q: q <image>\nReply as {"answer": ...}.'


def test_a_template_without_text_after_the_prompt_keeps_a_medium_at_the_end(tmp_path):
    touch(tmp_path, "a.png")
    task = task_of(tmp_path, {"prompt": "see <image>", "image": "a.png"}, prompt_template="Look: {prompt}")
    assert task.messages[0]["content"] == [
        {"type": "text", "text": "Look: see "},
        {"type": "image", "image": str(tmp_path / "a.png")},
    ]


@pytest.mark.parametrize("template", ["no place", "{prompt}{prompt}", "<image>{prompt}"])
def test_a_template_needs_one_place_for_the_prompt_and_no_media_tag(template):
    with pytest.raises(ValueError, match="prompt_template"):
        DatasetConfig(path="x.jsonl", prompt_template=template)


# M3, M4, M5, M7: media and their places


def test_tags_are_slots_that_media_fill_in_order(tmp_path):
    touch(tmp_path, "a.png", "b.png", "c.wav")
    row = {"prompt": "first <image> then <audio>, last <image>?", "images": ["a.png", "b.png"], "audio": "c.wav"}
    a, b, c = (str(tmp_path / name) for name in ("a.png", "b.png", "c.wav"))
    task = task_of(tmp_path, row)
    assert shown(task) == ["first ", a, " then ", c, ", last ", b, "?"]
    assert list(media_parts(task)) == [("image", a), ("audio", c), ("image", b)]


@pytest.mark.parametrize(
    ("prompt", "images", "found"),
    [
        ("<image> and <image>", ["a.png"], "2 image tags in the text, 1 in column 'images'"),
        ("<image>", ["a.png", "b.png"], "1 image tag in the text, 2 in column 'images'"),
        ("<image>", [], "1 image tag in the text, 0 in column 'images'"),
        ("<image>", None, "1 image tag in the text, 0 in column 'images'"),
    ],
)
def test_tags_and_images_that_differ_in_number_are_refused_by_row(tmp_path, prompt, images, found):
    touch(tmp_path, "a.png", "b.png")
    tasks = tasks_of(tmp_path, {"prompt": "fine"}, {"prompt": prompt, "images": images})
    with pytest.raises(RowError, match=f"^rows.jsonl:2: images: tags and media differ in number: {found}"):
        tasks[1]


def test_a_tag_of_one_kind_and_a_medium_of_another_are_refused(tmp_path):
    touch(tmp_path, "a.png", "b.wav")
    with pytest.raises(RowError, match="0 audio tags in the text, 1 in column 'audios'"):
        task_of(tmp_path, {"prompt": "<image>?", "images": ["a.png"], "audios": ["b.wav"]})


def test_without_a_tag_media_come_first(tmp_path):
    touch(tmp_path, "a.png", "b.png", "c.mp4")
    task = task_of(tmp_path, {"prompt": "compare", "video": "c.mp4", "images": ["a.png", "b.png"]})
    assert shown(task) == [str(tmp_path / name) for name in ("a.png", "b.png", "c.mp4")] + ["compare"]


def test_without_a_tag_media_come_first_in_the_first_user_turn(tmp_path):
    touch(tmp_path, "a.png")
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    task = task_of(tmp_path, {"messages": [{"role": role, "content": text} for role, text in turns], "image": "a.png"})
    assert plain_text(task) == "system: s\nuser: <image>a\nassistant: b\nuser: c"


def test_a_tag_stays_text_in_a_row_without_a_media_column(tmp_path):
    assert shown(task_of(tmp_path, {"prompt": "what does <image> or <|image_pad|> mean?"})) == [
        "what does <image> or <|image_pad|> mean?"
    ]


def test_a_pad_token_in_the_text_stays_text_beside_a_real_image(tmp_path):
    touch(tmp_path, "a.png")
    task = task_of(tmp_path, {"prompt": "what is <|image_pad|>?", "images": ["a.png"]})
    assert shown(task) == [str(tmp_path / "a.png"), "what is <|image_pad|>?"]


def test_tags_stay_text_where_messages_have_media_parts_of_their_own(tmp_path):
    touch(tmp_path, "a.png")
    content = [{"type": "image"}, {"type": "text", "text": "why <image>?"}]
    task = task_of(tmp_path, {"messages": [{"role": "user", "content": content}], "images": ["a.png"]})
    assert shown(task) == [str(tmp_path / "a.png"), "why <image>?"]


def test_media_parts_may_hold_their_reference(tmp_path):
    touch(tmp_path, "a.png", "b.png", "c.mp4")
    content = [
        {"text": None, "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "b.png"}},
        {"type": "video", "video": "c.mp4", "fps": 2},
        {"type": "text", "text": "?", "image": None},
    ]
    task = task_of(tmp_path, {"messages": [{"role": "user", "content": content}]})
    a, b, c = (str(tmp_path / name) for name in ("a.png", "b.png", "c.mp4"))
    assert shown(task) == [a, b, {"video": c, "fps": 2}, "?"]


def test_limits_inside_a_media_part_are_refused_rather_than_ignored(tmp_path):
    touch(tmp_path, "a.png")
    content = [{"type": "image", "image": "a.png", "max_pixels": 100}, {"type": "text", "text": "?"}]
    with pytest.raises(RowError, match=r"messages\[0\].content\[0\]: unknown part key: found max_pixels"):
        task_of(tmp_path, {"messages": [{"role": "user", "content": content}]})


def test_media_given_twice_are_refused(tmp_path):
    touch(tmp_path, "a.png")
    row = {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "images": ["a.png"]}
    with pytest.raises(RowError, match=r"already hold 1 of their own; set columns: {images: null}"):
        task_of(tmp_path, row)
    assert shown(task_of(tmp_path, row, columns={"images": None})) == [str(tmp_path / "a.png")]


@pytest.mark.parametrize(("middle", "reason"), [("lost.png", "missing file"), ("", "empty image"), (None, "empty image")])
def test_a_row_with_its_middle_image_missing_is_refused(tmp_path, middle, reason):
    touch(tmp_path, "a.png", "c.png")
    with pytest.raises(RowError, match=rf"^rows.jsonl:1: images\[1\]: {reason}"):
        task_of(tmp_path, {"prompt": "?", "images": ["a.png", middle, "c.png"]})


def test_no_image_reads_the_same_from_an_empty_list_null_and_no_column(tmp_path):
    rows = [{"prompt": "?", "images": []}, {"prompt": "?", "images": None}, {"prompt": "?"}]
    assert [shown(task) for task in tasks_of(tmp_path, *rows)] == [["?"], ["?"], ["?"]]


# D4: references


def test_relative_paths_start_at_the_folder_of_the_file_or_at_media_root(tmp_path):
    touch(tmp_path, "sets/img/a b.png", "media/a b.png")
    write_jsonl(tmp_path / "sets", {"prompt": "?", "image": "img/a b.png"})
    beside = read_tasks(DatasetConfig(path="sets/rows.jsonl"), base_dir=tmp_path)[0]
    assert shown(beside)[0] == str(tmp_path / "sets/img/a b.png")

    write_jsonl(tmp_path / "sets", {"prompt": "?", "image": "a b.png"})
    elsewhere = read_tasks(DatasetConfig(path="sets/rows.jsonl", media_root="media"), base_dir=tmp_path)[0]
    assert shown(elsewhere)[0] == str(tmp_path / "media/a b.png")


def test_file_uris_and_data_uris_are_understood(tmp_path):
    touch(tmp_path, "a b.png")
    uri = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    task = task_of(tmp_path, {"prompt": "?", "images": [f"file://{tmp_path}/a%20b.png", uri]})
    assert shown(task) == [str(tmp_path / "a b.png"), b"pixels", "?"]


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("data:image/png;base64,@@@", "broken data URI"),
        ("data:image/png,pixels", "broken data URI"),
        ("https://example.com/a.png", "medium is not local"),
        ("a\0.png", "missing file"),
        ("x" * 5000, "missing file"),
        ({"caption": "a"}, "wrong type"),
        (["a.png"], "wrong type"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(tmp_path, reference, reason):
    with pytest.raises(RowError, match=rf"^rows.jsonl:1: images\[0\]: {reason}"):
        task_of(tmp_path, {"prompt": "?", "images": [reference]})


@pytest.mark.parametrize("make", ["../secret.png", "img/../../secret.png", "{tmp}/secret.png", "file://{tmp}/secret.png"])
def test_a_path_that_leaves_the_media_root_is_refused_unless_allowed(tmp_path, make):
    touch(tmp_path, "secret.png", "sets/img/a.png")
    write_jsonl(tmp_path / "sets", {"prompt": "?", "image": make.format(tmp=tmp_path)})
    with pytest.raises(RowError, match=r"^sets/rows.jsonl:1: image\[0\]: path outside the media root"):
        read_tasks(DatasetConfig(path="sets/rows.jsonl"), base_dir=tmp_path)[0]
    allowed = read_tasks(DatasetConfig(path="sets/rows.jsonl", allow_outside_root=True), base_dir=tmp_path)[0]
    assert shown(allowed)[0] == str(tmp_path / "secret.png")


@given(
    scheme=st.sampled_from(["", "/", "file://", "file:///"]),
    steps=st.lists(st.sampled_from(["..", ".", "", "a", "a..", "%2e%2e", "~", "\0", "data", "root", "rooted"]), max_size=6),
)
def test_no_path_escapes_the_root(scheme, steps):
    # every file "exists": only the rule about the root decides
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.path.isfile", lambda path: True)
        try:
            path = resolve_medium(scheme + "/".join(steps), "image", "images[0]", MediaRoot(folder=Path("/data/root")))
        except RowError:
            return
    assert path == "/data/root" or path.startswith("/data/root/")
    assert ".." not in path.split("/")


def test_parquet_structs_give_bytes_or_paths(tmp_path):
    touch(tmp_path, "a.png")
    images = [[{"bytes": b"pixels", "path": "gone.png"}, {"bytes": None, "path": "a.png"}], None]
    pq.write_table(pa.table({"prompt": ["<image><image>?", "!"], "images": images}), tmp_path / "rows.parquet")
    first, second = read_tasks(DatasetConfig(path="rows.parquet"), base_dir=tmp_path)
    assert shown(first) == [b"pixels", str(tmp_path / "a.png"), "?"]
    assert shown(second) == ["!"]


def test_opened_objects_pass_through(tmp_path):
    picture = object()
    task = row_to_task({"prompt": "?", "image": picture}, DatasetConfig(path="x"), tmp_path, "memory:1")
    assert shown(task) == [picture, "?"]


def test_frames_of_a_video_are_a_list_inside_the_column(tmp_path):
    touch(tmp_path, "0.png", "1.png")
    rows = [{"prompt": "?", "videos": [["0.png", "1.png"]]}, {"prompt": "?", "video": {"video": ["0.png", "1.png"], "fps": 4}}]
    frames = [str(tmp_path / "0.png"), str(tmp_path / "1.png")]
    assert [shown(task)[0] for task in tasks_of(tmp_path, *rows)] == [frames, {"video": frames, "fps": 4}]


# D6: sizes, and where rows come from


@pytest.mark.parametrize("content", ["", "\n\r\n", "\ufeff\n"])
def test_a_file_without_rows_is_an_error(tmp_path, content):
    (tmp_path / "rows.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"^rows.jsonl: has no rows"):
        read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)


def test_one_row_is_a_dataset(tmp_path):
    tasks = tasks_of(tmp_path, {"prompt": "?"})
    assert len(tasks) == 1
    assert tasks[0] == tasks[-1]
    with pytest.raises(IndexError):
        tasks[1]


def test_limit_keeps_the_first_rows(tmp_path):
    tasks = tasks_of(tmp_path, *({"prompt": str(number)} for number in range(5)), limit=2)
    assert [shown(task) for task in tasks] == [["0"], ["1"]]


def test_parquet_rows_are_found_in_any_order_across_row_groups(tmp_path):
    table = pa.table({"prompt": [f"q{number}" for number in range(7)]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=3)
    tasks = read_tasks(DatasetConfig(path="rows.parquet"), base_dir=tmp_path)
    order = [6, 0, 3, 2, 5, 1, 4]
    assert [shown(tasks[index]) for index in order] == [[f"q{index}"] for index in order]
    assert tasks[4].source == "rows.parquet:5"


def test_json_files_hold_a_list_or_a_row_per_line(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    write_jsonl(tmp_path, *rows, name="lines.json")
    for name in ("list.json", "lines.json"):
        tasks = read_tasks(DatasetConfig(path=name), base_dir=tmp_path)
        assert [shown(task) for task in tasks] == [["a"], ["b"]]


def test_a_folder_of_shards_is_read_by_split(tmp_path):
    (tmp_path / "set/data").mkdir(parents=True)
    for name, prompts in {"train-00000-of-00002": "ab", "train-00001-of-00002": "c", "test-00000-of-00001": "d"}.items():
        pq.write_table(pa.table({"prompt": list(prompts)}), tmp_path / f"set/data/{name}.parquet")
    train = read_tasks(DatasetConfig(path="set", split="train"), base_dir=tmp_path)
    assert [(task.source, shown(task)) for task in train] == [
        ("set/data/train-00000-of-00002.parquet:1", ["a"]),
        ("set/data/train-00000-of-00002.parquet:2", ["b"]),
        ("set/data/train-00001-of-00002.parquet:1", ["c"]),
    ]
    with pytest.raises(DataError, match="set: has several splits; set split to one of: test, train"):
        read_tasks(DatasetConfig(path="set"), base_dir=tmp_path)
    with pytest.raises(DataError, match="set: has no split 'tain'; did you mean 'train'"):
        read_tasks(DatasetConfig(path="set", split="tain"), base_dir=tmp_path)


def test_what_datasets_saved_is_read_without_decoding_its_images(tmp_path):
    import datasets
    from PIL import Image

    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    rows = {"prompt": ["?"], "image": [Image.new("RGB", (4, 3), "red")]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)}).save_to_disk(str(tmp_path / "saved"))
    picture, text = shown(read_tasks(DatasetConfig(path="saved"), base_dir=tmp_path)[0])
    assert picture.startswith(b"\x89PNG")
    assert text == "?"


def test_a_datasets_name_is_loaded_with_its_subset_and_split(tmp_path, monkeypatch):
    import datasets

    loaded = datasets.DatasetDict({split: datasets.Dataset.from_dict({"question": [split]}) for split in ("train", "test")})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: asked.append(args) or loaded)
    tasks = read_tasks(DatasetConfig(path="someone/sums", subset="main", split="test"), base_dir=tmp_path)
    assert asked == [("someone/sums", "main")]
    assert (shown(tasks[0]), tasks[0].source) == (["test"], "someone/sums:1")


def test_a_datasets_name_that_cannot_be_loaded_says_so(tmp_path, monkeypatch):
    import datasets

    def offline(*args):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    message = r"^someone/sums: neither a file or folder nor a dataset that can be loaded \(no route to the hub\)"
    with pytest.raises(DataError, match=message):
        read_tasks(DatasetConfig(path="someone/sums"), base_dir=tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("row.jsonl", "no such file in .*; did you mean 'rows.jsonl'"),
        ("notes.txt", "notes.txt: .txt is not a dataset format"),
        ("broken.parquet", "broken.parquet: not a readable parquet file"),
        ("empty_folder", "empty_folder: this folder holds neither .parquet nor .jsonl files"),
    ],
)
def test_a_path_that_is_no_dataset_says_what_would_be(tmp_path, path, message):
    write_jsonl(tmp_path, {"prompt": "?"})
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "broken.parquet").write_text("hello")
    (tmp_path / "empty_folder").mkdir()
    with pytest.raises(DataError, match=message):
        read_tasks(DatasetConfig(path=path), base_dir=tmp_path)


def test_a_split_of_a_single_file_is_refused_rather_than_ignored(tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl: this is one file, so split and subset have nothing to choose"):
        tasks_of(tmp_path, {"prompt": "?"}, split="test")


def test_rows_are_found_by_the_number_that_errors_quote(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    tasks = read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)
    assert shown(tasks.find_row(3)) == ["b"]
    with pytest.raises(DataError, match=r"rows.jsonl: has no row 2; its 2 rows end at rows.jsonl:3"):
        tasks.find_row(2)


def test_bad_rows_can_be_left_out_by_their_places(tmp_path):
    tasks = tasks_of(tmp_path, {"prompt": "a"}, {"prompt": 3}, {"prompt": "c"}, {"prompt": "d"}, limit=3)
    kept = tasks.without({"rows.jsonl:2"})
    assert [(task.source, shown(task)) for task in kept] == [("rows.jsonl:1", ["a"]), ("rows.jsonl:3", ["c"])]
    with pytest.raises(DataError, match=r"rows.jsonl: every row was left out"):
        tasks.without(["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"])


def test_rows_are_parsed_only_when_asked_for(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr("mmrl.data.row_to_task", lambda row, *rest: parsed.append(row["prompt"]))
    tasks = tasks_of(tmp_path, *({"prompt": str(number)} for number in range(5000)))
    tasks[4321]
    assert parsed == ["4321"]


def test_reading_a_config_does_not_load_torch():
    code = "import sys, mmrl.data, mmrl.data_check; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# T6: text


@pytest.mark.parametrize(
    "text",
    ["\u0645\u0631\u062d\u0628\u0627 \u202eabc\u202c", "e\u0301\u0323", "\U0001f469\u200d\U0001f680", "a\0b", "x" * 1_000_000],
)
def test_unusual_text_arrives_unchanged(tmp_path, text):
    assert shown(task_of(tmp_path, {"prompt": text, "answer": text})) == [text]


def test_half_a_surrogate_pair_is_refused_by_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "\\ud83d"}\n')
    with pytest.raises(RowError, match=r"rows.jsonl:1: prompt: text is not Unicode: half of a surrogate pair"):
        read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)[0]


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["bytes", "path", "url", "video"]), inner),
    max_leaves=4,
)
text = st.text(st.sampled_from("a [{\ud83d") | st.characters(), max_size=6) | st.just("<image>")
parts = text | anything | st.fixed_dictionaries({}, optional={key: text | anything for key in ("type", "text", "image", "fps")})
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]) | anything,
        "content": text | anything | st.lists(parts, max_size=3),
    }
)
values = {"messages": st.lists(messages | anything, max_size=3), "prompt": text, "images": anything, "videos": anything}
values |= {name: anything for name in ("answer", "id", "difficulty", "domain", "demonstration")}


@settings(max_examples=400)
@given(st.fixed_dictionaries({}, optional={name: entry | anything for name, entry in values.items()}))
def test_any_row_is_a_task_or_refused_by_field(row):
    try:
        task = row_to_task(row, DatasetConfig(path="x"), None, "x:1")
    except RowError as error:
        assert error.field and error.reason and error.detail
    else:
        assert all(isinstance(message["content"], list) for message in task.messages)
