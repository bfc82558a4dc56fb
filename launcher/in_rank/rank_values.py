"""Values that libraries compute from RANK and the like when imported, in the one form that ranks can recompute:

    rank_zero_only.rank = getattr(rank_zero_only, "rank", int(os.environ.get("LOCAL_RANK", 0)))

The value is an attribute of a function and a number. It depends only on variables, unless it is set already
(torchmetrics, Lightning). In the fork server a proxy replaces it at once. The proxy detects modules that use or
keep it during imports, but not those that only take its type().

Loaded by fork_server.py, by path, beside it; standard library only, needs Python 3.8. import_observe.py finds the
statements of that form.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set, Tuple

ONLY_PARSE = 0x400  # the compiler's PyCF_ONLY_AST
MAX_SOURCE_BYTES = 1 << 20
CONVERTS = ("int", "str", "len")  # built-in functions
IN_FUNCTIONS = frozenset(
    "arguments Assign BoolOp And Or Call Compare Constant Eq Expr For If In Is IsNot List Load Name NotEq NotIn "
    "Pass Return Store Subscript Tuple Attribute Index UnaryOp Not USub".split()
)
OPERATIONS = (
    "abs add and bool bytes ceil complex contains copy deepcopy delitem dir divmod enter eq float floor floordiv "
    "format ge getitem gt hash index int invert iter le len lshift lt matmul mod mul ne neg next or pos "
    "pow radd rand rdivmod reduce reduce_ex repr rfloordiv rlshift rmod rmul ror round rpow rrshift rshift rsub "
    "rtruediv rxor setattr setitem sizeof str sub truediv trunc xor"
).split()


# ---- the form --------------------------------------------------------------------------------------------------


class Statement:
    """A statement of that form."""

    def __init__(self, node: "Any", default: "Any", calls: "Set[str]") -> None:
        """Args: node: from the compiler; default: argument of getattr; calls: functions of the module."""
        target = node.targets[0]
        self.first, self.last = node.lineno, node.end_lineno
        self.owner, self.attribute = target.value.id, target.attr
        self.default = default
        self.calls = calls


def find_statements(source: bytes, path: str) -> "List[Statement]":
    """Return a module's statements of that form. Raises: SyntaxError, ValueError."""
    body = _compile(source, path, ONLY_PARSE).body
    functions = {}  # type: Dict[str, Any]
    for node in body:
        if _kind(node) == "FunctionDef":
            functions[node.name] = None if node.name in functions else node
    found = []
    for node in body:
        statement = _read_statement(node, functions)
        if statement is not None and not any(
            other is not node and other.lineno <= statement.last and statement.first <= other.end_lineno
            for other in body
        ):
            found.append(statement)
    return found


def _compile(source: bytes, path: str, flags: int = 0) -> "Any":
    """Compile without warnings: the import of the module prints them itself."""
    filters = getattr(sys.modules.get("warnings", sys.modules.get("_warnings")), "filters", [])
    filters.insert(0, ("ignore", None, Warning, None, 0))
    try:
        return compile(source, path, "exec", flags, True)
    finally:
        del filters[0]


def _kind(node: "Any") -> str:
    return type(node).__name__


def _read_statement(node: "Any", functions: "Dict[str, Any]") -> "Optional[Statement]":
    if _kind(node) != "Assign" or len(node.targets) != 1:
        return None
    target, value = node.targets[0], node.value
    if _kind(target) != "Attribute" or _kind(target.value) != "Name" or not _calls(value, "getattr", 3):
        return None
    owner, attribute, default = value.args
    if _kind(owner) != "Name" or owner.id != target.value.id or _text(attribute) != target.attr:
        return None
    calls = set()  # type: Set[str]
    if not _is_of_variables(default, functions, calls):
        return None
    return Statement(node, default, calls)


