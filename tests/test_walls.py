"""The walls between the parts, read from the source. Every check is also shown a snippet that it must refuse."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "longgen"
MODULES = sorted(PACKAGE.rglob("*.py"))

MODEL_LIBRARIES = frozenset({"transformers", "tokenizers", "huggingface_hub"})
STREAM_NAMES = frozenset({"Stream", "Event", "current_stream", "synchronize", "stream", "set_stream", "default_stream"})
# The modules of longgen/kv that only describe or compute.
KV_FACTS = frozenset({"shape", "sizes", "layout", "budget", "plan", "predict"})
# What a module may call for a value that it keeps; anything else called at module level may hold state.
CONSTANT_MAKERS = frozenset(
    {"MappingProxyType", "frozenset", "tuple", "slice", "compile", "Path", "TypeVar", "namedtuple", "auto", "field"}
)
APPS = ("app = typer.Typer(", "evaluation = typer.Typer(")  # the command line is made of decorators
CACHES = frozenset({"cache", "lru_cache"})


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Full dotted names of all imports, those inside functions and relative ones too; `package` is the importer's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"}:
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def _called(call: ast.Call) -> str:
    """The last name of what is called: `deque` for collections.deque(...)."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def model_library_faults(tree: ast.Module) -> list[str]:
    """Imports that only longgen/model may have."""
    return [name for name in _imports(tree, "longgen") if name.split(".")[0] in MODEL_LIBRARIES]


def stream_faults(tree: ast.Module) -> list[str]:
    """Mentions of CUDA streams and events, which only longgen/kv/transfer.py may have."""
    aliases = _aliases(tree)
    faults = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in STREAM_NAMES
        and _full_name(node.value, aliases) in {"torch.cuda", "cuda", "torch"}
    ]
    modules = ("torch.cuda", "torch")
    return faults + [
        name
        for name in _imports(tree, "longgen")
        if name.rpartition(".")[0].startswith(modules) and _last(name) in STREAM_NAMES
    ]


def _aliases(tree: ast.Module) -> dict[str, str]:
    """What the names of imports stand for: `c` for torch.cuda after `from torch import cuda as c`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _full_name(value: ast.expr, aliases: dict[str, str]) -> str:
    first, _, rest = ast.unparse(value).partition(".")
    return ".".join(filter(None, (aliases.get(first, first), rest)))


def mover_faults(tree: ast.Module) -> list[str]:
    """Imports of anything in longgen/kv that may move data, which longgen/sparse may not have."""
    names = [name.split(".") for name in _imports(tree, "longgen.sparse")]
    return [".".join(name) for name in names if name[:2] == ["longgen", "kv"] and KV_FACTS.isdisjoint(name[2:])]


def state_faults(tree: ast.Module) -> list[str]:
    """Names that a module binds to something that may change, functions that remember results, uses of `global`."""
    faults = [f"global {', '.join(node.names)}" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    constant = CONSTANT_MAKERS | _frozen_classes(tree)
    for node in _module_level(tree):
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else None
        if value is not None and _is_mutable(value, constant) and not ast.unparse(node).startswith(("__all__", *APPS)):
            faults.append(ast.unparse(node))
    return faults + [
        f"@{ast.unparse(decorator)}"
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for decorator in node.decorator_list
        if _last(ast.unparse(decorator).partition("(")[0]) in CACHES
    ]


def _module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import: the module's own, those in its ifs and tries, and the bodies of its classes."""
    todo: list[ast.AST] = [tree]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if isinstance(child, ast.stmt) and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child
                todo.append(child)
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                todo.append(child)


