"""What the tests of the laboratory share: without network namespaces those that ask for them are skipped."""

from __future__ import annotations

import pytest

from thinwire.lab.cluster import Cluster, NoNamespaces


@pytest.fixture(scope="module")
def namespaces() -> None:
    try:
        with Cluster(1, 1, "unlimited"):
            pass
    except NoNamespaces as error:
        pytest.skip(f"needs network namespaces: {error}")