def _calls(node: "Any", name: str, count: int) -> bool:
    is_call = _kind(node) == "Call" and _kind(node.func) == "Name" and node.func.id == name
    return is_call and not node.keywords and len(node.args) == count


def _text(node: "Any") -> "Optional[str]":
    value = getattr(node, "value", None) if _kind(node) == "Constant" else None
    return value if isinstance(value, str) else None


def _is_environ(node: "Any") -> bool:
    return (
        _kind(node) == "Attribute"
        and node.attr == "environ"
        and _kind(node.value) == "Name"
        and node.value.id == "os"
    )


def _asks_variable(node: "Any") -> bool:
    """Return whether it is os.environ.get or os.getenv."""
    if _kind(node) != "Attribute":
        return False
    is_getenv = node.attr == "getenv" and _kind(node.value) == "Name" and node.value.id == "os"
    return is_getenv or (node.attr == "get" and _is_environ(node.value))


def _is_of_variables(node: "Any", functions: "Dict[str, Any]", calls: "Set[str]") -> bool:
    """Return whether an expression depends only on environment variables."""
    kind = _kind(node)
    if kind == "Constant":
        return True
    if kind == "UnaryOp":
        return _is_of_variables(node.operand, functions, calls)
    if kind == "BoolOp":
        return all(_is_of_variables(value, functions, calls) for value in node.values)
    if kind == "Subscript":
        index = node.slice.value if _kind(node.slice) == "Index" else node.slice  # Python 3.8 wraps it
        return _is_environ(node.value) and _kind(index) == "Constant"
    if kind != "Call" or node.keywords:
        return False
    if _asks_variable(node.func) or (_kind(node.func) == "Name" and node.func.id in CONVERTS):
        return 0 < len(node.args) < 3 and all(_is_of_variables(each, functions, calls) for each in node.args)
    name = node.func.id if _kind(node.func) == "Name" else ""
    if node.args or not _is_function_of_variables(functions.get(name)):
        return False
    calls.add(name)
    return True


def _is_function_of_variables(function: "Any") -> bool:
    """Return whether a function has no arguments or decorators, and only simple statements that read variables."""
    if function is None or function.decorator_list:
        return False
    arguments = function.args
    if any((arguments.args, arguments.posonlyargs, arguments.kwonlyargs, arguments.vararg, arguments.kwarg)):
        return False
    nodes, queue = [], list(function.body)
    while queue:
        node = queue.pop()
        nodes.append(node)
        for name in node._fields:
            value = getattr(node, name, None)
            queue += [each for each in (value if type(value) is list else [value]) if hasattr(each, "_fields")]
    if not all(_kind(node) in IN_FUNCTIONS for node in nodes):
        return False
    own = {node.id for node in nodes if _kind(node) == "Name" and _kind(node.ctx) == "Store"}
    called = [node.func for node in nodes if _kind(node) == "Call"]
    for node in nodes:
        kind = _kind(node)
        if kind == "Name" and node.id not in own and node.id != "os" and node.id not in CONVERTS:
            return False
        if kind == "Name" and node.id in own and (node.id == "os" or node.id in CONVERTS):
            return False
        is_known = kind != "Attribute" or _is_environ(node) or (_asks_variable(node) and node in called)
        if not is_known or (kind == "Attribute" and _kind(node.ctx) != "Load"):
            return False
        if kind == "Call" and (
            node.keywords
            or not (_asks_variable(node.func) or (_kind(node.func) == "Name" and node.func.id in CONVERTS))
        ):
            return False
        if kind == "Subscript" and (not _is_environ(node.value) or _kind(node.ctx) != "Load"):
            return False
        if (
            kind == "Name"
            and node.id == "os"
            and not any(_kind(each) == "Attribute" and each.value is node for each in nodes)
        ):
            return False
    return True


# ---- in the fork server ----------------------------------------------------------------------------------------


class _Environ:
    """The replacement of module os in a trial."""

    def __init__(self, environ: "Dict[str, str]") -> None:
        self.environ, self.getenv = environ, environ.get


