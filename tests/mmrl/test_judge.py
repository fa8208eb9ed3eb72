"""`mmrl.judge` and its judges: attempts, time, cache, counters, and a real server that misbehaves."""

import json
import logging
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from mmrl.config import validate
from mmrl.errors import ConfigError, DataError, RewardError
from mmrl.judge import JudgeClient, JudgeError, JudgeRequest, Reply, Retry, parse_object
from mmrl.judge_cache import JudgeCache
from mmrl.judge_config import EndpointJudgeConfig
from mmrl.judge_endpoint import EndpointJudge
from mmrl.judge_model import ModelJudge
from mmrl.rewards import Judged, WeightedTerm, judged_term, score
from mmrl.testing import BanditAdapter, share_of_right_arms
from mmrl.trainer import Trainer
from mmrl.types import Media

KEY = "sk-never-shown-4711"
WAV = Media(kind="audio", data=b"RIFFsound", suffix=".wav")


def request(**changes):
    fields = {
        "purpose": "test",
        "instructions": "Answer.",
        "payload": {"question": "How many?"},
        "media": (WAV,),
        "timeout_s": 5.0,
    }
    return JudgeRequest(**(fields | changes))


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self):
        self.now, self.waits = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


class Scripted:
    """A judge that says, or raises, each entry of a script in turn; the last one again and again."""

    identity = "scripted"

    def __init__(self, *script):
        self.script, self.asked = list(script), 0

    def answer(self, request):
        self.asked += 1
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(entry, Exception):
            raise entry
        return Reply(text=entry, prompt_tokens=10, completion_tokens=3)


def failing(kind, **more):
    return JudgeError(f"{kind} error", kind=kind, **more)


def client(judge, clock=None, **more):
    clock = clock or Clock()
    return JudgeClient(judge=judge, clock=clock, sleep=clock.sleep, **more)


def first_number(answer):
    if not isinstance(answer.get("n"), int):
        raise ValueError("no n")
    return answer["n"]


# Attempts


def test_rate_errors_wait_longer_each_time_and_others_two_seconds():
    clock = Clock()
    judge = Scripted(failing("rate"), failing("rate"), failing("transient"), '{"n": 3}')
    asked = client(judge, clock)
    assert asked.ask(request(), first_number) == 3
    assert clock.waits == [2.0, 4.0, 2.0]
    counts = asked.drain()
    assert (counts["calls"], counts["retries"], counts["failures"]) == (4, 3, 0)
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (10, 3)
    assert set(asked.drain().values()) == {0}


def test_waits_after_rate_errors_end_at_thirty_seconds_and_heed_the_server():
    retry = Retry()
    assert [retry.wait(failing("rate"), attempt) for attempt in range(1, 8)] == [2, 4, 8, 16, 30, 30, 30]
    assert retry.wait(failing("rate", retry_after=9.0), 1) == 9
    assert retry.wait(failing("rate", retry_after=900.0), 1) == 30


@pytest.mark.parametrize(("kind", "asked"), [("transient", 4), ("rate", 4), ("permanent", 1), ("malformed", 1)])
def test_a_request_is_given_up_after_four_attempts_or_at_once_when_another_would_not_help(kind, asked):
    judge = Scripted(failing(kind))
    with pytest.raises(JudgeError) as error:
        client(judge).ask(request(), first_number)
    assert (error.value.kind, judge.asked) == (kind, asked)


@pytest.mark.parametrize("text", ["no JSON", "[1]", '{"n": NaN}', '{"m": 1}', '{"n": "3"}', '{"n": 3', "", "[" * 10**5])
def test_an_answer_of_a_wrong_form_is_counted_and_not_asked_for_again(text):
    judge = Scripted(text)
    asked = client(judge)
    with pytest.raises(JudgeError) as error:
        asked.ask(request(), first_number)
    assert (error.value.kind, judge.asked, asked.drain()["malformed"]) == ("malformed", 1, 1)


