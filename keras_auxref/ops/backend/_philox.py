"""Random numbers that are the same for the same seed on every backend and device: Philox 4×32 with ten rounds, in NumPy.

The bits are those of TensorFlow's own operation; the numbers made from them agree up to rounding.
"""

import math

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_WORD = np.uint64(0xFFFFFFFF)
_SCRAMBLING_KEY = (0x3EC8F720, 0x02461E29)
_SMALLEST = 1e-7


def philox_uniform(shape: tuple[int, ...], seed: tuple[int, int], dtype: str) -> np.ndarray:
    """TensorFlow's `stateless_uniform(…, alg="philox")`, bit by bit: random bits as the mantissa in [1, 2), minus 1."""
    size = math.prod(shape)
    words = 2 * size if dtype == "float64" else size
    return _fractions(_bits(seed, words), dtype)[:size].reshape(shape)


def philox_normal(shape: tuple[int, ...], seed: tuple[int, int], dtype: str) -> np.ndarray:
    """TensorFlow's `stateless_normal(…, alg="philox")`: Box & Muller, √(−2 log u)·(sin 2πv, cos 2πv)."""
    size = math.prod(shape)
    words = 2 * (size + size % 2) if dtype == "float64" else size + size % 2
    u = _fractions(_bits(seed, words), dtype)
    u = u[: len(u) // 2 * 2].reshape(-1, 2)
    radius = np.sqrt(-2 * np.log(np.maximum(u[:, 0], u.dtype.type(_SMALLEST))))
    angle = u.dtype.type(2 * math.pi) * u[:, 1]
    return np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=-1).reshape(-1)[:size].reshape(shape)


def _fractions(words: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float64":
        high, low = words[0::2].astype(np.uint64), words[1::2].astype(np.uint64)
        mantissa = (high & np.uint64(0xFFFFF)) << np.uint64(32) | low
        return (np.uint64(1023) << np.uint64(52) | mantissa).view(np.float64) - 1
    return (np.uint32(127 << 23) | (words & np.uint32(0x7FFFFF))).view(np.float32) - np.float32(1)


def _bits(seed: tuple[int, int], words: int) -> np.ndarray:
    """The first words of the stream of a seed, as TensorFlow derives it: the seed is scrambled into key and counter."""
    first, second = (number % 2**64 for number in seed)
    start = [np.array([part], np.uint64) for number in (first, second) for part in (number % 2**32, number >> 32)]
    key0, key1, counter2, counter3 = (part[0] for part in _philox(start, _SCRAMBLING_KEY))
    count = -(-words // 4)
    index = np.arange(count, dtype=np.uint64)
    counters = [index & _WORD, index >> np.uint64(32), np.full(count, counter2), np.full(count, counter3)]
    return np.stack(_philox(counters, (int(key0), int(key1))), axis=-1).reshape(-1)[: max(words, 0)].astype(np.uint32)


def _philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Ten rounds of Philox 4×32 (Salmon et al. 2011) on counters of four words, held in 64 bits."""
    key0, key1 = np.uint64(key[0]), np.uint64(key[1])
    a, b, c, d = counter
    for _ in range(10):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> np.uint64(32)) ^ b ^ key0, right & _WORD, (left >> np.uint64(32)) ^ d ^ key1, left & _WORD
        key0, key1 = (key0 + _WEYL[0]) & _WORD, (key1 + _WEYL[1]) & _WORD
    return [a, b, c, d]
