"""Which trickles there are, and what each is by its knobs alone."""

from __future__ import annotations

import itertools

import pytest

from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.codecs.intquant import Integers
from thinwire.codecs.sparse import TILE, TiledTopK
from thinwire.methods import Trickle
from thinwire.methods.parts.feedback import portion_of

KNOBS = {
    "mask": ("own", "shared", "merged"), "bits": (2, 4, 8, 32), "group": (64, 32), "choosers": (4, 0, 1, 2),
    "answer": (0.1, 0.5, 1.0, 0.0), "density": (0.01, 1.0, 4 / TILE, 0.0009, 0.0),
}  # fmt: skip
DEFAULTS = {name: values[0] for name, values in KNOBS.items()} | {"bits": 8}


def refused(mask: str, bits: int, group: int, choosers: int, answer: float, density: float) -> str:
    """What is wrong with these knobs, in words of the message; "" where nothing is."""
    if bits == 2 and density * 4096 < 4:
        return "bits=2 sends 4 of every 4096 values at least: density is 4/4096 or more"
    if not 0 < density <= 1:
        return "density is the share"
    if choosers < 1:
        return "choosers is a number of ranks, 1 or more"
    if not 0 < answer <= 1:
        return "answer is the share"
    if mask != "shared" and choosers != 4:
        return f"choosers does nothing with mask='{mask}'"
    if mask != "merged" and answer != 0.1:
        return f"answer does nothing with mask='{mask}'"
    if bits in (2, 32) and group != 64:
        return f"group does nothing with bits={bits}"
    if mask != "shared" and bits == 32:
        return "bits=32 is for mask='shared'"
    if mask != "own" and bits == 2:
        return "bits=2 is for mask='own': take " + ("4, 8 or 32" if mask == "shared" else "4 or 8") + " with"
    return ""


@pytest.mark.parametrize("mask", KNOBS["mask"])
def test_a_knob_that_does_nothing_is_refused_and_so_is_what_cannot_be_sent(mask):
    """Any two knobs beside the mask; each refusal says whose knob, and all else is a trickle."""
    made = 0
    for one, other in itertools.combinations([name for name in KNOBS if name != "mask"], 2):
        for values in itertools.product(KNOBS[one], KNOBS[other]):
            knobs = DEFAULTS | {"mask": mask, one: values[0], other: values[1]}
            if words := refused(**knobs):
                with pytest.raises(ThinwireError) as error:
                    Trickle(**knobs)
                assert str(error.value).startswith("trickle: ") and words in str(error.value), knobs
                continue
            made += 1
            method = Trickle(**knobs)
            bits, group, density = knobs["bits"], knobs["group"], knobs["density"]
            if bits == 2:
                assert method.make_codec() == TiledTopK(int(density * TILE) // 4 * 4)
            else:
                assert method.make_codec() == (None if bits == 32 else Integers(group, bits))
            assert method.card.group == (TILE if bits == 2 else 64)
            assert method.card.summed_by_network == method.card.grows_with_ranks == (mask == "own")
            share = {"own": 1.0, "shared": density, "merged": knobs["answer"]}[mask]
            assert method.at_one_mask == (share < 1)
            assert method.usual_portion == portion_of(density / 2 if mask == "shared" else density)
            assert set(method.card.promise.waits) == ({"residual", "server"} if mask == "merged" else {"residual"})
    assert made > 20


def test_weights_are_refused_where_there_is_no_mask_for_all():
    for mask, fits in (("own", False), ("shared", True), ("merged", True)):
        if fits:
            assert Trickle(mask=mask, weights="masked").weights == "masked"
            continue
        with pytest.raises(ThinwireError, match="weights does nothing with mask='own'"):
            Trickle(mask=mask, weights="masked")
    with pytest.raises(ThinwireError, match="weights does nothing with feedback='gradient'"):
        Trickle(mask="shared", feedback="gradient", weights="masked")


def test_what_does_not_grow_is_told_by_the_knobs():
    for spec, bits in (("trickle", 8), ("trickle(bits=2)", 4), ("trickle(bits=4,portion=0.5)", 4)):
        other = methods.resolve(methods.resolve(spec).card.instead_at_scale)
        assert (other.mask, other.bits, other.portion) == ("merged", bits, None), spec
    assert not any(methods.resolve(f"trickle:{mask}").card.instead_at_scale for mask in ("shared", "merged"))
