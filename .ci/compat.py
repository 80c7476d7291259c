"""The core tests on the oldest and on the newest allowed packages, and on several Pythons; prints a table.

    python .ci/compat.py [NAME ...] [--write] [--again]

Environments are made once in a cache folder outside the repository (about 6 GB each where torch comes with CUDA) and used again until what
they should hold changes. `oldest` holds the lower bound of every requirement in settings.ini, `newest` what pip finds within the upper
bounds, `tested` what constraints.txt says. Where a Python is not on this machine, its row says so. `--write` keeps the table as docs/compat.md.
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf_nb-compat"
SETS = {"oldest": "3.10", "tested": "3.12", "newest": "3.13"}  # name -> Python
SHOWN = ("torch", "transformers", "peft", "accelerate", "datasets", "deepspeed")
TESTS = (
    "test_losses_preference", "test_losses_group", "test_logprobs", "test_dpo_like_trl", "test_sampler", "test_loop", "test_preference", "test_data",
    "test_bad_input", "test_cli",
)  # fmt: skip
LIMIT = 1800  # seconds for the tests of one environment


class Row(NamedTuple):
    """What one environment showed."""

    name: str
    python: str
    versions: dict[str, str]
    result: str


def wanted(name: str) -> list[str]:
    """The requirements of an environment, as pip takes them.

    Raises:
        SystemExit: a requirement without a lower bound, in `oldest`.
    """
    cfg = configparser.ConfigParser(delimiters=["="], interpolation=None)
    cfg.read(ROOT / "settings.ini", encoding="utf-8")
    ours = [*cfg["DEFAULT"]["requirements"].split(), *cfg["DEFAULT"]["deepspeed_requirements"].split()]
    if name == "oldest":
        lowest = []
        for requirement in ours:
            found = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
            if not found:
                raise SystemExit(
                    f"{requirement} in settings.ini has no lower bound, so there is no oldest version to try"
                )
            lowest.append(f"{found[1]}=={found[2]}")
        ours = lowest
    return [*ours, "pytest", "pytest-xdist", "setuptools"]


def interpreter(version: str) -> str | None:
    """A Python of that version on this machine: on the PATH, or among pyenv's."""
    if found := shutil.which(f"python{version}"):
        if subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    hits = sorted(
        pyenv.glob(f"{version}.*/bin/python"), key=lambda p: [int(x) for x in re.findall(r"\d+", p.parts[-3])]
    )
    return str(hits[-1]) if hits else None


def environment(name: str, python: str, again: bool) -> Path:
    """The interpreter of an environment that holds what it should."""
    requirements = wanted(name)
    limits = (ROOT / "constraints.txt").read_text(encoding="utf-8") if name == "tested" else ""
    label = hashlib.sha256("\n".join([python, *requirements, limits]).encode()).hexdigest()
    folder, stamp = CACHE / name, CACHE / name / ".holds"
    if again or not stamp.exists() or stamp.read_text(encoding="utf-8") != label:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-cache-dir",
        ]
        env = {**os.environ, "PIP_CONSTRAINT": os.devnull}  # this machine's own limits would hide the newest
        subprocess.run([*pip, "--upgrade", "pip", "setuptools", "wheel"], check=True, env=env)
        if name == "tested":
            env["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
        subprocess.run([*pip, *requirements], check=True, env=env)
        stamp.write_text(label, encoding="utf-8")
    return folder / "bin" / "python"


def versions(python: Path) -> dict[str, str]:
    """The versions of the packages that the table shows."""
    code = f"import importlib.metadata as m\nfor n in {SHOWN!r}: print(n, m.version(n))"
    out = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return dict(line.split() for line in out.splitlines())


def tests(python: Path, name: str) -> str:
    """Run the core tests in an environment; what came of it, in words."""
    report, begin = CACHE / f"{name}.xml", time.monotonic()
    report.unlink(missing_ok=True)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "passive",
    }
    files = [f"tests/{t}.py" for t in TESTS]
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *files,
    ]
    with open(CACHE / f"{name}.log", "w", encoding="utf-8") as log:
        try:
            subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return f"not done within {LIMIT} s"
    if not report.exists():
        return f"no report; see {name}.log in the cache folder"
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    total, failed, skipped = (int(suite.get(k, 0)) for k in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", 0))
    return f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped ({time.monotonic() - begin:.0f} s)"


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| set | Python | " + " | ".join(SHOWN) + " | core tests |", "|---" * (len(SHOWN) + 3) + "|"]
    for r in rows:
        lines.append(
            f"| {r.name} | {r.python} | " + " | ".join(r.versions.get(n, "") for n in SHOWN) + f" | {r.result} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=f"of {', '.join(SETS)} (default: all)")
    parser.add_argument("--write", action="store_true", help="keep the table as docs/compat.md")
    parser.add_argument("--again", action="store_true", help="make the environments anew")
    args = parser.parse_args()
    if unknown := set(args.names) - set(SETS):
        parser.error(f"{', '.join(sorted(unknown))} is no set; there are {', '.join(SETS)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.names or SETS:
        python = interpreter(SETS[name])
        if python is None:
            rows.append(Row(name, SETS[name], {}, f"no Python {SETS[name]} on this machine"))
        else:
            inside = environment(name, python, args.again)
            exact = subprocess.run(
                [inside, "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True
            )
            rows.append(Row(name, exact.stdout.strip(), versions(inside), tests(inside, name)))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    text = table(rows)
    print("\n" + text)
    if args.write and not args.names:
        about = (
            "# Versions\n\nThe core tests (numerics of losses, scorer, sampler, loop, trainers; data, bad input, command line) on the oldest allowed packages, "
            "on those of constraints.txt, and on the newest that the bounds of settings.ini let in. Written by `make compat`.\n\n"
        )
        (ROOT / "docs" / "compat.md").write_text(about + text, encoding="utf-8")
    return int(not all(" 0 failed" in r.result for r in rows))


if __name__ == "__main__":
    sys.exit(main())
