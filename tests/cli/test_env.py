"""``thinwire env``: true facts, in lines that fit, as text and as JSON; nothing secret; also where torch is broken."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import thinwire
from thinwire.base.errors import ThinwireError
from thinwire.base.extras import EXTRAS
from thinwire.base.version import NEWEST_TORCH
from thinwire.cli import environment
from thinwire.cli.environment import facts, main, network_notes, shown

BROKEN = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file")
sys.meta_path.insert(0, Broken())
from thinwire.cli.program import main
sys.exit(main(["env", *sys.argv[1:]]))
"""


def test_json_and_text_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["thinwire"]["version"] == thinwire.__version__
    assert found["torch"]["version"] == torch.__version__ and "gloo" in found["torch"]["backends"]
    assert set(found["packages"]) == {*EXTRAS, "numpy"} and found["packages"]["numpy"]
    (loopback,) = [of for of in found["interfaces"] if of["name"] == "lo"]
    assert loopback["mtu"] > 1000 and loopback["address"] in ("127.0.0.1", None)
    assert main([]) == 0
    text = capsys.readouterr().out
    for word in (thinwire.__version__, torch.__version__, "lo: ", "gloo"):
        assert word in text


def test_what_is_missing_is_said_with_its_reason_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "installed", lambda name: None if name in ("numba", "PyYAML") else "1.0")
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    found = facts()
    assert set(found["missing"]) == {"numba", "yaml", "ip"} and "iproute2" in found["missing"]["ip"]
    assert found["missing"]["numba"] == (
        "fast kernels on CPUs; without it they run as plain torch: pip install 'thinwire[cpu]'"
    )
    assert "missing    numba: fast kernels on CPUs" in shown(found)


def test_text_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert all(len(line) <= 80 for line in shown(facts()).splitlines())


def test_only_named_variables_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MASTER_ADDR", "AWS_SECRET"):
        monkeypatch.setenv(name, "hidden")
    found = facts()
    assert found["variables"]["NCCL_DEBUG"] == "INFO" and "hidden" not in json.dumps(found)


def test_where_gloo_listens_is_said_if_other_hosts_cannot_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(environment.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert network_notes([]) == [
        "this host's name resolves to 127.0.1.1: set GLOO_SOCKET_IFNAME for ranks on several hosts"
    ]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert network_notes([{"name": "eth0"}]) == ["GLOO_SOCKET_IFNAME names eth7, which is no interface here"]
    assert network_notes([{"name": "eth7"}]) == []


def test_a_newer_torch_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = f"{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}.0"
    monkeypatch.setattr(torch, "__version__", newer)
    assert any(note.startswith(f"torch {newer} is newer") for note in facts()["notes"])


SWALLOWED = BROKEN.replace('raise OSError("libcudart.so.13: cannot open shared object file")', """
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("cannot load module more than once per process")""")


def test_ctrl_c_while_torch_is_loaded_ends_it_though_an_import_swallows_it() -> None:
    program = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{SWALLOWED}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "thinwire: interrupted\n")


@pytest.mark.parametrize("words", ((), ("--json",)))
def test_it_works_where_torch_is_broken(words: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN, *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "torch cannot be imported, so nothing runs: OSError: libcudart" in " ".join(done.stdout.split())


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ThinwireError, match="takes --json or nothing, got 'here'"):
        main(["here"])
