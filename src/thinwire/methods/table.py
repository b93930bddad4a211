"""The methods that have a name. Adding one is a file beside this one, and a line here."""

# ruff: noqa: I001  (the order is that in which they are listed)
from thinwire.methods.baselines import Dense as Dense
from thinwire.methods.base import Fp32 as Fp32
from thinwire.methods.baselines import Bf16 as Bf16
from thinwire.methods.baselines import Int8 as Int8
from thinwire.methods.radius import Radius as Radius
from thinwire.methods.scape import SCAPE as SCAPE
from thinwire.methods.separate import SEPARATE as SEPARATE
from thinwire.methods.tagc import TAGC as TAGC
from thinwire.methods.sdp4bit import SDP4Bit as SDP4Bit
from thinwire.methods.tagc import LHC as LHC
from thinwire.methods.sdp4bit import ZeROPP as ZeROPP
from thinwire.methods.sdp4bit import QSDP as QSDP
from thinwire.methods.loco import LoCo as LoCo
from thinwire.methods.powersgd import PowerSGD as PowerSGD
from thinwire.methods.topk import TopK as TopK
from thinwire.methods.trickle import Trickle as Trickle
from thinwire.methods.dgc import DGC as DGC
from thinwire.methods.sign import Sign as Sign
from thinwire.methods.onebit import OneBitAdam as OneBitAdam
from thinwire.methods.localsteps import LocalSteps as LocalSteps
from thinwire.methods.baselines import NoExchange as NoExchange
