"""torchft's manager as ``thinwire train --elastic`` opens it, for replicas of one rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from thinwire.adapters.transport import Transport
from thinwire.base.extras import load


def open_manager(name: str, address: str, *, min_replicas: int, timeout_s: float, longest_s: float) -> Any:
    """Open a ``torchft.Manager``, which tells the lighthouse (TORCHFT_LIGHTHOUSE) from now on that this replica lives.

    Its attribute ``asking`` says whether it waits for the lighthouse's answer. torch's store of this replica's one rank
    must be there (MASTER_ADDR, MASTER_PORT).

    Args:
        name: of the replica. address: this machine's, by which the others reach it.
        min_replicas: fewest replicas that take a step.
        timeout_s: seconds to wait for the others in an exchange. longest_s: for so many that a step can be taken.

    Raises:
        RuntimeError: the lighthouse does not answer.
    """
    torchft: Any = load("torchft")

    class Manager(torchft.Manager):
        asking = False

        def wait_quorum(self) -> None:
            self.asking = True
            try:
                super().wait_quorum()
            finally:
                self.asking = False

    patience = timedelta(seconds=timeout_s)
    return Manager(
        pg=torchft.ProcessGroupGloo(timeout=patience), load_state_dict=None, state_dict=None,
        min_replica_size=min_replicas, use_async_quorum=False, timeout=patience,
        quorum_timeout=timedelta(seconds=longest_s), connect_timeout=patience, rank=0, world_size=1, replica_id=name,
        hostname=address, checkpoint_transport=Transport(address, patience),
    )  # fmt: skip
