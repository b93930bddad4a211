"""Clusters: what is read is what was written, one line per fault, and few constants that were fitted."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.base.errors import ThinwireError
from thinwire.predict.cluster import CONSTANTS, Cluster, Constant, Kernel, cluster_names, read_cluster, write_cluster

ROOT = Path(__file__).parents[2]


def plain(**changes) -> Cluster:
    """A cluster whose constants are all 1, and certain."""
    return Cluster("plain", "none", 1, **{**dict.fromkeys(CONSTANTS, Constant(1.0, "measured")), **changes})


def test_what_was_written_is_read(tmp_path):
    cluster = plain(
        intra_latency=Constant(0.0, "datasheet"),
        flops=Constant(3.1e14, "fitted:a paper, 'Table 1', dense", 0.9, 1.25),
        note='a "quoted" \\ line\nand another',
        codec_on_core=True,
        kernels={"ops.quantise.encode": Kernel(1e-5, 2.5e9), "aten::add": Kernel(0.0, 1e10)},
    )
    write_cluster(cluster, tmp_path / "c.toml")
    assert read_cluster(tmp_path / "c.toml") == cluster


@pytest.mark.parametrize("name", cluster_names())
def test_a_shipped_cluster_is_read_and_says_where_each_constant_comes_from(name, tmp_path):
    cluster = read_cluster(name)
    assert cluster.name == name
    write_cluster(cluster, tmp_path / "c.toml")
    assert read_cluster(tmp_path / "c.toml") == cluster
    for constant, value in cluster.constants.items():
        if value.source != "measured" and constant not in ("host_seconds_per_byte", "memory_bytes"):
            assert value.low < 1 < value.high, f"{constant} has no range"
    assert not cluster.kernels, "kernels are measured by `thinwire doctor`, not shipped"


@pytest.mark.parametrize("name", cluster_names())
def test_at_most_two_constants_are_fitted_each_to_a_dense_row_that_is_published(name):
    cluster = read_cluster(name)
    rows = [
        constant.source.removeprefix("fitted:")
        for constant in cluster.constants.values()
        if "fitted:" in constant.source
    ]
    assert len(rows) <= 2
    with (ROOT / "docs" / "data" / "published.csv").open(newline="") as file:
        published = {row["row"]: row for row in csv.DictReader(file)}
    with (ROOT / "docs" / "data" / "diloco_measured.csv").open(newline="") as file:
        runs = {row["run"]: row for row in csv.DictReader(line for line in file if line[0] != "#")}
    for row in rows:
        if row in published:
            assert published[row]["scheme"].startswith("dense") and published[row]["class"] == "a", row
        else:
            assert runs[row]["algorithm"] == "ddp", row


FAULTS = {
    "speed = 3\n": "unknown field speed",
    "per_node = 0\n": "per_node",
    "per_node = 1.5\n": "per_node is int",
    "flops = 3.0\n": "is a table like",
    "flops = { value = 3.0 }\n": "source is missing",
    "flops = { value = -1.0, source = 'measured' }\n": "must be above 0",
    "flops = { value = nan, source = 'measured' }\n": "must be above 0",
    "inter_latency = { value = -1.0, source = 'measured' }\n": "must be 0 or more",
    "flops = { value = 1.0, source = 'guess' }\n": "got 'guess'",
    "flops = { value = 1.0, source = 'fitted:' }\n": "got 'fitted:'",
    "flops = { value = 1.0, source = 'assumed', low = 1.5 }\n": "low <= 1 <= high",
    "flops = { value = 1.0, source = 'assumed', spread = 1.5 }\n": "unknown field spread",
    "flops = { value = 'x', source = 'assumed' }\n": "value is a number",
    "[kernels]\nencode = { seconds = 1.0 }\n": "rate is missing",
    "[kernels]\nencode = { seconds = 1.0, rate = 0.0 }\n": "rate > 0",
    "flops = \n": "Invalid value",
    "": "flops is missing",
}


@pytest.mark.parametrize("line", FAULTS)
def test_a_fault_is_one_line_that_names_it(line, tmp_path):
    write_cluster(plain(), tmp_path / "c.toml")
    key = line.partition(" ")[0] or "flops"
    rest = [text for text in (tmp_path / "c.toml").read_text().splitlines() if not text.startswith(f"{key} =")]
    (tmp_path / "c.toml").write_text("\n".join(rest) + "\n" + line)
    with pytest.raises(ThinwireError, match=re.escape(FAULTS[line])) as caught:
        read_cluster(tmp_path / "c.toml")
    assert "\n" not in str(caught.value)


def test_a_cluster_that_is_not_there():
    with pytest.raises(ThinwireError, match=r"there is no cluster 'nowhere'.* one of .*perlmutter"):
        read_cluster("nowhere")
    with pytest.raises(ThinwireError, match=r"there is no cluster file nowhere\.toml"):
        read_cluster("nowhere.toml")


def test_another_link():
    cluster = replace(plain(), per_node=8).with_link(1.25e9)
    assert cluster.inter_rate.value == 1.25e9 and cluster.per_node == 8


def test_no_published_number_is_in_the_source():
    """Numbers of at least 4 digits. (plan/measured.csv has losses that we measured.)"""
    with (ROOT / "docs" / "data" / "published.csv").open(newline="") as file:
        numbers = {row["value"] for row in csv.DictReader(file) if row["class"] in ("a", "b", "c", "input")}
    numbers = {number for number in numbers if len(number.replace(".", "").lstrip("0-")) >= 4}
    assert len(numbers) > 40
    pattern = re.compile(r"(?<![\d.])(" + "|".join(map(re.escape, sorted(numbers))) + r")(?![\d.])")
    source = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".toml", ".yaml")]
    assert not [(path.name, hit[0]) for path in source for hit in pattern.finditer(path.read_text())]