def test_one_code_fence_around_the_object_is_taken_off():
    assert parse_object('```json\n{"n": 1}\n```') == parse_object('{"n": 1}') == {"n": 1}


def test_nothing_is_tried_after_the_deadline():
    clock = Clock()
    judge = Scripted(failing("transient"))
    with pytest.raises(JudgeError):
        client(judge, clock).ask(request(), first_number, deadline=3.0)
    assert (judge.asked, clock.now) == (2, 2.0)  # a third attempt would begin at 4 s
    with pytest.raises(JudgeError, match="time for this group is over"):
        client(judge, clock).ask(request(), first_number, deadline=1.0)


def test_a_judge_that_keeps_failing_is_left_alone_for_a_while():
    clock = Clock()
    judge = Scripted(failing("transient"))
    asked = client(judge, clock, retry=Retry(attempts=1, give_up_after=2, rest_s=60))
    for _ in range(4):
        with pytest.raises(JudgeError):
            asked.ask(request(), first_number)
    counts = asked.drain()
    assert (judge.asked, counts["failures"], counts["skipped"]) == (2, 2, 2)
    clock.now += 60
    judge.script = ['{"n": 1}']
    assert asked.ask(request(), first_number) == 1


def test_refusals_do_not_send_a_judge_to_rest():
    judge = Scripted(failing("permanent"))
    asked = client(judge, retry=Retry(give_up_after=2))
    for _ in range(5):
        with pytest.raises(JudgeError):
            asked.ask(request(), first_number)
    assert (judge.asked, asked.drain()["skipped"]) == (5, 0)


def test_a_bug_of_a_judge_is_no_failure_of_the_judge():
    with pytest.raises(ZeroDivisionError):
        client(Scripted(ZeroDivisionError())).ask(request(), first_number)


def test_requests_at_once_are_bounded():
    running, most, lock = 0, 0, threading.Lock()

    class Slow:
        identity = "slow"

        def answer(self, request):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.02)
            with lock:
                running -= 1
            return Reply(text='{"n": 1}')

    asked = client(Slow(), workers=3)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: asked.ask(request(payload={"i": i}), first_number), range(12)))
    assert answers == [1] * 12
    assert most == 3
    assert asked.drain()["calls"] == 12


# Cache


def test_equal_questions_are_answered_from_disk(tmp_path):
    judge = Scripted('{"n": 3}')
    for _ in range(2):  # two clients, as in two runs
        asked = client(judge, cache=JudgeCache(tmp_path))
        assert [asked.ask(request(), first_number) for _ in range(2)] == [3, 3]
    counts = asked.drain()
    assert (judge.asked, counts["calls"], counts["cached"], counts["prompt_tokens"]) == (1, 0, 2, 0)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "changes",
    [
        {"media": (Media(kind="audio", data=b"RIFFother", suffix=".wav"),)}, {"media": ()}, {"payload": {"question": "Which?"}},
        {"instructions": "Answer well."}, {"purpose": "other"},
    ],
)  # fmt: skip
def test_another_question_clip_or_judge_has_another_place_in_the_cache(changes):
    assert request(**changes).fingerprint("a") != request().fingerprint("a") != request().fingerprint("b")
    assert request(timeout_s=1.0).fingerprint("a") == request().fingerprint("a")


def test_neither_failures_nor_answers_of_a_wrong_form_are_kept(tmp_path):
    for script in ("oops", '{"m": 1}', failing("permanent")):
        with pytest.raises(JudgeError):
            client(Scripted(script), cache=JudgeCache(tmp_path)).ask(request(), first_number)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"m": 1}', b"\xff\xfe"])
def test_a_damaged_entry_of_the_cache_is_asked_for_again_and_mended(tmp_path, content):
    judge = Scripted('{"n": 3}')
    asked = client(judge, cache=JudgeCache(tmp_path))
    asked.ask(request(), first_number)
    (path,) = tmp_path.rglob("*.json")
    path.write_bytes(content)
    assert asked.ask(request(), first_number) == 3
    assert (judge.asked, json.loads(path.read_text())) == (2, {"n": 3})


