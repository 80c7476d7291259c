"""What this project tells people to type, on the command line and in Python, collected from README, guides, notebooks, help texts and messages."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import NamedTuple

import yaml

from rlhf_nb.cli.settings import EXAMPLES, GROUPS, facts

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / ".ci" / "book").glob("*.md")),
]
RECORDING = ROOT / "docs" / "figures" / "first_minutes.svg"
COMMANDS = {name for names in GROUPS.values() for name in names}
NAMES = {*COMMANDS, "smollm2", "toy", "sums", "legs", "gold", "init", "show", "list", "rollback", "accelerate", "run"}
PROGRAM = re.compile(r"(?:\.venv/bin/)?rlhf-nb\s+(?=[a-z{-])")
_ARGUMENT = re.compile(  # what goes on with a command in the middle of a sentence
    r"-|.*[=/{\"'\\|]|[A-Z][A-Z_]*(/[A-Z]+)?(:N)?$|[A-C]$|\d+$|[a-z0-9]+_\w+$|\S+\.(jsonl?|ya?ml|gz|py|csv)$|\.\.\.$"
)


class Suggestion(NamedTuple):
    """Something to type."""

    where: str
    text: str  # without the program's name


def _strip(text: str) -> str:
    """A line without its comment, its redirection and what follows a pipe."""
    return re.split(r"\s+#\s|\s+[>|]{1,2}\s|\s+&&\s|\s&$", text)[0].strip()


def in_prose(text: str, where: str) -> Iterator[Suggestion]:
    """Command lines in the middle of sentences: words that can only belong to a command; all of it inside backticks."""
    for match in PROGRAM.finditer(text):
        rest = text[match.end() :].split("\n")[0]
        quoted = text[: match.start()].rsplit("\n", 1)[-1].count("`") % 2 == 1
        if quoted:
            yield Suggestion(where, _strip(rest.split("`")[0]))
            continue
        words = []
        for word in re.findall(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", _strip(rest)):
            bare = word.rstrip(".,;:)") if not word.endswith("...") else word
            if bare not in NAMES and not _ARGUMENT.match(bare):
                break
            words.append(bare)
            if bare != word:
                break
        if words:
            yield Suggestion(where, " ".join(words))


def _fences(text: str) -> Iterator[tuple[str, str]]:
    yield from re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.M | re.S)


def on_pages() -> Iterator[Suggestion]:
    """Of README, guides and the site's own pages."""
    for page in PAGES:
        yield from of_markdown(page.read_text(encoding="utf-8"), page.name)


def of_markdown(text: str, where: str) -> Iterator[Suggestion]:
    """Lines in fences, and what stands in backticks or sentences."""
    for kind, block in _fences(text):
        if kind in ("", "bash", "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                match = re.match(r"(?:\$ |!)?(?:[A-Z_]+=\S+ )*" + PROGRAM.pattern, line.strip())
                if match:
                    yield Suggestion(where, _strip(line.strip()[match.end() :]))
    yield from in_prose(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), where)


def in_recording() -> Iterator[Suggestion]:
    """Of the picture in the README."""
    for line in re.findall(r'class="t"[^>]*>\$ rlhf-nb ([^<]+)<', RECORDING.read_text(encoding="utf-8")):
        yield Suggestion(RECORDING.name, unescape(line))


def in_notebooks() -> Iterator[Suggestion]:
    """Of the notebooks' prose."""
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                yield from of_markdown("".join(cell["source"]), path.relative_to(ROOT).as_posix())


def in_help() -> Iterator[Suggestion]:
    """Of `--help` and `config init`."""
    for line in EXAMPLES.values():
        yield Suggestion("help", line)
    for name, fact in facts()["methods"].items():
        yield from in_prose(fact["settings"], f"help of {name}")
        for text in fact["init"].values():
            yield from in_prose(text, f"config init {name}")
    for text in facts()["pipeline"]["init"].values():
        yield from in_prose(text, "config init run")


