"""Which trickles there are, and what each is by its knobs alone."""

from __future__ import annotations

import itertools

import pytest

from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.codecs.intquant import Integers
from thinwire.methods import Trickle
from thinwire.methods.parts.feedback import share_of

KNOBS = {
    "mask": ("own", "merged"), "bits": (4, 8), "group": (64, 32), "server_density": (None, 0.5, 1.0, 0.0),
    "density": (0.01, 1.0, 0.0009, 0.0),
}  # fmt: skip
DEFAULTS = {name: values[0] for name, values in KNOBS.items()} | {"bits": 8}


def refused(mask: str, bits: int, group: int, server_density: float | None, density: float) -> str:
    """What is wrong with these knobs, in words of the message; "" where nothing is."""
    if not 0 < density <= 1:
        return "density is the share"
    if server_density is not None and not 0 < server_density <= 1:
        return "server_density is the share"
    if mask != "merged" and server_density is not None:
        return f"server_density does nothing with mask='{mask}'"
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
            assert method.make_codec() == Integers(group, bits)
            assert method.card.group == 64
            assert method.card.summed_by_network == method.card.grows_with_ranks == (mask == "own")
            assert method.at_one_mask == (mask == "merged" and knobs["server_density"] != 1)
            assert method.default_share == share_of(density)
            assert set(method.card.promise.waits) == ({"residual", "server"} if mask == "merged" else {"residual"})
    assert made > 20


def test_weights_are_refused_where_there_is_no_mask_for_all():
    assert Trickle(mask="merged", weights="masked").weights == "masked"
    with pytest.raises(ThinwireError, match="weights does nothing with mask='own'"):
        Trickle(weights="masked")
    with pytest.raises(ThinwireError, match="weights does nothing with feedback='gradients'"):
        Trickle(mask="merged", feedback="gradients", weights="masked")


def test_what_does_not_grow_is_told_by_the_knobs():
    for spec, bits in (("trickle", 8), ("trickle(bits=4, feedback='updates(delivered_share=0.5)')", 4)):
        other = methods.resolve(methods.resolve(spec).card.instead_at_scale)
        assert (other.mask, other.bits, other.feedback) == ("merged", bits, methods.Updates()), spec
    assert methods.resolve("trickle:merged").card.instead_at_scale == ""