def test_a_folder_that_cannot_be_written_costs_the_cache_only(tmp_path):
    (tmp_path / "file").write_text("")
    asked = client(Scripted('{"n": 3}'), cache=JudgeCache(tmp_path / "file"))
    assert asked.ask(request(), first_number) == 3
    assert asked.drain()["cache_errors"] == 1


def test_threads_that_write_the_same_entry_leave_it_whole(tmp_path):
    cache, answer = JudgeCache(tmp_path), {"n": 1, "text": "x" * 100_000}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cache.write("ab12", answer), range(40)))
        found = list(pool.map(lambda i: cache.write("ab12", answer) if i % 2 else cache.read("ab12"), range(40)))
    assert all(entry in (None, answer) for entry in found)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["ab12.json"]


# A server


def completion(content, **usage):
    return json.dumps({"choices": [{"message": {"content": content}}], "usage": usage}).encode()


@contextmanager
def server(*script):
    """A server that answers with each ``(status, body)`` in turn, the last one again and again; the requests that it got."""
    script, seen = list(script), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, "key": self.headers["Authorization"], "body": body})
            status, reply, *headers = script.pop(0) if len(script) > 1 else script[0]
            if callable(reply):
                return reply(self)
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *arguments):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads, httpd.block_on_close = True, False
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}/v1", seen
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join(timeout=5)


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def endpoint(url, **more):
    return EndpointJudge(url=url, model="hears-1", key_variable="TEST_JUDGE_KEY", **more)


def test_a_request_carries_the_clip_the_question_and_the_key():
    with server((200, completion('{"n": 3}', prompt_tokens=120, completion_tokens=7))) as (url, seen):
        asked = client(endpoint(url, reasoning_effort="low"))
        assert asked.ask(request(), first_number) == 3
    (got,) = seen
    system, user = got["body"]["messages"]
    audio, text = user["content"]
    assert (got["path"], got["key"], got["body"]["temperature"]) == ("/v1/chat/completions", f"Bearer {KEY}", 0.0)
    assert audio == {"type": "input_audio", "input_audio": {"data": "UklGRnNvdW5k", "format": "wav"}}
    assert (system["content"], json.loads(text["text"])) == ("Answer.", {"question": "How many?"})
    assert (got["body"]["response_format"], got["body"]["reasoning_effort"]) == ({"type": "json_object"}, "low")
    counts = asked.drain()
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (120, 7)


def test_images_travel_as_data_addresses():
    image = Media(kind="image", data=b"PNG", suffix=".png")
    with server((200, completion('{"n": 3}'))) as (url, seen):
        client(endpoint(url)).ask(request(media=(image,)), first_number)
    assert seen[0]["body"]["messages"][1]["content"][0]["image_url"] == {"url": "data:image/png;base64,UE5H"}


def test_too_many_requests_then_success():
    clock = Clock()
    with server((429, b"slow down", ("Retry-After", "7")), (429, b"slow down"), (200, completion('{"n": 3}'))) as (url, seen):
        assert client(endpoint(url), clock).ask(request(), first_number) == 3
    assert (len(seen), clock.waits) == (3, [7.0, 4.0])


def test_errors_of_the_server_end_in_failure():
    clock = Clock()
    with server((500, b"broken")) as (url, seen):
        asked = client(endpoint(url), clock)
        with pytest.raises(JudgeError, match="HTTP 500: broken"):
            asked.ask(request(), first_number)
    assert (len(seen), clock.waits, asked.drain()["failures"]) == (4, [2.0, 2.0, 2.0], 1)


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refused_request_is_not_repeated(status):
    with server((status, b"no")) as (url, seen), pytest.raises(JudgeError) as error:
        client(endpoint(url)).ask(request(), first_number)
    assert (len(seen), error.value.kind) == (1, "permanent")