def constants(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a module, with what is filled in as {expression}; calls of `me` are the program's name."""
    for node in _outermost(ast.parse(path.read_text(encoding="utf-8"))):
        text = _flat(node)
        if text is not None:
            yield node.lineno, text


def _outermost(node: ast.AST) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and _flat(child) is not None:
            yield child
        else:
            yield from _outermost(child)


def _flat(node: ast.expr) -> str | None:
    """A text, an f-string or a sum of them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(v.value) if isinstance(v, ast.Constant) else _filled(v.value)  # type: ignore[attr-defined]
            for v in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _flat(node.left), _flat(node.right)
        return None if left is None or right is None else left + right
    return None


def _filled(node: ast.expr) -> str:
    source = ast.unparse(node)
    if source in ("me()", "_me()", "me", "program"):
        return "rlhf-nb"
    inner = [t for t in map(_flat, (n for n in ast.walk(node) if isinstance(n, ast.expr))) if t]
    return "{" + source.replace(" ", "") + "}" if not inner else "{" + "…" + "}"


def modules() -> list[Path]:
    return [p for p in sorted((ROOT / "rlhf_nb").rglob("*.py")) if p.name != "_modidx.py"]


def in_messages() -> Iterator[Suggestion]:
    """Of the package's texts."""
    for path in modules():
        for line, text in constants(path):
            yield from in_prose(text, f"{path.relative_to(ROOT)}:{line}")
    for where, text in in_tables():
        yield from in_prose(text, where)


SENTENCES = (
    "cli/demo", "data/hub", "data/warnings", "export/tables", "models/texts", "pipeline/findings", "pipeline/texts", "rewards/texts",
    "run/health", "run/texts", "scale/plan",
)  # fmt: skip


def in_tables() -> Iterator[tuple[str, str]]:
    """Sentences that stand in tables beside the modules; `{me}` is the program's name, what else is filled in is X."""
    for place in SENTENCES:
        table = yaml.safe_load((ROOT / "rlhf_nb" / f"{place}.yaml").read_text(encoding="utf-8"))
        for name, text in _leaves(table):
            named = text.replace("{me}", "rlhf-nb")
            yield f"rlhf_nb/{place}.yaml:{name}", re.sub(r"(?<!\{)\{[^{}]*\}(?!\})", "X", named)


def _leaves(value: object, at: str = "") -> Iterator[tuple[str, str]]:
    """The texts of a table, each with its place."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{at}.{name}".strip("."))
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, at)
    elif isinstance(value, str):
        yield at, value


def all_lines() -> list[Suggestion]:
    """Every command line that is suggested, once each."""
    found: dict[str, Suggestion] = {}
    for suggestion in (*on_pages(), *in_recording(), *in_notebooks(), *in_help(), *in_messages()):
        if suggestion.text:
            found.setdefault(suggestion.text, suggestion)
    return list(found.values())


_CALL = re.compile(  # in a sentence: a name, or several with dots, called; and what is called of that
    r"(?<![\w{.@\\])@?((?:[A-Za-z]\w*\.)*[A-Za-z]\w+\((?:[^()]|\([^()]*\))*\)(?:\.\w+\([^()]*\)|\[\d\])*)"
)
_IMPORT = re.compile(r"from rlhf_nb[\w.]* import [a-zA-Z]\w*(?:, \w+)*")
RUN_ELSEWHERE = {"CONTRIBUTING.md", "results.md", "mutants.md"}  # by test_contributing; or they are about the past


def _parses(text: str) -> bool:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(isinstance(n, ast.Call | ast.Import | ast.ImportFrom) for n in ast.walk(tree))


def python_on_pages() -> Iterator[Suggestion]:
    """Python in fences, and in backticks: lines that call or import something."""
    pages = [(p.name, p.read_text(encoding="utf-8")) for p in PAGES if p.name not in RUN_ELSEWHERE]
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        pages.append((path.relative_to(ROOT).as_posix(), re.sub(r"`[^`\n]+`", "", text)))
    for where, text in pages:
        yield from (Suggestion(where, block) for kind, block in _fences(text) if kind in ("python", "py"))
        for quoted in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
            if _parses(quoted):
                yield Suggestion(where, quoted)


def _said(node: ast.expr) -> str | None:
    """A text, what is filled in as X."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _said(node.left), _said(node.right)
        return None if left is None or right is None else left + right
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def python_in_messages() -> Iterator[tuple[Suggestion, str]]:
    """Calls and imports that the package's sentences speak of, with the sentence; docstrings, programs and patterns are none."""
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in _outermost(tree):
            text = None if id(node) in docs else _said(node)
            if text and " " in text and not re.search(r"\\|\n|\{\{|=>|__", text):
                for found in (*_IMPORT.findall(text), *_CALL.findall(text)):
                    if not re.search(r"\w\((s|es)\)$|^rgba", found) and _parses(found):
                        yield Suggestion(f"{path.relative_to(ROOT)}:{node.lineno}", found), text
    for where, text in in_tables():
        for found in (*_IMPORT.findall(text), *_CALL.findall(text)):
            if _parses(found):
                yield Suggestion(where, found), text
