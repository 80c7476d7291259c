"""The Dockerfile without docker: what it copies is there and let through, its extras exist, and (slow) its package installs and starts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COPIED = [word for line in re.findall(r"^COPY (.+) \S+$", TEXT, re.M) for word in line.split()]


def test_what_is_copied_is_let_through_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ignored[0] == "*" and {f"!{name}" for name in COPIED} == {w for w in ignored if w.startswith("!")}
    assert all((ROOT / name).exists() for name in COPIED)
    settings = (ROOT / "settings.ini").read_text(encoding="utf-8")
    extras = re.findall(r"^ARG EXTRAS=(\S+)$", TEXT, re.M)[0].split(",")
    assert all(f"{extra}_requirements" in settings for extra in extras)
    assert re.search(r"^USER [1-9]\d+$", TEXT, re.M)  # Kubernetes' runAsNonRoot reads no names


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="the linter hadolint is not installed")
def test_a_linter_finds_nothing() -> None:
    done = subprocess.run(["hadolint", "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stdout, done.stdout


@pytest.mark.slow
def test_the_package_installs_from_what_is_copied_and_starts(tmp_path: Path) -> None:
    """Wheel and entry point of exactly these files; the packages it needs are those of this environment."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    target = tmp_path / "installed"
    how = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *how, str(tmp_path)], check=True, timeout=600)
    for line in ("--version", "config show sft --toy"):
        done = subprocess.run(
            [sys.executable, str(target / "bin" / "rlhf-nb"), *line.split()], cwd=tmp_path, capture_output=True,
            text=True, env={"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
