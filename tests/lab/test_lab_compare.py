"""``compare`` from end to end, with a training program that writes the contract's files and sends what it claims.

The times it writes are those of a link that is used in full: what ``compare`` makes of them is then known.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from breadth import spread
from thinwire.base.errors import ThinwireError
from thinwire.cli.compare import compare_main
from thinwire.lab import compare as module
from thinwire.lab import plots

pytestmark = pytest.mark.usefixtures("namespaces")
FAKE = """
import json, os, socket, sys, time
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
method, steps, out = flags["--method"], int(flags["--steps"]), Path(flags["--out"])
if method == flags.get("--crash"):
    sys.exit("boom" if os.environ["RANK"] == "1" else 0)
payload = {"none": 0, "dense": 1_000_000, "bf16": 500_000}.get(method, 250_000)
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
if rank == 0:
    server = socket.create_server(("", port))
    peer, _ = server.accept()
else:
    for _ in range(200):
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], port))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
def link():
    for line in open("/proc/self/net/dev"):
        name, _, rest = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            return int(rest.split()[8]), int(rest.split()[0])
rows, wire = [], 1000 * payload * 1514 / 1448 * 8 / 200e6  # ms at 200 Mbit/s
for step in range(1, steps + 1):
    if rank == 0:
        peer.sendall(bytes(payload))
        peer.recv(1)
    else:
        left = payload
        while left:
            left -= len(peer.recv(min(left, 1 << 16)))
        peer.sendall(b"x")
    row = {"step": step, "loss": 5.5 - 0.2 * step + 0.01 * len(method), "wall_s": step * (wire + 50) / 1000,
           "step_ms": wire + 50, "wire_ms": wire, "exposed_ms": wire, "tokens": 100 * step,
           "node_bytes": payload}
    if "--noted" in flags:
        row["link_tx_bytes"], row["link_rx_bytes"] = link()
    rows.append(row)
if rank == 0:
    out.mkdir(parents=True)
    rows.append({"step": steps, "valid_loss": 4.0, "wall_s": 1.0})
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    valid = float(flags.get("--seed", "4")) + 4 * ("--seed" in flags)
    valid *= float("nan") if "--nan" in flags else 1 + float(flags.get("--off", "0"))
    summary = {"method": method, "flags": flags,
               "step_ms": wire + 50, "exposed_ms": wire, "wire_ms": wire, "train_loss": 5.0,
               "encode_ms": 3, "decode_ms": 2,
               "valid_loss": valid, "wire_bytes_per_step": {"inter": payload, "intra": 0}}
    (out / "summary.json").write_text(json.dumps(summary))
    print("trained")
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return sys.executable, str(script)


def comparison(methods: list[str], steps: int, **settings: object) -> module.Comparison:
    return module.Comparison(methods=",".join(methods), preset="tiny", steps=steps, **settings)


