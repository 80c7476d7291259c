"""Where the repository lives, written into every notebook: the Colab badge, and what its first cell installs there. settings.ini says it once.

    python .ci/links.py            # `make export` does it, too

A release is installed at its tag (v0.2.0); between releases notebooks and package both come from the branch. Never a bare name from a package index:
whoever registers it there would run their code in every reader's notebook.
"""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path
from typing import NamedTuple

BADGE = re.compile(r"\[!\[Open In Colab\]\([^)]*\)\]\([^)]*\)")
INSTALL = re.compile(r"%pip install -q (?:\\\")?\w+(\[\w+\])?[^\n]*?(?=\\n|\"$)", re.M)


class Place(NamedTuple):
    """Where the repository is."""

    url: str  # of git
    ref: str  # tag or branch

    @property
    def slug(self) -> str:
        """owner/name, as GitHub and Colab write it."""
        return "/".join(self.url.rstrip("/").removesuffix(".git").split("/")[-2:])


def place(root: Path) -> Place:
    """The address in settings.ini, at the release's tag, or at the branch between two releases."""
    parser = configparser.ConfigParser(delimiters=["="], interpolation=None)
    parser.read(root / "settings.ini", encoding="utf-8")
    settings = parser["DEFAULT"]
    released = re.fullmatch(r"\d+(\.\d+)*", settings["version"])
    return Place(settings["git_url"].rstrip("/"), f"v{settings['version']}" if released else settings["branch"])


def relinked(text: str, name: str, where: Place) -> str:
    """A notebook's file with its badge and its install cell as they should be.

    Args:
        text: the file.
        name: its path below the repository.
        where: the repository.
    """
    badge = f"[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/{where.slug}/blob/{where.ref}/{name})"
    text = BADGE.sub(lambda _: badge, text)
    return INSTALL.sub(
        lambda found: f'%pip install -q \\"rlhf_nb{found[1] or ""} @ git+{where.url}@{where.ref}\\"', text
    )


def relink(root: Path) -> list[str]:
    """Write the links into all notebooks below root/nbs; returns the names of those that changed."""
    where, changed = place(root), []
    for path in sorted((root / "nbs").rglob("*.ipynb")):
        before, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        after = relinked(before, name, where)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(name)
    return changed


if __name__ == "__main__":
    print(*relink(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()), sep="\n")