def _frozen_classes(tree: ast.Module) -> set[str]:
    """The module's own classes whose instances cannot change."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("frozen=True" in ast.unparse(mark) for mark in node.decorator_list)
    }


def _is_mutable(value: ast.expr, constant: Set[str]) -> bool:
    """Whether a value may change. Calls of `constant` make values that do not, unless what they hold does."""
    if isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
        return True
    if isinstance(value, ast.Call):
        held = [] if _called(value) in CONSTANT_MAKERS else [*value.args, *(word.value for word in value.keywords)]
        return _called(value) not in constant or any(_is_mutable(part, constant) for part in held)
    if isinstance(value, ast.Tuple):
        return any(_is_mutable(element, constant) for element in value.elts)
    if isinstance(value, ast.BinOp):
        return _is_mutable(value.left, constant) or _is_mutable(value.right, constant)
    return isinstance(value, ast.NamedExpr) and _is_mutable(value.value, constant)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _in(path: Path, *rooms: str) -> bool:
    return path.relative_to(PACKAGE).as_posix().startswith(rooms)


def _faults(check: Callable[[ast.Module], list[str]], modules: list[Path]) -> dict[str, list[str]]:
    found = {str(path.relative_to(PACKAGE)): check(ast.parse(path.read_text(encoding="utf-8"))) for path in modules}
    return {path: faults for path, faults in found.items() if faults}


def test_the_walls_look_at_every_part() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0] for path in MODULES}
    assert {"model", "kv", "attention", "sparse", "engine.py", "cli.py"} <= rooms
    assert (PACKAGE / "kv" / "transfer.py") in MODULES


def test_only_model_imports_the_model_libraries() -> None:
    assert _faults(model_library_faults, [path for path in MODULES if not _in(path, "model/")]) == {}


def test_only_transfer_touches_streams_and_events() -> None:
    assert _faults(stream_faults, [path for path in MODULES if not _in(path, "kv/transfer.py")]) == {}


def test_sparse_imports_nothing_that_moves_data() -> None:
    assert _faults(mover_faults, [path for path in MODULES if _in(path, "sparse/")]) == {}


def test_no_module_keeps_mutable_state() -> None:
    assert _faults(state_faults, MODULES) == {}


@pytest.mark.parametrize(
    ("check", "snippet"),
    [
        (model_library_faults, "import transformers"),
        (model_library_faults, "import torch, transformers.models.qwen3 as q"),
        (model_library_faults, "def f():\n    from transformers import AutoConfig"),
        (model_library_faults, "from huggingface_hub import snapshot_download"),
        (model_library_faults, "import importlib\nimportlib.import_module('tokenizers')"),
        (stream_faults, "import torch\ns = torch.cuda.Stream()"),
        (stream_faults, "def f(): torch.cuda.current_stream().wait_event(e)"),
        (stream_faults, "def f(): torch.cuda.synchronize()"),
        (stream_faults, "from torch.cuda import Event"),
        (stream_faults, "from torch import cuda\ndef f(): cuda.Event()"),
        (stream_faults, "with torch.cuda.stream(s): pass"),
        (stream_faults, "from torch import cuda as c\nc.Stream()"),
        (stream_faults, "import torch.cuda as c\ndef f(): c.synchronize()"),
        (stream_faults, "import torch as t\nt.cuda.current_stream()"),
        (stream_faults, "from torch.cuda import Stream as S"),
        (mover_faults, "from longgen.kv.host_cache import HostCache"),
        (mover_faults, "from longgen.kv import store"),
        (mover_faults, "import longgen.kv.transfer"),
        (mover_faults, "import longgen.kv"),
        (mover_faults, "from ..kv.passes import Pass"),
        (state_faults, "CACHE = {}"),
        (state_faults, "CACHE: dict[str, int] = {}"),
        (state_faults, "NAMES = ['a']"),
        (state_faults, "SEEN = set()"),
        (state_faults, "import collections\nQ = collections.deque()"),
        (state_faults, "PAIR = (1, [])"),
        (state_faults, "STATE = Engine()"),
        (state_faults, "from a import b\nCURRENT: b.Context = b.Context(slot=0)"),
        (state_faults, "LOCAL = threading.local()"),
        (state_faults, "@dataclass(frozen=True)\nclass A:\n    x: list\nONE = A(x=[])"),
        (state_faults, "from functools import cache\n@cache\ndef f(): return []"),
        (state_faults, "import functools\nclass A:\n    @functools.lru_cache(maxsize=1)\n    def f(self): return 1"),
        (state_faults, "ALL = [*A] + B"),
        (state_faults, "SQUARES = {n: n * n for n in range(9)}"),
        (state_faults, "if True:\n    CACHE = {}"),
        (state_faults, "try:\n    import x\nexcept ImportError:\n    CACHE = []"),
        (state_faults, "class A:\n    registry = {}"),
        (state_faults, "def f():\n    global current\n    current = 1"),
    ],
)
def test_each_wall_refuses_what_breaks_it(check: Callable[[ast.Module], list[str]], snippet: str) -> None:
    assert check(ast.parse(snippet))


@pytest.mark.parametrize(
    ("check", "snippet"),
    [
        (model_library_faults, "import torch\nfrom longgen.model.checkpoint import read_config"),
        (stream_faults, "torch.cuda.is_available()\nrequest.stream()"),
        (stream_faults, "from torch import cuda as c\nc.is_available()\nfrom io import Event as c2\nc2.stream()"),
        (mover_faults, "from longgen.kv.layout import KVLayout\nfrom longgen.sparse.base import SparsePolicy"),
        (
            state_faults,
            "from types import MappingProxyType\nA = (1, 2)\nB = frozenset({1})\nC = MappingProxyType({'a': 1})\n"
            "D = tuple([1])\n__all__ = ['A']\ndef f():\n    x = []\n    y = Engine()\n    return {}\n"
            "@dataclass(frozen=True)\nclass F:\n    x: int = 1\nF1 = F(x=2)\n"
            "class E:\n    @functools.cached_property\n    def g(self): return []",
        ),
    ],
)
def test_the_walls_let_through_what_is_allowed(check: Callable[[ast.Module], list[str]], snippet: str) -> None:
    assert check(ast.parse(snippet)) == []
