"""The doctor on a slow link: the rate that it measures with the collectives is the link's, less what frames take."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.lab.cluster import Cluster
from thinwire.lab.framing import efficiency
from thinwire.lab.run import launch
from thinwire.predict.cluster import read_cluster

pytestmark = pytest.mark.usefixtures("namespaces")


def test_the_measured_rate_is_that_of_the_link(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a line of text\n" * 3000)
    out, log = tmp_path / "cluster.toml", tmp_path / "log"
    command = ["thinwire", "doctor", "--preset", "tiny", "--seconds", "10", "--methods", "dense", "--out", str(out),
               "--", "--corpus", str(tmp_path / "text")]  # fmt: skip
    with Cluster(2, 1, "50mbit") as cluster:
        outcome = launch(cluster, command, log=log)
    assert outcome.returncode == 0, log.read_text()
    assert read_cluster(out).inter_rate.value == pytest.approx(50e6 / 8 * efficiency(), rel=0.15)
