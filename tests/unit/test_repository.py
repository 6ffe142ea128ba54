"""The house rules a machine can check: sizes, ASCII, no machine's own paths or registries, and who imports what.

Import-linter (pyproject.toml) guards the packages' directions. Here are the rules it cannot see: calls and
submodules of other people's packages.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

NAMESPACE_FOLDERS = ("operator", "trainer", "crds", "kind")
PYTHON_FOLDERS = ("crds", "operator", "trainer", "kind", "tests", "hack", "benchmarks", ".ci")
TEXT_SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".json", ".tpl", ".mod", ".sum", ".go", "")

CORE = "operator/llmtrain_operator/core"
MODEL = "trainer/llmtrain_trainer/model"

# Modules that read a clock, dice, the environment or the world outside.
IMPURE_MODULES = frozenset(
    "time random os io sys secrets uuid tempfile pathlib shutil glob subprocess socket ssl select selectors asyncio "
    "threading multiprocessing concurrent queue sched logging http urllib requests sqlite3 fcntl ctypes "
    "importlib getpass platform".split()
)
IMPURE_CALLS = frozenset(
    "datetime.now datetime.utcnow datetime.today date.today signal.signal signal.alarm signal.setitimer "
    "signal.raise_signal".split()
)
IMPURE_BUILTINS = frozenset({"open", "print", "input", "exec", "eval", "__import__", "breakpoint"})

PACKAGE_REGISTRY = re.compile(
    r"(?<![\w.-])(?:pypi\.org|pypi\.python\.org|files\.pythonhosted\.org|proxy\.golang\.org|sum\.golang\.org"
    r"|goproxy\.[a-z]+|registry\.npmjs\.org|registry\.yarnpkg\.com|(?:index|static)\.crates\.io|repo1?\.maven\.[a-z.]+"
    r"|(?:deb|security|snapshot)\.debian\.org|download\.pytorch\.org)"
)
MACHINE_PATH = re.compile(r"(?<![\w./$}-])/(?:work|root)\b")


# --- what the repository holds ---


def repository_files() -> list[Path]:
    """Every file that is, or is about to be, committed; all but build outputs in a copy without .git."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        files = (ROOT / name for name in listing.stdout.split("\0") if name)
        return sorted(path for path in files if path.is_file() and not path.is_symlink())
    skip = {".venv", ".git", "build", "dist", "__pycache__"}
    return sorted(p for p in ROOT.rglob("*") if p.is_file() and not skip.intersection(p.relative_to(ROOT).parts))


def relative(path: Path) -> str:
    """Return the path as a reader of the repository writes it."""
    return path.relative_to(ROOT).as_posix()


def is_python(path: Path) -> bool:
    """Tell a Python source by its suffix or, for a program, by its first line."""
    if relative(path).split("/", 1)[0] not in PYTHON_FOLDERS:
        return False
    if path.suffix:
        return path.suffix == ".py"
    with path.open("rb") as file:
        first = file.readline(100)
    return first.startswith(b"#!") and b"python" in first


FILES = repository_files()
PYTHON_FILES = [path for path in FILES if is_python(path)]


def python_files_in(folder: str) -> list[Path]:
    """Return the Python files below a folder of the repository."""
    return [path for path in PYTHON_FILES if relative(path).startswith(folder + "/")]


# --- what one syntax tree says ---


