"""The methods that have a name. Adding one is a file beside this one, and a line here."""

# ruff: noqa: I001  (the order is that in which they are listed)
from thinwire.methods.baselines.plain import Dense as Dense
from thinwire.core.method import Fp32 as Fp32
from thinwire.methods.baselines.plain import Bf16 as Bf16
from thinwire.methods.baselines.plain import Int8 as Int8
from thinwire.methods.papers.radius import Radius as Radius
from thinwire.methods.papers.scape import SCAPE as SCAPE
from thinwire.methods.papers.separate import SEPARATE as SEPARATE
from thinwire.methods.papers.tagc import TAGC as TAGC
from thinwire.methods.papers.sdp4bit import SDP4Bit as SDP4Bit
from thinwire.methods.baselines.lhc import LHC as LHC
from thinwire.methods.baselines.zeropp import ZeROPP as ZeROPP
from thinwire.methods.baselines.qsdp import QSDP as QSDP
from thinwire.methods.baselines.loco import LoCo as LoCo
from thinwire.methods.baselines.powersgd import PowerSGD as PowerSGD
from thinwire.methods.baselines.topk import TopK as TopK
from thinwire.methods.ours.trickle import Trickle as Trickle
from thinwire.methods.baselines.dgc import DGC as DGC
from thinwire.methods.baselines.sign import Sign as Sign
from thinwire.methods.baselines.onebit import OneBitAdam as OneBitAdam
from thinwire.methods.baselines.localsteps import LocalSteps as LocalSteps
from thinwire.methods.baselines.plain import NoExchange as NoExchange