class _Value:
    """One attribute that ranks recompute."""

    def __init__(self, who: str, variable: str, statement: "Statement", names: "Dict[str, Any]") -> None:
        self.who = who
        self.uses = {name: names[name] for name in ("os", *statement.calls)}  # objects that must not be replaced
        self.variable = variable
        self.statement = statement
        self.names = names  # of the module
        self.owner = names[statement.owner]
        tree = compile("0", "<%s>" % who, "eval", ONLY_PARSE, True)  # type: Any
        tree.body = statement.default
        self.code = compile(tree, "<%s>" % who, "eval", 0, True)
        self.proxy = None  # type: Any
        self.count = 0  # of references to it
        self.is_used = False

    def try_with(self, more: "Dict[str, str]") -> "Any":
        """Return the value with `more` variables added to the present ones."""
        environ = {_text_of(name): _text_of(value) for name, value in self.uses["os"].environ._data.items()}
        environ.update(more)
        names = dict(self.names)
        names["os"] = _Environ(environ)
        for name in self.statement.calls:
            function = self.names[name]
            names[name] = type(function)(function.__code__, names)
        return eval(self.code, names)

    def references(self) -> int:
        return sys.getrefcount(self.proxy)

    def is_like(self, other: "_Value") -> bool:
        """Return whether both values are the same, independent of which module is imported first."""
        return _is_same(self.code, other.code) and all(  # the same code calls functions of the same names
            _is_same(self.uses[name].__code__, other.uses[name].__code__) for name in self.statement.calls
        )

    @property
    def is_placed(self) -> bool:
        return vars(self.owner).get(self.statement.attribute) is self.proxy

    @property
    def is_fresh(self) -> bool:
        """Whether no code has used or kept the value, and the objects that compute it are unchanged."""
        if self.proxy is None or self.is_used or _hides_built_ins(self.names):
            return False
        if any(self.names.get(name) is not value for name, value in self.uses.items()):
            return False
        return self.references() <= self.count - (not self.is_placed)


def _hides_built_ins(names: "Dict[str, Any]") -> bool:
    """Return whether a module redefines a built-in function that such statements call."""
    return any(name in names for name in (*CONVERTS, "getattr"))


def _text_of(data: bytes) -> str:
    return data.decode(sys.getfilesystemencoding(), "surrogateescape")


def _is_same(code: "Any", other: "Any") -> bool:
    fields = ("co_code", "co_consts", "co_names", "co_varnames")
    return all(getattr(code, field) == getattr(other, field) for field in fields)


def _is_own(function: "Any", name: str, names: "Dict[str, Any]", module: "Any") -> bool:
    """Return whether it is the only function of this name that the module defines."""
    made = [each for each in module.co_consts if getattr(each, "co_name", "") == name]
    is_function = type(function) is type(_kind) and function.__globals__ is names
    return is_function and len(made) == 1 and function.__code__ == made[0]


