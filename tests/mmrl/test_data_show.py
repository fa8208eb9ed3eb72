"""A row as the policy gets it, in words and as a page (cases M3 and M4; `mmrl.data_show`)."""

import types

import torch
from PIL import Image

from mmrl.chat import ChatTask
from mmrl.data_show import ShownRow, Slot, encode_row, opened_media, write_page

TOKENS = ["<user>", "see", "[IMG]", "<b>", "[SND]", "?"]


class Tokenizer:
    def convert_tokens_to_ids(self, token):
        return TOKENS.index(token)

    def decode(self, ids):
        return " ".join(TOKENS[index] for index in ids)


class Sound:
    seconds, rate = 1.5, 16_000

    def to_wav(self):
        return b"RIFF"


class Frontend:
    processor = types.SimpleNamespace(tokenizer=Tokenizer(), image_token="[IMG]", audio_token="[SND]")

    def open(self, task, kind, ref):
        return {"image": Image.new("RGB", (28, 56)), "audio": Sound()}.get(kind) or types.SimpleNamespace(
            frames=torch.zeros(10, 3, 28, 42, dtype=torch.uint8), fps=2.0
        )

    def encode(self, tasks):
        return [{"input_ids": torch.tensor([[0, 1, 2, 2, 3, 4, 2, 5]])}]


def task():
    kinds = [("image", "/a.png"), ("audio", b"12"), ("video", ["/0.png", "/1.png"])]
    parts = [{"type": kind, kind: ref} for kind, ref in kinds]
    content = [*parts, {"type": "text", "text": "why <script>alert(1)</script>?"}]
    return ChatTask(id="a<b", messages=({"role": "user", "content": content},), answer="1", source="rows.jsonl:3")


def shown(limit=8):
    adapter = types.SimpleNamespace(frontend=Frontend(), rollout_config=types.SimpleNamespace(max_prompt_tokens=limit))
    return encode_row(task(), adapter)


def test_slots_tokens_and_media_are_told_apart():
    row = shown()
    assert row.prompt == (
        "<user> see", Slot(kind="image", num_tokens=2), "<b>", Slot(kind="audio", num_tokens=1),
        Slot(kind="image", num_tokens=1), "?",
    )  # fmt: skip
    lines = list(row.lines())
    assert lines[:3] == [
        "medium 1: image /a.png: 28x56 pixels",
        "medium 2: audio 2 bytes: 1.50 s, mono, 16000 samples a second",
        "medium 3: video 2 frames, the first /0.png: 10 frames of 42x28, 2 a second",
    ]
    assert "tokens: 8 of at most 8, 4 of them media" in lines
    assert "  <user> see[image: 2 tokens]<b>[audio: 1 tokens][image: 1 tokens]?" in lines
    assert "tokens: 8 of at most 7 (over the limit), 4 of them media" in list(shown(7).lines())


def test_without_a_policy_only_media_are_opened():
    row = opened_media(task(), lambda kind, ref: Image.new("RGB", (2, 2)))
    assert row.prompt == () and len(list(row.lines())) == 3


def test_the_page_holds_every_medium_and_escapes_what_people_wrote(tmp_path):
    write_page(tmp_path / "deep/page.html", task(), shown(7))
    page = (tmp_path / "deep/page.html").read_text()
    assert page.count("data:image/png;base64,") == 1 + 8  # an image, and 8 of the 10 frames
    assert page.count('<audio controls src="data:audio/wav;base64,UklGRg=="') == 1
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "<mark>[image: 2 tokens]</mark>" in page
    assert '<p class="tokens over">8 tokens, at most 7</p>' in page
    assert "http" not in page  # nothing is fetched


def test_a_page_without_media_says_so(tmp_path):
    plain = ChatTask(id="x", messages=({"role": "user", "content": [{"type": "text", "text": "?"}]},))
    write_page(tmp_path / "page.html", plain, ShownRow(media=()))
    page = (tmp_path / "page.html").read_text()
    assert "<p>none</p>" in page and "Prompt as the policy gets it" not in page
