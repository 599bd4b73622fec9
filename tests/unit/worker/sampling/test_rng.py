"""Conformance of the noise to docs/randomness.md."""

import re
from pathlib import Path

import pytest
import torch

from kernels.ops.sampling.philox import STREAM, XTC_STREAM, gumbel_noise, philox4x32
from worker.sampling.parameters import seed_words

DOCUMENT = (Path(__file__).parents[4] / "docs" / "randomness.md").read_text()
KNOWN_ANSWERS = re.findall(r"\| `((?:\w{8} ){3}\w{8})` \| `(\w{8} \w{8})` \| `((?:\w{8} ){3}\w{8})` \|", DOCUMENT)
VECTORS = re.findall(r"\| (-?\d+) \| (\d+) \| (\d+) \| (\d+) \| `(\w{8})` \| (-?[\d.]+) \|", DOCUMENT)

COINS = re.findall(r"(?m)^\| (-?\d+) \| (\d+) \| (\d+) \| `(\w{8})` \| (0\.\d+) \|", DOCUMENT)


def words(text):
    return torch.tensor([int(word, 16) for word in text.split()])


def test_the_document_has_its_vectors():
    assert len(KNOWN_ANSWERS) == 3
    assert len(VECTORS) == 8
    assert len(COINS) == 5
    # A published known answer, so that document and code cannot both be wrong.
    assert KNOWN_ANSWERS[0][2] == "6627e8d5 e169c58d bc57ac4c 9b00dbd8"


@pytest.mark.parametrize("counter,key,expected", KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    assert torch.equal(philox4x32(words(counter), words(key)), words(expected))


@pytest.mark.parametrize("seed,choice,position,token,word,noise", VECTORS)
def test_vectors(seed, choice, position, token, word, noise):
    low, high = seed_words(int(seed))
    token = int(token)
    counter = torch.tensor([token // 4, int(position), int(choice), STREAM])
    assert philox4x32(counter, torch.tensor([low, high]))[token % 4] == int(word, 16)
    key = torch.tensor([[low], [high]])
    computed = gumbel_noise(key, torch.tensor([int(choice)]), torch.tensor([int(position)]), token + 1)
    assert computed[0, token].item() == pytest.approx(float(noise), rel=1e-7)


@pytest.mark.parametrize("seed,choice,position,word,coin", COINS)
def test_coins(seed, choice, position, word, coin):
    counter = torch.tensor([0, int(position), int(choice), XTC_STREAM])
    found = int(philox4x32(counter, torch.tensor(seed_words(int(seed))))[0])
    assert found == int(word, 16)
    assert ((found >> 8) + 0.5) / 2**24 == pytest.approx(float(coin), abs=1e-9)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32) - 5])
def test_seed_words_are_twos_complement(seed):
    low, high = seed_words(seed)
    assert 0 <= low < 2**32 and 0 <= high < 2**32
    assert ((high << 32 | low) - seed) % 2**64 == 0