def test_the_key_follows_no_redirect():
    with (
        server((200, completion('{"n": 3}'))) as (other, elsewhere),
        server((302, b"", ("Location", other))) as (url, seen),
        pytest.raises(JudgeError, match="HTTP 302"),
    ):
        client(endpoint(url)).ask(request(), first_number)
    assert (len(seen), elsewhere) == (1, [])


def never(handler):
    time.sleep(1.0)


def drip(handler):
    """A byte now and then, so that no single read takes long."""
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(100):
            handler.wfile.write(b" ")
            time.sleep(0.05)
    except OSError:
        pass


@pytest.mark.parametrize("reply", [never, drip])
def test_an_attempt_ends_when_its_time_is_over(reply):
    start = time.monotonic()
    with server((200, reply)) as (url, _), pytest.raises(JudgeError, match=r"no answer within 0\.2 s") as error:
        endpoint(url).answer(request(timeout_s=0.2))
    assert error.value.kind == "transient"
    assert time.monotonic() - start < 3.0


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"<html>", "transient"), (b'{"choices": []}', "transient"), (completion(None), "transient"), (b"\xff", "transient"),
        (completion("Three, I think."), "malformed"), (completion('{"n": [1, 2]}'), "malformed"),
    ],
)  # fmt: skip
def test_replies_of_a_wrong_form(body, kind):
    with server((200, body)) as (url, _), pytest.raises(JudgeError) as error:
        client(endpoint(url), retry=Retry(attempts=1)).ask(request(), first_number)
    assert error.value.kind == kind


def test_content_in_parts_is_joined():
    with server((200, completion([{"type": "text", "text": '{"n"'}, {"type": "text", "text": ": 3}"}]))) as (url, _):
        assert client(endpoint(url)).ask(request(), first_number) == 3


def test_a_server_that_is_not_there_fails_like_any_other():
    with server((200, b"")) as (url, _):
        pass
    with pytest.raises(JudgeError) as error:
        endpoint(url).answer(request(timeout_s=1.0))
    assert error.value.kind == "transient"


@pytest.mark.parametrize("status", [401, 429, 500])
def test_the_key_shows_nowhere(status, caplog):
    caplog.set_level(logging.DEBUG)
    with server((status, f"wrong key {KEY}".encode())) as (url, _):
        judge = endpoint(url)
        asked = client(judge, retry=Retry(attempts=2))
        with pytest.raises(JudgeError) as error:
            asked.ask(request(), first_number)
    shown = "".join(traceback.format_exception(error.value)) + caplog.text + repr(judge) + judge.identity + repr(asked)
    assert "wrong key ***" in shown
    assert KEY not in shown


@pytest.mark.parametrize("value", [None, "", "  ", "a\nb", "schlüssel"])
def test_an_absent_or_impossible_key_fails_without_a_request(value, monkeypatch):
    if value is None:
        monkeypatch.delenv("TEST_JUDGE_KEY")
    else:
        monkeypatch.setenv("TEST_JUDGE_KEY", value)
    with server((200, completion('{"n": 3}'))) as (url, seen):
        with pytest.raises(JudgeError, match="TEST_JUDGE_KEY holds no usable key") as error:
            endpoint(url).answer(request())
        assert EndpointJudge(url=url, model="open").answer(request()).text == '{"n": 3}'
    assert (error.value.kind, len(seen), seen[0]["key"]) == ("permanent", 1, None)


@pytest.mark.parametrize("url", ["ftp://host", "host/v1", "https://name:secret@host/v1", "https://host/v1?key=secret"])
def test_configs_refuse_addresses_that_are_none_or_hold_credentials(url):
    with pytest.raises(ConfigError, match="url"):
        validate({"name": "endpoint", "url": url, "model": "m"}, EndpointJudgeConfig, "test")


# A model