@dataclass(frozen=True)
class Finding:
    """One broken rule: a line and what is wrong there."""

    line: int
    what: str


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) for everything imported; ``from a import b`` yields ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for a chain of attributes on a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def impurities(source: str) -> list[Finding]:
    """Return what makes a module of the core impure."""
    tree = ast.parse(source)
    found = [
        Finding(line, f"imports {name}") for line, name in imports_of(tree) if name.split(".", 1)[0] in IMPURE_MODULES
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ".".join(dotted(node.func).split(".")[-2:])
        if called in IMPURE_CALLS or called in IMPURE_BUILTINS:
            found.append(Finding(node.lineno, f"calls {called}()"))
    return found


def foreign_imports(source: str) -> list[Finding]:
    """Return imports that are neither the standard library, nor the contract, nor the core itself."""
    allowed = ("llmtrain_api", "llmtrain_operator.core")
    found = []
    for line, name in imports_of(ast.parse(source)):
        root = name.split(".", 1)[0]
        ours = any(name == package or name.startswith(package + ".") for package in allowed)
        below = name.startswith(".") and not name.startswith("..")
        if not (ours or below or root in sys.stdlib_module_names):
            found.append(Finding(line, f"imports {name}"))
    return found


def torch_distributed_uses(source: str) -> list[Finding]:
    """Return imports of torch.distributed, under any spelling, and uses of it through ``torch``."""
    tree = ast.parse(source)
    found = [
        Finding(line, f"imports {name}")
        for line, name in imports_of(tree)
        if f"{name}.".startswith("torch.distributed.")
    ]
    found += [
        Finding(node.lineno, "uses torch.distributed")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed"
    ]
    return found


def long_functions(source: str) -> list[Finding]:
    """Return functions longer than the limit, decorators not counted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(Finding(node.lineno, f"{node.name} has {lines} lines, limit {MAX_FUNCTION_LINES}"))
    return found


def long_file(source: str) -> list[Finding]:
    """Return one finding when the file has too many lines."""
    lines = len(source.splitlines())
    return [Finding(lines, f"{lines} lines, limit {MAX_FILE_LINES}")] if lines > MAX_FILE_LINES else []


def non_ascii(source: str) -> list[Finding]:
    """Return lines with characters outside ASCII."""
    lines = enumerate(source.splitlines(), start=1)
    return [Finding(number, "not ASCII") for number, line in lines if not line.isascii()]


def report(findings: dict[str, list[Finding]]) -> str:
    """Return one clickable line per finding."""
    return "\n".join(f"{path}:{one.line}: {one.what}" for path, found in findings.items() for one in found)


SOURCE_RULES = [
    pytest.param(long_file, PYTHON_FILES, id="files-have-at-most-400-lines"),
    pytest.param(long_functions, PYTHON_FILES, id="functions-have-at-most-60-lines"),
    pytest.param(non_ascii, PYTHON_FILES, id="sources-are-ascii"),
    pytest.param(impurities, python_files_in(CORE), id="core-has-no-clock-dice-environment-or-io"),
    pytest.param(foreign_imports, python_files_in(CORE), id="core-imports-only-the-contract-and-the-standard-library"),
    pytest.param(torch_distributed_uses, python_files_in(MODEL), id="model-never-touches-torch-distributed"),
]


@pytest.mark.parametrize(("rule", "files"), SOURCE_RULES)
def test_source_rule(rule, files):
    assert files, "the rule has no files to check: was a folder renamed?"
    findings = {relative(path): rule(path.read_text(encoding="utf-8")) for path in files}
    broken = {path: found for path, found in findings.items() if found}
    assert not broken, report(broken)


@pytest.mark.parametrize(
    ("rule", "source", "expected"),
    [
        pytest.param(impurities, "import time", "imports time", id="clock"),
        pytest.param(impurities, "from os import environ", "imports os.environ", id="environment"),
        pytest.param(impurities, "import datetime\ndatetime.datetime.now()", "calls datetime.now()", id="now"),
        pytest.param(impurities, "signal.alarm(1)", "calls signal.alarm()", id="alarm"),
        pytest.param(impurities, "signal.Signals(9).name", None, id="a-signals-name-is-pure"),
        pytest.param(impurities, "open('x')", "calls open()", id="io"),
        pytest.param(impurities, "observed.now", None, id="time-as-an-argument-is-pure"),
        pytest.param(foreign_imports, "import kopf", "imports kopf", id="kopf-in-core"),
        pytest.param(foreign_imports, "import llmtrain_operator.kube", "imports llmtrain_operator.kube", id="shell"),
        pytest.param(foreign_imports, "from ..kube import client", "imports ..kube.client", id="shell-by-dots"),
        pytest.param(foreign_imports, "from llmtrain_api.job import Job", None, id="contract-in-core"),
        pytest.param(torch_distributed_uses, "from torch import distributed", "imports torch.distributed", id="from"),
        pytest.param(torch_distributed_uses, "import torch.distributed as d", "imports torch.distributed", id="as"),
        pytest.param(
            torch_distributed_uses,
            "import torch\ntorch.distributed.barrier()",
            "uses torch.distributed",
            id="attribute",
        ),
        pytest.param(torch_distributed_uses, "import torch.distributions", None, id="another-module"),
        pytest.param(long_functions, "def f():\n" + "    x = 1\n" * 60, "f has 61 lines, limit 60", id="61-lines"),
        pytest.param(long_functions, "def f():\n" + "    x = 1\n" * 59, None, id="60-lines"),
        pytest.param(long_file, "\n" * 401, "401 lines, limit 400", id="401-lines"),
        pytest.param(non_ascii, "x = '\u00e9'", "not ASCII", id="accent"),
    ],
)
def test_rules_find_what_they_forbid(rule, source, expected):
    assert [finding.what for finding in rule(source)] == ([expected] if expected else [])


# --- rules on every committed file ---


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        pytest.param(PACKAGE_REGISTRY, "a package registry: the machine's own configuration decides", id="registries"),
        pytest.param(MACHINE_PATH, "a path of one machine", id="machine-paths"),
    ],
)
def test_no_committed_text_holds(pattern, why):
    found = {}
    for path in FILES:
        if path.suffix in TEXT_SUFFIXES and path != Path(__file__).resolve():
            lines = enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
            hits = [Finding(number, f"{match[0]} ({why})") for number, line in lines if (match := pattern.search(line))]
            if hits:
                found[relative(path)] = hits
    assert not found, report(found)


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        pytest.param(PACKAGE_REGISTRY, "--index-url https://pypi.org/simple", True, id="python-index"),
        pytest.param(PACKAGE_REGISTRY, "GOPROXY=proxy.golang.org,direct", True, id="go-proxy"),
        pytest.param(PACKAGE_REGISTRY, "see https://github.com/kubernetes/kubernetes", False, id="a-link-to-read"),
        pytest.param(MACHINE_PATH, "cd /work/main", True, id="checkout"),
        pytest.param(MACHINE_PATH, "HOME=/root", True, id="home-of-root"),
        pytest.param(MACHINE_PATH, "rootfs/root/x and $DIR/work/x", False, id="below-another-folder"),
    ],
)
def test_patterns_find_what_they_forbid(pattern, text, matches):
    assert bool(pattern.search(text)) is matches


@pytest.mark.parametrize("folder", NAMESPACE_FOLDERS)
def test_folder_is_no_package(folder):
    # operator/__init__.py would shadow Python's own operator module: no Python would start in the repository.
    assert not (ROOT / folder / "__init__.py").exists()


def test_lock_names_one_hashed_version_per_package_and_no_index():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line and not line.startswith((" ", "#"))]
    assert entries
    assert [line for line in entries if not re.match(r"^[a-z0-9._-]+==\S+( ; .+)? \\$", line)] == []
    assert sum("--hash=sha256:" in line for line in lines) >= len(entries)
    assert [line for line in lines if "://" in line] == []


def test_lock_covers_what_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace(".", "-") for requirement in asked}
    locked = set(re.findall(r"^([a-z0-9._-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert names - locked == set(), "run `make lock`"