@pytest.mark.parametrize(
    "extra, source", spread(2, [([], "less the silent run"), (["--noted", "yes"], "counters noted")])
)
def test_compare(tmp_path: Path, program: tuple[str, ...], extra: list[str], source: str,
                 capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    out = tmp_path / "out"
    methods = ["dense", "bf16", "int8(group=64)"]
    assert module.compare(comparison(methods, 5, out=out, extra=tuple(extra), program=program)) == 0
    report = json.loads((out / "report.json").read_text())
    runs = {run["method"]: run for run in report["runs"]}
    assert list(runs) == ["none", *methods], "the silent run comes first"
    assert report["emulated_network"] is True and report["rate_bits_per_s"] == 200e6
    for name in methods:
        counted = runs[name]["bytes_per_step"]
        assert counted["kernel_to_framed"] == pytest.approx(1, abs=0.01), counted
        assert source in counted["kernel_source"]
    assert runs["none"]["bytes_per_step"]["kernel_to_framed"] is None
    assert runs["dense"]["step_to_dense"] == 1
    assert runs["dense"]["step_to_none"] == pytest.approx((50 + 41.823) / 50, abs=1e-3)
    assert runs["bf16"]["step_to_dense"] == pytest.approx((50 + 20.912) / (50 + 41.823), abs=1e-3)
    assert runs["dense"]["link_use"] == pytest.approx(1, abs=0.01)
    written = (out / "report.md").read_text()
    page = (out / "report.html").read_text()
    for picture in ("loss_by_step", "loss_by_time", "loss_by_bytes", "bytes_per_step", "step_time"):
        assert "<svg " in (out / f"{picture}.svg").read_text() and f"({picture}.svg)" in written
        assert base64.b64encode((out / f"{picture}.svg").read_bytes()).decode() in page
    assert written.index("step_time.svg") < written.index("| method |") < written.index("loss_by_time.svg")
    assert re.search(r"torch \d.*, Thinwire \d", page.rpartition("How it was measured")[2]), "versions at the foot"
    assert runs["bf16"]["to_dense"] == [{"step": 5, "wall_s": pytest.approx(0.35456, abs=1e-3), "tokens": 500}]
    assert runs["int8(group=64)"]["to_dense"] == [None], "its loss is higher, by its long name"
    said = capsys.readouterr().out
    assert "int8(group=64)" in said and said.startswith(report["verdict"]) and report["verdict"] in written + page
    assert report["verdict"] == (
        "bf16: 1.3x faster than dense, loss +0.0%; int8(group=64): 1.5x faster, loss +0.0%; "
        "losses are after 5 steps, of one seed"
    )
    with pytest.raises(ThinwireError, match="not empty"):
        module.compare(comparison(methods, 5, out=out, program=program))


def test_a_distant_link_is_told(tmp_path: Path, program: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    assert module.compare(comparison(["dense"], 5, delay="2ms", loss="0.5%", out=out, program=program)) == 0
    report = json.loads((out / "report.json").read_text())
    assert (report["delay_s"], report["jitter_s"], report["loss_share"], report["reorder_share"]) == (
        0.002,
        0,
        0.005,
        0,
    )
    assert report["link"] == "200mbit" and report["delayed_by"] in ("netem", "forwarder")
    assert (report["forwarded"] is None) == (report["delayed_by"] == "netem")
    for written in ("report.md", "report.html"):
        assert f"200mbit per node, delay 2ms, loss 0.5% (by {report['delayed_by']})" in (out / written).read_text()


def test_loopback_is_recorded(tmp_path: Path, program: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    settings = comparison(["dense"], 5, link="loopback", extra=("--noted", "yes"), out=out, program=program)
    assert module.compare(settings) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["emulated_network"] is False
    assert report["runs"][1]["bytes_per_step"]["kernel"] is None
    assert "NO rate limit" in (out / "report.md").read_text()


def test_a_failing_method_has_a_row_and_the_others_go_on(
    tmp_path: Path, program: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: seeds, flags of a method's own, the optimizer that it is made for, a loss that is too high."""
    out = tmp_path / "out"
    methods = ["dense", "bf16", "int8 --lr 1e-3", "int8 --off 0.1", "sign --nan 1", "scape"]
    assert module.compare(comparison(
        methods, 5, link="loopback", seeds=2, first_seed=4, extra=("--crash", "bf16"), program=program, out=out,
        fail_if_loss_worse_than="5%", command="thinwire compare <here>",
    )) == 1  # fmt: skip
    said = capsys.readouterr()
    assert "boom" in said.err and "method bf16: seed 4: rank 1 failed" in said.err
    assert "loss is more than 5% above dense's: int8 --off 0.1 +10%" in said.err
    report = json.loads((out / "report.json").read_text())
    runs = {run["method"]: run for run in report["runs"]}
    assert list(runs) == ["none", *methods]
    assert runs["bf16"]["failed"].endswith("exit status 1: boom") and runs["bf16"]["summary"] is None
    assert "not finite" in runs["sign --nan 1"]["failed"]
    assert not (out / "bf16-seed-5").exists(), "it has failed already"
    assert [part["seed"] for part in runs["dense"]["parts"]] == [4, 5]
    assert runs["dense"]["summary"]["valid_loss"] == pytest.approx(8.5), "the seeds' mean"
    assert runs["dense"]["final"] == pytest.approx({"mean": 8.5, "low": 8.5 - 6.353, "high": 8.5 + 6.353})
    assert runs["int8 --lr 1e-3"]["loss_gap"] == {"mean": 0, "low": 0, "high": 0}, "the same seeds"
    assert runs["int8 --lr 1e-3"]["flags"] == ["--lr", "1e-3"]
    assert runs["scape"]["flags"] == ["--optimizer", "adams"] and not runs["dense"]["flags"]
    flags = json.loads((out / "scape-seed-5" / "summary.json").read_text())["flags"]
    assert flags["--optimizer"] == "adams" and flags["--seed"] == "5" and flags["--method"] == "scape"
    verdict, written = report["verdict"], (out / "report.md").read_text()
    assert "int8 --lr 1e-3: 1.0x" not in verdict and "int8 --lr 1e-3: 1.5x faster than dense, same loss" in verdict
    assert "do not use int8 --off 0.1 here: loss +10%" in verdict and "bf16 failed: seed 4: rank 1 failed" in verdict
    assert "| bf16 | failed | - |" in written and "* bf16 failed: seed 4: rank 1 failed" in written
    assert verdict in written and "* bf16 failed: seed 4: rank 1 failed" in said.out
    assert "scape: trained with --optimizer adams" in written
    page = (out / "report.html").read_text()
    assert "<li>bf16 failed: seed 4: rank 1" in page
    assert "&lt;here&gt;" in page and "<here>" not in page


@pytest.mark.parametrize("log", ["/dev/full", "nowhere/log"])
def test_a_disk_that_is_full_for_one_run_s_log_ends_no_other_run(log, tmp_path, program, monkeypatch, capsys):
    """What a full disk does not take of a log is lost, and not the run; without a log its method has failed."""
    log_of, out = module.log_of, tmp_path / "out"
    monkeypatch.setattr(module, "log_of", lambda run: tmp_path / log if run.name == "dense" else log_of(run))
    status = module.compare(comparison(["dense", "bf16"], 5, link="loopback", out=out, program=program))
    runs = {run["method"]: run for run in json.loads((out / "report.json").read_text())["runs"]}
    said = capsys.readouterr().err
    assert list(runs) == ["none", "dense", "bf16"] and not runs["none"]["failed"] and not runs["bf16"]["failed"]
    if log == "/dev/full":
        assert status == 0 and not runs["dense"]["failed"] and "log /dev/full is cut: No space left on device" in said
    else:
        assert status == 1 and runs["dense"]["failed"] == f"cannot use {tmp_path}/{log}: No such file or directory"


def no_space(*given: object, **named: object) -> None:
    raise OSError(28, "No space left on device", "x.svg")


@pytest.mark.parametrize("full", ["pictures", "report.json", "standard output"])
def test_a_full_disk_takes_files_or_the_table_and_not_both(full, tmp_path, program, monkeypatch, capsys):
    """An hour of runs has ended."""
    out = tmp_path / "out"
    place, name = {"pictures": (plots, "draw"), "report.json": (module.files, "write")}.get(
        full, (module.terminal, "say")
    )
    monkeypatch.setattr(place, name, no_space)
    if full == "standard output":
        monkeypatch.setattr(module, "say", lambda line: None)
    with pytest.raises(OSError, match="No space left on device"):
        module.compare(comparison(["dense"], 5, link="loopback", out=out, program=program))
    said = capsys.readouterr().out
    if full == "standard output":
        assert (out / "report.html").exists() and (out / "step_time.svg").exists()
    else:
        assert said.startswith("no method is faster than dense") or "dense" in said
        assert "report.html" not in said and (full == "report.json" or (out / "report.json").exists())


def test_a_full_disk_below_standard_error_ends_no_run(tmp_path, program, monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        run = comparison(
            ["dense", "bf16"], 5, link="loopback", extra=("--crash", "bf16"), out=tmp_path / "out", program=program
        )
        assert module.compare(run) == 1
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    runs = {run["method"]: run for run in json.loads((tmp_path / "out" / "report.json").read_text())["runs"]}
    assert [label for label, run in runs.items() if not run["failed"]] == ["none", "dense"]


def test_of_two_that_begin_at_once_one_has_the_folder(tmp_path, program, monkeypatch):
    """The second finds it empty as well: the first is still making its network."""
    open_cluster, out = module.open_cluster, tmp_path / "out"
    settings = comparison(["dense"], 5, link="loopback", out=out, program=program)

    def open_slowly(*given: object) -> object:
        monkeypatch.undo()
        with pytest.raises(ThinwireError, match=f"{out} is in use by another comparison: choose a new directory with"):
            module.compare(settings)
        return open_cluster(*given)

    monkeypatch.setattr(module, "open_cluster", open_slowly)
    assert module.compare(settings) == 0
    assert module.open_cluster is open_cluster, "the second was tried"


@pytest.mark.parametrize("package", ["matplotlib", "markdown_it"])
def test_a_package_that_the_report_needs_is_asked_for_before_the_runs(package, tmp_path, program, monkeypatch):
    for name in ("thinwire.lab.plots", "thinwire.lab.report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ThinwireError, match=f"the package '{package}' is not installed"):
        module.compare(comparison(["dense"], 5, link="loopback", out=tmp_path / "out", program=program))
    assert not (tmp_path / "out").exists()


def test_a_comparison_that_ended_before_its_first_run_leaves_its_folder_free(tmp_path, program, monkeypatch):
    settings = comparison(["dense"], 5, link="loopback", out=tmp_path / "out", program=program)
    monkeypatch.setattr(module, "open_cluster", no_space)
    with pytest.raises(OSError, match="No space"):
        module.compare(settings)
    monkeypatch.undo()
    assert module.compare(settings) == 0


def test_bad_input_is_refused_before_anything_runs(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    for argv, word in (
        (["--methods", "warp"], "warp"), (["--link", "fast"], "fast"), (["--steps", "0"], "steps"),
        (["--nodes", "1"], "one rank, which exchanges nothing"),
    ):  # fmt: skip
        with pytest.raises(ThinwireError, match=word):
            compare_main([*argv, *out])
    assert not (tmp_path / "out").exists()