class OneModel:
    """What `ModelJudge` uses of a language adapter."""

    policy_dir, max_decisions = "model", 8

    def __init__(self, text):
        self.text, self.tasks = text, []

    def rollout(self, policy, tasks, *, group_size, seeds, greedy):
        assert (len(tasks), group_size, len(seeds), greedy) == (1, 1, 1, True)
        self.tasks += tasks
        if isinstance(self.text, Exception):
            raise self.text
        outcome = type("Completion", (), {"text": self.text, "num_tokens": 4})
        inputs = type("Inputs", (), {"prompt_lengths": [21]})
        return type("Batch", (), {"outcomes": [outcome], "inputs": inputs})


def test_a_model_hears_the_clip_before_the_question():
    model = OneModel('{"n": 3}')
    asked = client(ModelJudge(adapter=model, policy=None))
    assert asked.ask(request(), first_number) == 3
    system, user = model.tasks[0].messages
    assert [part["type"] for part in (*system["content"], *user["content"])] == ["text", "audio", "text"]
    assert user["content"][0]["audio"] == b"RIFFsound"
    assert (asked.drain()["prompt_tokens"], ModelJudge(adapter=model, policy=None).identity) == (21, "model model 8")


def test_a_prompt_that_the_model_does_not_take_is_a_failure():
    with pytest.raises(JudgeError) as error:
        client(ModelJudge(adapter=OneModel(DataError("too long")), policy=None)).ask(request(), first_number)
    assert error.value.kind == "permanent"


# A run


@judged_term
class Counting:
    """A judged term that prefers the first rollout and counts."""

    concurrent_groups = 2

    def __init__(self):
        self.steps, self.groups = [], 0

    def begin_step(self, train_step):
        self.steps.append(train_step)

    def __call__(self, task, outcomes):
        self.groups += 1
        scores = [1.0] + [0.0] * (len(outcomes) - 1)
        return Judged(values=scores, record={"rubrics": [], "scores": scores, "task": task.id})

    def totals(self):
        groups, self.groups = self.groups, 0
        return {"judge/calls": (groups, 1)}


def test_a_run_tells_the_step_logs_counters_and_writes_records_beside_samples(bandit_config):
    counting = Counting()
    adapter = BanditAdapter(reward_terms={"accuracy": share_of_right_arms, "judged": counting})
    config = bandit_config(rewards={"accuracy": 1.0, "judged": 0.5}, trainer={"num_steps": 2}, metrics={"samples_every": 1})
    Trainer(config, adapter, cpu=True).run()
    assert counting.steps == [1, 2]
    metrics = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["judge/calls"] for row in metrics] == [4.0, 4.0]
    assert [row["reward/judged"] for row in metrics] == [0.25, 0.25]
    rows = [json.loads(line) for line in (config.run_dir / "samples" / "step_000002.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert all(row["judging"] == {"rubrics": [], "scores": [1.0, 0.0, 0.0, 0.0], "task": row["task_id"]} for row in rows)
    assert [row["reward_terms"]["judged"] for row in rows] == [1.0, 0.0, 0.0, 0.0] * 2


def test_runs_without_a_judge_write_no_records(bandit_config):
    config = bandit_config(trainer={"num_steps": 1}, metrics={"samples_every": 1})
    Trainer(config, BanditAdapter(), cpu=True).run()
    assert "judging" not in (config.run_dir / "samples" / "step_000001.jsonl").read_text()


def test_a_judged_term_that_gives_too_few_numbers_stops_the_run():
    adapter = BanditAdapter()
    batch = adapter.rollout(adapter.build_policy(), adapter.task_source("train")[:2], group_size=3, seeds=torch.arange(6))
    term = Counting()
    term.concurrent_groups = 1
    short = judged_term(
        type("Short", (Counting,), {"__call__": lambda self, task, outcomes: Judged(values=[1.0], record={})})
    )()
    for function in (short, judged_term(type("Odd", (Counting,), {"__call__": lambda self, task, outcomes: 1 / 0}))()):
        with pytest.raises(RewardError, match="reward 'judged'"):
            score(batch, {"judged": WeightedTerm(weight=1.0, function=function)})
    assert score(batch, {"judged": WeightedTerm(weight=1.0, function=term)}).judgings[5]["scores"] == [1.0, 0.0, 0.0]
