"""requirements.lock: what the make targets install, each file with its hash. Run it with an environment whose versions are the tested ones.

    .venv/bin/python .ci/lock.py
    .venv/bin/python .ci/lock.py docs    # only .ci/book/requirements.lock, what `make docs` installs

For Python 3.11 on Linux x86-64. Hashes only, no addresses: any mirror does. pip itself and what builds packages are among them, and torch with two
hashes: of its CPU build, where pip is pointed at one, and of its usual one.
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEAD = """# Written by .ci/lock.py: the versions that this repository is tested with, for Python 3.11 (from 3.11.5) on Linux x86-64, each file with its hash.
# Without make: pip install --no-deps --require-hashes -r requirements.lock && pip install --no-deps --no-build-isolation -e .
# torch has two hashes, of its CPU build and of its usual one. pip takes the usual one, unless torch==VERSION+cpu is installed before.
"""


def pip(*arguments: str) -> str:
    """The output of a pip command."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pip {' '.join(arguments)}\n{done.stderr[-3000:]}")
    return done.stdout


def chosen(*what: str) -> dict[str, tuple[str, str]]:
    """Name -> (version, SHA-256) of all that pip would install anew for requirements."""
    out = pip("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *what)
    found = {}
    for item in json.loads(out)["install"]:
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" in hashes:  # not the project itself
            name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
            found[name] = (item["metadata"]["version"], hashes["sha256"])
    return found


def locked(held: dict[str, tuple[str, str]]) -> list[str]:
    """The lines of the lock.

    Args:
        held: by name, version and hash of what is installed.
    """
    version = held["torch"][0].partition("+")[0]
    builds = {held["torch"][1], chosen("--no-deps", f"torch=={version}")["torch"][1], chosen("--no-deps", f"torch==={version}")["torch"][1]}  # fmt: skip
    of = {name: (version, {digest}) for name, (version, digest) in held.items()} | {"torch": (version, builds)}
    return [
        f"{name}=={version} {' '.join(f'--hash=sha256:{digest}' for digest in sorted(digests))}"
        for name, (version, digests) in sorted(of.items())
    ]


def of_the_site() -> None:
    """Write the lock of the site's environment, which has nothing of the package's."""
    parser = configparser.ConfigParser(delimiters=["="], interpolation=None)
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    held = chosen(*parser["DEFAULT"]["docs_requirements"].split())
    lines = [f"{name}=={version} --hash=sha256:{digest}" for name, (version, digest) in sorted(held.items())]
    (ROOT / ".ci" / "book" / "requirements.lock").write_text(
        "# Written by .ci/lock.py docs: what `make docs` installs, for Python 3.11 on Linux x86-64.\n"
        + "\n".join(lines)
        + "\n",
        encoding="utf-8",
    )
    print(f"{len(lines)} packages for the site")


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(f"this is Python {sys.version.split()[0]}; the lock is for 3.11, the version that CI runs")
    of_the_site()
    if sys.argv[1:] == ["docs"]:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write(
            "\n".join(
                line for line in pip("freeze", "--exclude-editable").splitlines() if "==" in line and "@" not in line
            )
        )
        pins.flush()
        builders = [line for line in pip("freeze", "--all").splitlines() if line.startswith(("pip==", "wheel=="))]
        held = chosen("-c", pins.name, ".[test]") | chosen("--no-deps", *builders)
    lines = locked(held)
    LOCK.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} packages in {LOCK.name}")


if __name__ == "__main__":
    main()
