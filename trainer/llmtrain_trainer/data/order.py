"""The order of samples: which sequence is the n-th that training sees. A pure function of (seed, n)."""

from __future__ import annotations

from dataclasses import dataclass

_MASK = (1 << 64) - 1
_ROUNDS = 6


@dataclass(frozen=True)
class SampleOrder:
    """Epoch after epoch, each a new permutation of all sequences, computed one element at a time.

    A Feistel network over the smallest even power of two that holds `count`, walked until it lands inside (Black and
    Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). No table is held, however large the data, any position is
    reached at once, and the order depends on no library's version.
    """

    count: int
    """Sequences in the data."""
    seed: int

    def sequence(self, sample: int) -> int:
        """Return the sequence that sample number `sample` (from 0, over all epochs) is."""
        epoch, index = divmod(sample, self.count)
        half_bits = max(1, ((self.count - 1).bit_length() + 1) // 2)
        key = _mix(self.seed ^ _mix(epoch + 1))
        while True:
            index = _feistel(index, half_bits, key)
            if index < self.count:
                return index


def _feistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(_ROUNDS):
        left, right = right, left ^ (_mix(key + right * _ROUNDS + round_number) & mask)
    return left << half_bits | right


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