class RankValues:
    """All attributes that ranks recompute."""

    def __init__(self, per_rank: "Any", find_module_frame: "Callable[[Any, str], Any]") -> None:
        """Args: per_rank: variables that differ between ranks; find_module_frame: that of import_watch.py."""
        self._sample = dict.fromkeys(per_rank, "1")
        self._find_module_frame = find_module_frame
        self._values = []  # type: List[_Value]
        self._known = {}  # type: Dict[Any, List[Statement]]  # by code of modules

    def take(self, who: str, variable: str, frame: "Any") -> bool:
        """Handle a read of a variable in this frame, or below it. Returns: whether the statement has the form."""
        try:
            return self._take(who, variable, frame)
        except Exception:
            return False

    def _take(self, who: str, variable: str, frame: "Any") -> bool:
        frame = self._find_module_frame(frame, who)
        if frame is None:
            return False
        names, code = frame.f_globals, frame.f_code
        if code not in self._known:
            self._known[code] = []
            with open(code.co_filename, "rb") as file:
                source = file.read(MAX_SOURCE_BYTES)
            if _compile(source, code.co_filename) == code:  # the source of the running code
                self._known[code] = find_statements(source, code.co_filename)
        statement = next((each for each in self._known[code] if each.first <= frame.f_lineno <= each.last), None)
        if statement is None or names.get("os") is not sys.modules["os"]:
            return False
        if _hides_built_ins(names):
            return False
        if any(value.names is names and value.statement is statement for value in self._values):
            return True
        owner = names[statement.owner]
        if type(owner) is not type(_kind) or hasattr(type(owner), statement.attribute):
            return False
        if not all(_is_own(names[name], name, names, code) for name in statement.calls):
            return False
        value = _Value(who, variable, statement, names)
        if type(value.try_with(self._sample)) is not int:
            return False  # None, True and False are singletons; C code would see another type in place of str
        if statement.attribute in vars(owner):
            return self._is_kept(value)
        return self._replace_after(value, frame)

    def _is_kept(self, value: "_Value") -> bool:
        """Return whether the present attribute may stay as it is."""
        for other in self._values:
            if other.owner is value.owner and other.is_placed and not other.is_like(value):
                other.is_used = True  # the value depends on the order of imports
                return False
        return True

    def _replace_after(self, value: "_Value", frame: "Any") -> bool:
        """Replace the value right after the statement, before any other code runs."""
        if sys.gettrace() is not None or frame.f_trace is not None:
            return False
        statement = value.statement

        def trace(frame: "Any", event: str, _argument: "Any") -> "Any":
            is_within = event == "line" and statement.first <= frame.f_lineno <= statement.last
            if is_within or event not in ("line", "return"):
                return trace
            sys.settrace(None)
            frame.f_trace = None
            try:
                self._replace(value)
            except Exception:
                value.is_used = True
            return None

        self._values.append(value)
        frame.f_trace = trace
        sys.settrace(lambda *_: None)
        return True

    def _replace(self, value: "_Value") -> None:
        def note() -> None:
            value.is_used = True

        statement = value.statement
        value.proxy = _make_proxy(getattr(value.owner, statement.attribute), note)
        setattr(value.owner, statement.attribute, value.proxy)
        value.count = value.references()

    def find_used(self) -> "List[Tuple[str, str]]":
        """Return modules and variables of values that imports have used or kept. Call it between imports."""
        return [(value.who, value.variable) for value in self._values if not value.is_fresh]

    def make_anew(self) -> None:
        """Recompute values from a rank's variables. Raises: RuntimeError if one was used; errors of statements."""
        for who, variable in self.find_used():
            raise RuntimeError("%s has used %s" % (who, variable))
        for value in self._values:
            if value.is_placed:  # else an import has set it
                setattr(value.owner, value.statement.attribute, eval(value.code, value.names))


def _make_proxy(value: "Any", note: "Callable[[], None]") -> "Any":
    """Return an object that can be passed on like the value, and calls `note` when it is used."""

    def make(name: str) -> "Any":
        def operation(_self: "Any", *args: "Any") -> "Any":
            note()
            if name == "__bool__":
                return bool(value)
            if hasattr(value, name):
                return getattr(value, name)(*args)
            if name.startswith("__r") and len(args) == 1:
                return getattr(args[0], "__" + name[3:])(value)
            return NotImplemented

        return operation

    names = {"__%s__" % name: make("__%s__" % name) for name in OPERATIONS}  # type: Dict[str, Any]

    def get_class(_self: "Any") -> "Any":
        note()
        return type(value)

    def get_attribute(_self: "Any", name: str) -> "Any":
        note()
        return getattr(value, name)

    names.update(__slots__=(), __getattr__=get_attribute, __class__=property(get_class), __module__="builtins")
    return type("RankValue", (), names)()
