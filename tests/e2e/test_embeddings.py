"""Embeddings of the default model with the real processes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"
SIMILAR = (
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
    ("How do I reset my password?", "I forgot my password and cannot log in."),
    ("It will rain tomorrow in the mountains.", "Tomorrow's weather in the Alps: rain."),
    ("The bank raised its interest rates.", "Interest rates were increased by the central bank."),
)
TEXTS = [text for pair in SIMILAR for text in pair]


def vectors(server: Server, texts: object, **fields: object) -> np.ndarray:
    with server.client() as client:
        answer = client.embeddings.create(model=MODEL, input=texts, extra_body=fields)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return np.array([one.embedding for one in answer.data])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_batch_is_its_single_inputs_and_all_have_length_one(server: Server, pooling: str) -> None:
    texts = [*TEXTS[::2], "a", "word " * 600]
    batch = vectors(server, texts, pooling=pooling)
    np.testing.assert_allclose(np.linalg.norm(batch, axis=1), 1, atol=1e-6)
    for text, vector in zip(texts, batch, strict=True):
        np.testing.assert_allclose(vectors(server, text, pooling=pooling)[0], vector, atol=2e-4)
    assert np.abs(np.diff(batch, axis=0)).max(axis=1).min() > 0.01


def test_similar_texts_are_nearer_than_others(server: Server) -> None:
    batch = vectors(server, TEXTS, pooling="mean")
    # All vectors of a chat model share one direction.
    centred = batch - batch.mean(axis=0)
    centred /= np.linalg.norm(centred, axis=1, keepdims=True)
    likeness = centred @ centred.T
    np.fill_diagonal(likeness, -1)
    assert [int(nearest) for nearest in likeness.argmax(axis=1)] == [index ^ 1 for index in range(len(TEXTS))]


async def test_chat_goes_on_beside_a_large_batch(server: Server) -> None:
    async with server.async_client() as client:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        options = {"model": MODEL, "messages": question, "temperature": 0, "max_tokens": 8}
        alone = (await client.chat.completions.create(**options)).choices[0].message.content
        answers: list[str | None] = []
        # The ratio of the times depends on the machine. If the batch blocked the chat, the ratio would be 1.
        for num_inputs in (40, 160, 640):
            inputs = [f"Sentence number {index} of a long list." for index in range(num_inputs)]
            asked = client.embeddings.create(model=MODEL, input=inputs, extra_body={"pooling": "mean"})
            batch = asyncio.create_task(asked)
            answers = []
            while not batch.done():
                answers.append((await client.chat.completions.create(**options)).choices[0].message.content)
            assert len((await batch).data) == num_inputs
            if len(answers) > 2:
                break
        # The batch may have ended before the last one.
        assert len(answers) > 2 and set(answers) == {alone}
