"""Count sketch of the values at a mask, and its inversion by peeling.

A row's sketch is three tables of ``cells`` float32. Element i adds sign(i) * value to cell h_j(i) of table j = 0, 1, 2.
Who knows the *index* (the mask of all elements that were added, by anybody) knows how many elements every cell holds:
one that is alone in a cell is read there and taken out of its other two cells, and so on. This ends with nothing left
as long as the elements are fewer than 0.818 of the cells (three hashes; Molloy 2005); beyond, most are left.

A value is recovered as a difference of differences, so rounding in the sums would grow from one to the next, ten
thousandfold near the limit. Therefore values are first rounded to multiples of one power of two (``round_to``) that is
coarse enough for every cell's sum to be exact in float32; what that leaves over stays with the sender.

Which elements can be recovered depends on the index and the hashes alone, so every rank knows it without values.
Hashes: 64 bits of splitmix64 at i for the first two, mixed once more for the third and the sign (``reference.hashes``).
"""

from __future__ import annotations

from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.ops.backends import backend

__all__ = ["round_to", "settle", "sketch_encode", "sketch_peel"]

_backend = backend("thinwire.ops.sketch")


def sketch_encode(payload: Tensor, words: Tensor, seed: int, out: Tensor) -> Tensor:
    """``out`` (R, 3 cells) = the sketch of ``payload`` (R, k), the values at the set bits of ``words`` (R, n / 64).

    Here and in ``settle`` a row may have fewer set bits than k; what follows in ``payload`` is not read.
    """
    if out.shape[1] % 3 or not out.shape[1]:
        raise ThinwireError(f"a sketch is three tables of equal size, got {out.shape[1]} cells")
    _backend(payload).sketch_encode(payload, words, seed, out)
    return out


def sketch_peel(
    sketch: Tensor, index: Tensor, seed: int, out: Tensor | None, left: Tensor, *, estimate: bool = False
) -> Tensor:
    """Recover what ``sketch`` (R, 3 cells) holds at ``index`` (R, n / 64), the union of all masks that were added.

    ``out`` (R, n) float32 = the values recovered, 0 elsewhere (None: only find out what can be recovered; the
    sketch's values are not read). ``left`` (R, n / 64) = the elements of ``index`` that cannot be recovered; with
    ``estimate`` they get the median of their three signed cells, as the paper does (about 100% off).
    """
    _backend(index).sketch_peel(sketch, index, seed, out, left, estimate)
    return left


def round_to(payload: Tensor, quantum: Tensor, rest: Tensor) -> Tensor:
    """``payload`` (R, k) becomes the nearest multiples of ``quantum`` (1, 1), a power of two; ``rest`` what is left."""
    _backend(payload).round_to(payload, quantum, rest)
    return payload


def settle(sent: Tensor, rest: Tensor, words: Tensor, left: Tensor, out: Tensor) -> Tensor:
    """At the mask ``words``: ``out`` (R, n) = ``rest`` (R, k), or ``sent`` + ``rest`` where ``left`` says so.

    ``out`` elsewhere is unchanged. What was sent and could not be recovered is thus back where it came from.
    """
    _backend(out).settle(sent, rest, words, left, out)
    return out
