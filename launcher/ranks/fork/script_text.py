"""PURE: static analysis of a script before its first framework import; syntax trees.

In: sources. Out: the operations that the script's first import might notice, for a start without a record. The
compiler itself makes the trees, as module ast takes 10 ms to load. Separate from import_texts.py, as it is on the
launch path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

_ONLY_TREE = 0x400  # ast.PyCF_ONLY_AST
MAX_NESTED = 200
_HARMLESS_CALLS = """
    logging.getLogger getLogger warnings.filterwarnings warnings.simplefilter
    os.path.join os.path.dirname os.path.abspath os.path.basename os.path.exists os.path.realpath os.path.isfile
    os.path.isdir os.path.islink os.path.expanduser os.path.expandvars os.path.splitext os.path.split
    os.path.relpath os.path.normpath os.path.getsize os.path.getmtime os.getcwd os.environ.get os.getenv os.getpid
    os.getppid os.getuid os.cpu_count os.sched_getaffinity os.uname os.listdir os.stat os.access os.fspath
    time.time time.time_ns time.monotonic time.monotonic_ns time.perf_counter time.perf_counter_ns
    time.process_time time.process_time_ns time.thread_time time.thread_time_ns time.strftime time.localtime
    time.gmtime time.ctime time.asctime perf_counter perf_counter_ns monotonic monotonic_ns time_ns strftime
    datetime.datetime.now datetime.now datetime.datetime.utcnow datetime.utcnow datetime.datetime.today
    datetime.today datetime.date.today date.today datetime.timedelta timedelta
    socket.gethostname gethostname platform.node platform.system platform.machine platform.release
    platform.platform platform.python_version sys.getsizeof sys.getrecursionlimit sys.getdefaultencoding
    pathlib.Path Path pathlib.PurePath re.compile textwrap.dedent dedent
    ast.literal_eval json.loads uuid.uuid4 uuid4
    namedtuple collections.namedtuple collections.defaultdict defaultdict collections.OrderedDict OrderedDict
    collections.Counter Counter collections.deque deque TypeVar typing.TypeVar typing.NewType NewType typing.cast
    cast ParamSpec typing.ParamSpec field dataclass dataclasses.dataclass dataclasses.field
    functools.partial partial functools.lru_cache lru_cache functools.wraps wraps Enum enum.Enum enum.auto auto
    print frozenset set dict list tuple int float str bool bytes complex len range sorted reversed getattr hasattr
    isinstance issubclass callable min max sum abs round divmod pow any all zip enumerate map filter iter next repr
    ascii ord chr hex hash id type object super slice
"""
_HARMLESS_METHODS = """
    join split strip lstrip rstrip format startswith endswith lower upper replace get items keys values
    resolve encode decode absolute
"""
# Third parties whose imports change nothing that torch reads: they come before it in sorted imports.
_HARMLESS_PACKAGES = """
    absl accelerate aiohttp attr click datasets diffusers dill dotenv einops evaluate fire fsspec h5py
    huggingface_hub hydra joblib lightning loguru matplotlib mlflow numpy omegaconf packaging pandas peft PIL
    psutil pyarrow pydantic pytorch_lightning regex requests rich safetensors scipy sentencepiece
    simple_parsing sklearn tensorboard tiktoken timm tokenizers tqdm transformers trl typer typing_extensions
    wandb yaml
"""
# Importing these imports torch.
_HAVE_TORCH = "accelerate deepspeed lightning peft pytorch_lightning timm torchaudio torchmetrics torchvision trl"


def find_doubt(source: bytes, packages: Collection[str], standard: Collection[str]) -> str:
    """Describe as a clause what a script does before it imports one of `packages` that the import might notice.

    Returns: "" for nothing. Args: standard: modules of the standard library.
    """
    tree = parse(source)
    if tree is None:
        return ""  # the script will not run
    for statement in tree.body:
        for node in executed([statement]):
            kind = type(node).__name__
            line = getattr(node, "lineno", 0)
            if kind == "Import" or (kind == "ImportFrom" and not node.level):
                names = [alias.name for alias in node.names] if kind == "Import" else [node.module or ""]
                for name in names:
                    top = name.partition(".")[0]
                    if top in packages or top in _HAVE_TORCH.split():
                        return ""
                    if top not in standard and top not in _HARMLESS_PACKAGES.split():
                        return f"imports {name} in line {line}"
            elif kind == "ImportFrom":
                return f"imports from its own package in line {line}"
            elif kind == "Call" and not _is_harmless(dotted(node.func)):
                return f"calls {dotted(node.func).strip('.') or 'a function'} in line {line}"
            elif kind in ("Assign", "AugAssign", "AnnAssign", "Delete"):
                targets = getattr(node, "targets", None) or [node.target]
                for target in flat(targets):
                    if type(target).__name__ in ("Attribute", "Subscript"):
                        return f"changes {dotted(getattr(target, 'value', target)).strip('.')} in line {line}"
            elif kind in ("With", "AsyncWith", "For", "While", "Await"):
                return f"executes more than imports in line {line}"
    return ""


def _is_harmless(called: str) -> bool:
    if called in _HARMLESS_CALLS.split():
        return True
    return called.rpartition(".")[2] in _HARMLESS_METHODS.split() and not called.startswith(("os.", "sys."))


# ---- trees -----------------------------------------------------------------------------------------------------


def parse(source: bytes) -> Any:
    try:
        return compile(source, "", "exec", _ONLY_TREE, True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def dotted(node: Any) -> str:
    """Return `a.b.c` for names and attributes; other parts are empty."""
    parts: list[str] = []
    while type(node).__name__ == "Attribute":
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if type(node).__name__ == "Name" else "")
    return ".".join(reversed(parts))


def executed(statements: Iterable[Any], depth: int = 0, is_program: bool = True) -> Iterator[Any]:
    """Yield all nodes that are executed with these statements: not the bodies of functions.

    Args: is_program: include the statements below `__name__ == "__main__"`.
    """
    for node in statements:
        if not is_program and _asks_for_program(node):
            yield from executed(node.orelse, depth + 1, is_program)
            continue
        yield node
        kind = type(node).__name__
        if depth < MAX_NESTED:
            skipped = "body" if kind.endswith("FunctionDef") or kind == "Lambda" else ""
            for field in node._fields:
                if field != skipped:
                    value = getattr(node, field, None)
                    nodes = value if isinstance(value, list) else [value]
                    yield from executed(
                        [each for each in nodes if hasattr(each, "_fields")], depth + 1, is_program
                    )


def _asks_for_program(node: Any) -> bool:
    if type(node).__name__ != "If" or type(node.test).__name__ != "Compare":
        return False
    test = node.test
    if type(test.ops[0]).__name__ != "Eq":
        return False
    found = {getattr(each, "id", getattr(each, "value", None)) for each in (test.left, *test.comparators)}
    return found == {"__name__", "__main__"}


def flat(targets: Iterable[Any]) -> Iterator[Any]:
    for target in targets:
        kind = type(target).__name__
        if kind in ("Tuple", "List"):
            yield from flat(target.elts)
        elif kind == "Starred":
            yield from flat([target.value])
        else:
            yield target
