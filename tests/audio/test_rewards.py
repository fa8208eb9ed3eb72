"""Rule-based rewards against the values of the papers and repositories that they come from."""

import pytest

from audio import rewards
from audio.rewards import AUDIO_TERMS, audio_thinker_accuracy, audio_thinker_total, cesar_total, concept_similarity
from mmrl.chat import ChatTask, Completion
from mmrl.rewards import TEXT_TERMS


def said(text):
    return Completion(text=text, token_ids=(), stop_reason="stop")


def task(answer="B", question="Which sound?"):
    return ChatTask(id="t", messages=({"role": "user", "content": [{"type": "text", "text": question}]},), answer=answer)


def total(weights, completion, answer="B"):
    return sum(weight * AUDIO_TERMS[name](task(answer), said(completion)) for name, weight in weights.items())


# completion -> format_loose, format_answer, format_think, format_graded, first answer
FORMATS = [
    ("<think>a</think>\n<answer>B</answer>", 1, 0, 1, 1.00, "B"),
    ("<answer>B</answer>", 0, 1, 0, 0.75, "B"),
    ("<think>a</think><answer>B</answer> done", 0, 0, 0, 1.00, "B"),
    ("<think>a<answer>B</answer>", 0, 0, 0, 0.75, "B"),
    ("<think></think><answer></answer>", 1, 0, 1, 1.00, ""),
    ("", 0, 0, 0, 0.00, None),
    ("<answer>A</answer><answer>B</answer>", 0, 1, 0, 0.75, "A"),
    ("x<think>a</think>y<answer>b</answer>\n", 1, 0, 0, 1.00, "b"),
    ("<think>a</think>\n<answer>B</answer>  \n", 1, 0, 1, 1.00, "B"),  # white space at the end does not matter
]


@pytest.mark.parametrize(("text", "loose", "answer", "think", "graded", "first"), FORMATS)
def test_formats_and_the_first_answer(text, loose, answer, think, graded, first):
    found = [AUDIO_TERMS[f"format_{name}"](task(), said(text)) for name in ("loose", "answer", "think", "graded")]
    assert found == [loose, answer, think, graded]
    assert rewards.first_answer(text) == first


@pytest.mark.parametrize(
    ("completion", "answer", "text", "letter", "contains", "alnum"),
    [
        ("<answer> dog barking </answer>", "dog barking", 1, 0, 1, 1),
        ("<answer>Dog barking!</answer>", "dog barking", 0, 0, 1, 1),
        ("dog barking", "dog barking", 1, 0, 1, 0),  # no tags: the whole text is compared
        ("<answer>b</answer>", "B", 0, 1, 1, 1),
        ("<answer>(B).</answer>", "B", 0, 1, 1, 1),
        ("<answer>B. a dog</answer>", "B", 0, 0, 1, 0),
        ("<answer>A</answer><answer>B</answer>", "B", 0, 0, 1, 0),
        ("A B C D", "B", 0, 0, 1, 0),  # listing every option is what "contains" rewards
        ("<think>so</think><answer>B", "B", 0, 0, 1, 0),  # truncated
        ("", "B", 0, 0, 0, 0),
    ],
)
def test_accuracies(completion, answer, text, letter, contains, alnum):
    names = ("text", "letter", "contains", "alnum")
    assert [AUDIO_TERMS[f"accuracy_{name}"](task(answer), said(completion)) for name in names] == [
        text,
        letter,
        contains,
        alnum,
    ]


def test_accuracies_do_not_apply_without_an_answer():
    for name in ("text", "letter", "contains", "alnum"):
        assert AUDIO_TERMS[f"accuracy_{name}"](task(""), said("<answer></answer>")) is None


def test_a_truncated_completion_has_neither_accuracy_nor_format():
    text = "<think>the sound is a dog, so the answer must be"
    names = [name for name in AUDIO_TERMS if name not in ("accuracy_contains", "cesar_consistency")]
    assert all(AUDIO_TERMS[name](task(), said(text)) == 0 for name in names)


def test_weighted_sums_of_published_recipes():
    right, wrong = "<think>a dog</think><answer>B</answer>", "<think>a dog</think><answer>C</answer>"
    nemo = {"format_graded": 0.2, "accuracy_alnum": 0.8}
    assert total(nemo, right) == pytest.approx(1.0)
    assert total(nemo, "<answer>B</answer>") == pytest.approx(0.95)
    assert total(nemo, "<answer>C</answer>") == pytest.approx(0.15)
    ke_omni = {"accuracy_text": 2, "format_think": 1}
    assert (total(ke_omni, right), total(ke_omni, wrong)) == (3, 1)
    step_audio = {"accuracy_text": 0.8, "think_present": 0.2}
    assert total(step_audio, right) == pytest.approx(1.0)
    assert total(step_audio, "<think>\n\n</think><answer>B</answer>") == pytest.approx(0.8)
    assert total(step_audio, wrong) == pytest.approx(0.2)
    rubrics = {"accuracy_letter": 0.9, "format_loose": 0.1}
    assert (total(rubrics, right), total(rubrics, wrong)) == (pytest.approx(1.0), pytest.approx(0.1))


@pytest.mark.parametrize(
    ("share", "progress", "values"),
    [
        (0.50, 0.0, [0.606531, -0.393469, 1.213061, -1.393469]),
        (0.75, 0.25, [0.569783, -0.430217, 1.658058, -1.170971]),
        (0.25, 0.5, [0.882497, -0.117503, 1.374579, -1.312711]),
        (0.00, 1.0, [1, 0, 2, -1]),
        (1.00, 1.0, [1, 0, 2, -1]),
    ],
)
def test_audio_thinkers_adaptive_accuracy(share, progress, values):
    # think right, think wrong, no think right, no think wrong
    cases = [(True, True), (True, False), (False, True), (False, False)]
    found = [
        audio_thinker_accuracy(thinks=thinks, correct=correct, thinking_share=share, progress=progress)
        for thinks, correct in cases
    ]
    assert found == pytest.approx(values, abs=1e-6)


def test_audio_thinkers_total():
    where = {"thinks": True, "thinking_share": 0.75, "progress": 0.25}
    right, wrong = (audio_thinker_accuracy(correct=correct, **where) for correct in (True, False))
    assert audio_thinker_total(accuracy=right, consistent=1, format=1, quality=0.8) == pytest.approx(2.154674, abs=1e-6)
    assert audio_thinker_total(accuracy=wrong, consistent=1, format=1, quality=0.3) == pytest.approx(0.154674, abs=1e-6)


def test_cesars_total():
    assert cesar_total(accuracy=1, format=1, consistency=0.4 + 0.3, keywords=3, think_tokens=64) == pytest.approx(10.45)


def test_concepts_are_words_that_say_something():
    # {dog, barks} and {dog, barks, loud}: two shared of at most three.
    assert concept_similarity("the dog barks", "A dog barks, loud") == pytest.approx(2 / 3)
    assert concept_similarity("the", "the") == 0.0
    completion = said("<think>dog barks</think><answer>dog</answer>")
    # Answer: {dog} of {dog, barks}. Question "user: dog cat barks bird": 2 of 5.
    assert AUDIO_TERMS["cesar_consistency"](task(question="dog cat barks bird"), completion) == pytest.approx(1 / 2 + 2 / 5)


def test_no_name_is_taken_twice():
    assert not set(AUDIO_TERMS) & set(TEXT_TERMS)
