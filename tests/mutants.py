"""Mutants: small wrong changes of the exported code, each with the notebook or test that must notice it.

    python tests/mutants.py [--only REGEX] [--jobs 2] [--write]

`tests/mutants_table.py` lists them by function or class, wherever that stands in the package: (function, what goes wrong, old text, new text, killers).
The old text must occur exactly once in the text of that function; killers are test ids, or `nb` (and that is what is meant where nothing
is said) for the notebook that exports the function, `nb:630` for another one. SURVIVORS there explains mutants that nothing can notice.
A mutant lives in a copy of the repository, in the package and in the notebook alike; killers run there, one process each. Before
anything is changed, every killer must pass in the copy. `--write` keeps the result as docs/mutants.md.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import queue
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mutants_table import MUTANTS, SURVIVORS

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "mutants.md"
LIMIT = 600.0  # seconds for one killer
COPIED = ("rlhf_nb", "nbs", "tests", "benchmarks", "docs", "settings.ini", "setup.py", "pyproject.toml", "README.md")
PRELOADED = [
    "torch",
    "transformers",
    "matplotlib.pyplot",
    "nbdev.test",
    "execnb.shell",
    "pytest",
    "pydantic",
    "safetensors.torch",
]


class TableError(Exception):
    """The list of mutants doesn't fit the code."""


class Mutant(NamedTuple):
    """One wrong change."""

    symbol: str  # function, class or Class.method; module:symbol where two modules have the name
    about: str  # what it does wrong
    old: str
    new: str
    by: tuple[str, ...]  # killers, the fastest first
    survives: str = ""  # why nothing can notice it

    @property
    def name(self) -> str:
        return f"{self.symbol}: {self.about}"


class Place(NamedTuple):
    """Where a symbol stands."""

    module: str  # as losses.kl
    path: Path
    start: int  # offset in the file's text
    end: int


def read_table(rows: Sequence[tuple[str, ...]] = (), survivors: Mapping[str, str] | None = None) -> list[Mutant]:
    """All mutants of the table.

    Raises:
        TableError: two with the same name, or a survivor that is no mutant.
    """
    rows, survivors = rows or MUTANTS, SURVIVORS if survivors is None else survivors
    found = [
        Mutant(*row[:4], tuple("".join(row[4:]).replace(" ", "").split(",")) if row[4:] else ("nb",)) for row in rows
    ]
    names = [m.name for m in found]
    wrong = {n for n in names if names.count(n) > 1} | set(survivors) - set(names)
    if wrong:
        raise TableError(f"not exactly one mutant is called: {sorted(wrong)}")
    return [m._replace(survives=survivors.get(m.name, "")) for m in found]


