"""The digest of `docs/digests.md`, in plain Python and numpy, from that page alone."""

from __future__ import annotations

import numpy as np

P = 2**127 - 1
_MASK = 2**64 - 1


def _outputs(count: int) -> list[int]:
    outputs, state = [], 0
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        outputs.append(z ^ (z >> 31))
    return outputs


_OUTPUTS = _outputs(514)
KEYS = [output >> 3 for output in _OUTPUTS[:512]]
RADIX = ((_OUTPUTS[512] << 64) | _OUTPUTS[513]) % 2**127


def digest_of(content: bytes) -> int:
    """The digest of a whole tensor: block after block, the last first."""
    blocks = -(-len(content) // 4096)
    words = np.frombuffer(content.ljust(4096 * blocks, b"\0"), "<u8").reshape(blocks, 512)
    # In limbs of 16 bits, whose products and their sums of 512 are exact in float64.
    shifts = np.array([0, 16, 32, 48], np.uint64)
    limbs = ((words[:, :, None] >> shifts) & np.uint64(0xFFFF)).astype(float)
    keys = ((np.array(KEYS, np.uint64)[:, None] >> shifts) & np.uint64(0xFFFF)).astype(float)
    sums = np.einsum("bkw,kf->bwf", limbs, keys, optimize=True).astype(np.int64)
    total = 0
    for block in sums[::-1].tolist():
        inner = sum(block[w][f] << 16 * (w + f) for w in range(4) for f in range(4))
        total = (total * RADIX + inner) % P
    return total


def digest_of_part(content: bytes, runs: list[tuple[int, bytes]]) -> int:
    """The digest of runs of bytes of a tensor of as many bytes as `content`, each with its position."""
    zeros = bytearray(len(content))
    for position, run in runs:
        zeros[position : position + len(run)] = run
    return digest_of(bytes(zeros))