def definitions(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, first and last offset) of each function, class, method and module-level name of a module's text."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        return starts[first - 1], starts[node.end_lineno]

    def inside(body: list[ast.stmt], above: str) -> Iterator[tuple[str, int, int]]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield (above + node.name, *span(node))
                if isinstance(node, ast.ClassDef):
                    yield from inside(node.body, f"{above}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        yield (above + target.id, *span(node))

    yield from inside(ast.parse(text).body, "")


def locate(root: Path) -> dict[str, list[Place]]:
    """All places of each symbol below root/rlhf_nb."""
    found: dict[str, list[Place]] = {}
    for path in sorted((root / "rlhf_nb").rglob("*.py")):
        if path.name == "_modidx.py":
            continue
        module = ".".join(path.relative_to(root / "rlhf_nb").with_suffix("").parts)
        for name, start, end in definitions(path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(Place(module, path, start, end))
            found.setdefault(f"{module}:{name}", []).append(Place(module, path, start, end))
    return found


def place_of(m: Mutant, places: dict[str, list[Place]]) -> Place:
    """Where a mutant's text stands.

    Raises:
        TableError: the symbol or its text isn't there, or more than once.
    """
    here = places.get(m.symbol, [])
    if len(here) != 1:
        raise TableError(
            f"{m.symbol} is defined {len(here)} times ({', '.join(p.module for p in here)}): name it module:{m.symbol}"
        )
    text = here[0].path.read_text(encoding="utf-8")[here[0].start : here[0].end]
    if text.count(m.old) != 1:
        raise TableError(
            f"{m.name}: {m.old!r} occurs {text.count(m.old)} times in {here[0].module}, it must be there once"
        )
    if m.old == m.new:
        raise TableError(f"{m.name}: nothing is changed")
    return here[0]


def notebook_of(path: Path) -> Path:
    """The notebook that exports a module."""
    found = re.match(r"# AUTOGENERATED! DO NOT EDIT! File to edit: (\S+\.ipynb)", path.read_text(encoding="utf-8"))
    if not found:
        raise TableError(f"{path.name} says of no notebook that it exports it")
    return (path.parent / found[1]).resolve()


def find_killer(killer: str, place: Place, root: Path) -> tuple[str, str]:
    """(how the killer is called in the report, its notebook or its id for pytest).

    Raises:
        TableError: there is no such notebook or test.
    """
    if killer == "nb" or killer.startswith("nb:"):
        below = f"{killer[3:].replace('.', '/')}.ipynb"
        path = notebook_of(place.path) if killer == "nb" else root / "nbs" / below
        if not path.exists():
            raise TableError(f"{killer}: there is no notebook {path.name}")
        return path.relative_to(root / "nbs").with_suffix("").as_posix().replace("/", "."), str(path)
    file, _, test = killer.partition("::")
    path = root / "tests" / f"{file}.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if not path.exists() or (test and f"def {test.partition('[')[0]}(" not in text):
        raise TableError(f"{killer}: there is no such test")
    where = f"tests/{file}.py" + (f"::{test}" if test else "")
    return killer, where


def copy_tree(target: Path, source: Path = ROOT) -> Path:
    """What killers need of the repository."""
    target = target.resolve()
    for name in COPIED:
        if (source / name).is_dir():
            hidden = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".venvs", "runs")
            shutil.copytree(source / name, target / name, ignore=hidden)
        elif (source / name).exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)
    return target


def change(m: Mutant, root: Path) -> dict[Path, str]:
    """Make the mutant in a copy, in module and notebook; returns the old texts of both files."""
    place = place_of(m, locate(root))
    before = {place.path: place.path.read_text(encoding="utf-8")}
    text = before[place.path]
    segment = text[place.start : place.end]
    place.path.write_text(text[: place.start] + segment.replace(m.old, m.new) + text[place.end :], encoding="utf-8")
    path = notebook_of(place.path)
    before[path] = path.read_text(encoding="utf-8")
    nb, bare = json.loads(before[path]), m.symbol.rpartition(":")[2]
    done = 0
    for cell in nb["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or not re.match(r"\s*#\|\s*export", source):
            continue
        for name, start, end in definitions(source):
            if name == bare and m.old in source[start:end]:
                cell["source"] = source[:start] + source[start:end].replace(m.old, m.new) + source[end:]
                done += 1
    if done != 1:
        raise TableError(f"{m.name}: {path.name} exports that text {done} times, not once")
    path.write_text(json.dumps(nb), encoding="utf-8")
    return before


class Verdict(NamedTuple):
    """What a killer said."""

    failed: bool
    seconds: float
    output: str


def perform(what: str, root: Path, log: Path) -> None:
    """In a process of its own: run a notebook or a test in a copy, and exit 0 (passed), 1 (failed) or with another code (neither)."""
    with open(log, "w", encoding="utf-8") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    os.environ.update(
        PYTHONPATH=str(root),
        OMP_NUM_THREADS="1",
        MPLBACKEND="Agg",
        PYTHONWARNINGS="ignore",
        PYTHONDONTWRITEBYTECODE="1",
    )
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    warnings.simplefilter("ignore")
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    notebook = what.endswith(".ipynb")
    os.chdir(root / "nbs" if notebook else root)
    import rlhf_nb

    assert Path(rlhf_nb.__file__).parent.parent == root, rlhf_nb.__file__
    if notebook:
        from nbdev.test import test_nb

        code = int(not test_nb(Path(what), do_print=False)[0])
    else:
        import pytest

        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", what]))
    sys.stdout.flush()
    os._exit(code)


def run(what: str, root: Path) -> Verdict:
    """Run a killer in a copy. The process is forked from one that holds the large packages, for importing them takes longer than most killers.

    Raises:
        TableError: it neither passed nor failed (the mutant can't even be imported, say).
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    log = root.with_name(f"{root.name}.log")
    begin = time.monotonic()
    process = processes.Process(target=perform, args=(what, root, log))
    process.start()
    process.join(LIMIT)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Verdict(True, LIMIT, "ran into its time limit")
    output = log.read_text(encoding="utf-8", errors="replace")[-3000:] if log.exists() else ""
    if process.exitcode not in (0, 1):
        raise TableError(f"{what} ended with code {process.exitcode}, which says nothing:\n{output}")
    return Verdict(process.exitcode == 1, time.monotonic() - begin, output)


def judge(m: Mutant, root: Path) -> tuple[str, float]:
    """(name of the first killer that notices the mutant, or "", and the seconds that took)."""
    place = place_of(m, locate(root))
    killers = [find_killer(k, place, root) for k in m.by]
    before, seconds = change(m, root), 0.0
    try:
        for name, what in killers:
            verdict = run(what, root)
            seconds += verdict.seconds
            if verdict.failed:
                return name, seconds
    finally:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")
    return "", seconds


def report(rows: list[tuple[Mutant, str, str]]) -> str:
    """The table as Markdown; rows are (mutant, module, killer or "")."""
    dead = sum(1 for _, _, killer in rows if killer)
    lines = [
        "# Mutants", "", "Small wrong changes of the exported code (`tests/mutants_table.py`), and the notebook or test that fails because of each. Written by `make mutants`.", "",
        f"{dead} killed, {len(rows) - dead} survived of {len(rows)}.", "", "| where | what goes wrong | who notices |", "|---|---|---|",
    ]  # fmt: skip
    for m, module, killer in sorted(rows, key=lambda r: (r[1], r[0].symbol)):
        noticed = f"`{killer}`" if killer else f"no test: {m.survives or 'not explained'}"
        lines.append(f"| `{module}.{m.symbol.rpartition(':')[2]}` | {m.about} | {noticed} |".replace("||", "\\|\\|"))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="only mutants whose module, symbol or description has this (a regular expression)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="killers that run at the same time")
    parser.add_argument("--write", action="store_true", help="keep the result as docs/mutants.md")
    args = parser.parse_args()
    places = locate(ROOT)
    every = [(m, place_of(m, places)) for m in read_table()]
    chosen = [(m, p) for m, p in every if re.search(args.only, f"{p.module}.{m.name}")]
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for i in range(args.jobs):
            copies.put(copy_tree(Path(folder) / str(i)))

        def in_a_copy(work: Any, *arguments: Any) -> Any:
            root = copies.get()
            try:
                return work(*arguments, root)
            finally:
                copies.put(root)

        def sound(killer: str, place: Place, root: Path) -> str:
            there = Place(place.module, root / place.path.relative_to(ROOT), place.start, place.end)
            name, what = find_killer(killer, there, root)
            try:
                verdict = run(what, root)
            except TableError as error:
                return f"{name} can't be run: {error}"
            print(f"  {name} {'FAILS' if verdict.failed else 'passes'} unchanged ({verdict.seconds:.0f} s)", flush=True)
            return f"{name} fails without any mutant:\n{verdict.output}" if verdict.failed else ""

        with ThreadPoolExecutor(args.jobs) as pool:
            killers = {(k, p.module if k == "nb" else ""): (k, p) for m, p in chosen for k in m.by}
            sick = dict(zip(killers, pool.map(lambda kp: in_a_copy(sound, *kp), killers.values()), strict=True))

            def one(entry: tuple[Mutant, Place]) -> tuple[Mutant, str, str]:
                m, place = entry
                m = m._replace(by=tuple(k for k in m.by if not sick[k, place.module if k == "nb" else ""]))
                try:
                    killer, seconds = in_a_copy(judge, m)
                    said = f"killed by {killer}" if killer else "SURVIVED" + (f" ({m.survives})" if m.survives else "")
                except TableError as error:
                    killer, seconds, said = "", 0.0, f"SURVIVED: {error}"
                print(f"{place.module}.{m.name}: {said} ({seconds:.0f} s)", flush=True)
                return m, place.module, killer

            rows = list(pool.map(one, chosen))
    for problem in filter(None, sick.values()):
        print(problem)
    alive = [m for m, _, killer in rows if not killer]
    unexplained = [m for m in alive if not m.survives]
    for m in unexplained:
        print(f"not explained: {m.name}")
    for m, _, killer in rows:
        if killer and m.survives:
            print(f"explained as a survivor, but killed by {killer}: {m.name}")
    if args.write and len(rows) == len(every):
        REPORT.write_text(report(rows), encoding="utf-8")
    print(f"{len(rows) - len(alive)} killed, {len(alive)} survived of {len(rows)}")
    return int(any(sick.values()) or bool(unexplained) or len(alive) > 0.05 * len(rows))


if __name__ == "__main__":
    sys.exit(main())
