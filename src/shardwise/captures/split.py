"""A function taken apart at a statement that cannot be captured: what is before and behind it is, it runs as it is.

The parts are functions of the local variables that they use, compiled from the function's own source with its line
numbers. Each gives back the variables that later parts use. The statement between them runs eagerly, in Python, with
real values: `return loss.item()`, `print(loss)`, `if not torch.isfinite(loss): return`, `x = x[mask]`. Nothing is done
twice, and no value is foretold. A part that cannot be captured is taken apart again.

Functions whose variables cannot be handed on are left whole: those with variables that inner functions share, with
`del`, `global`, `yield` or `super()`, lambdas, and those whose source is not at hand.
"""

from __future__ import annotations

import ast
import dis
import inspect
import itertools
import operator
import textwrap
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.captures.readings import SIMPLE
from shardwise.protocols import Item

_MAKER, _MISSING, _TREE = "__make__", "__missing__", "__tree__"
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LOOKING = frozenset({"locals", "vars", "dir", "eval", "exec", "super", "__class__", "globals"})
_REFUSED = (ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Match, ast.AsyncFor, ast.AsyncWith)
MISSING = object()  # the value of a variable that has none


class Part(NamedTuple):
    """Some statements of a function.

    Attributes:
        run: A function of the values of `takes`, and of what stands for no value. It gives (True, result) where the
            function returns, else False and the values of `gives`.
    """

    run: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    is_eager: bool


class Split:
    """A function in parts.

    Args:
        func: The function, or a method.
        line: The line of the statement that is to run eagerly.
        capture: What makes a captured function of a part.

    Raises:
        CannotSplit: Where its variables cannot be handed on.
    """

    def __init__(self, func: Callable[..., Any], line: int, capture: Callable[..., Any]) -> None:
        self._func, self._capture = func, capture
        self._source = source = _Source(func)
        statements = source.tree.body
        at = next((i for i, s in enumerate(statements) if s.lineno <= line <= (s.end_lineno or s.lineno)), None)
        if at is None or all(isinstance(s, (ast.Return, ast.Pass)) or i == at for i, s in enumerate(statements)):
            raise CannotSplit("no other statement is left")
        self._known = _identity(func)
        self._enter = source.entry()
        self.names = source.argument_names
        self._bound = set(source.bound)
        self._rest = statements[at + 1 :]
        self.parts: list[Part] = []
        if at:
            self._add(statements[:at], statements[at:], is_eager=False)
        self._add([statements[at]], self._rest, is_eager=True)
        first, last = statements[at].lineno, statements[at].end_lineno or statements[at].lineno
        self.where = f"line {first}" if first == last else f"lines {first} to {last}"
        self.reason = ""  # why it is taken apart

    def _add(self, group: Sequence[ast.stmt], later: Sequence[ast.stmt], is_eager: bool) -> None:
        part = self._source.part(group, self._bound, set(_names(later)), is_eager)
        self.parts.append(part if is_eager else part._replace(run=self._capture(part.run, part.gives)))
        self._bound |= _surely_bound(group)

    def _add_rest(self, numbers: set[str]) -> None:
        """The statements behind the eager one: those that name numbers which came out of it run eagerly too, since they
        are other numbers at each call."""
        rest, self._rest = self._rest, []
        kinds = [bool(numbers.intersection(_names([s]))) for s in rest]
        at = 0
        for is_eager, group in itertools.groupby(zip(kinds, rest, strict=True), operator.itemgetter(0)):
            statements = [s for _, s in group]
            at += len(statements)
            trivial = all(isinstance(s, (ast.Return, ast.Pass)) for s in statements)
            self._add(statements, rest[at:], is_eager or trivial)

    @property
    def captured(self) -> list[Item]:
        """The captured parts."""
        return [part.run for part in self.parts if not part.is_eager]

    def fits(self) -> bool:
        """Whether the function is still the one that was taken apart."""
        return all(map(lambda one, other: one is other, self._known, _identity(self._func)))

    def __call__(self, *args: Item, **kwargs: Item) -> Item:
        own = self._func.__self__ if isinstance(self._func, types.MethodType) else MISSING
        entered = self._enter(*args, **kwargs) if own is MISSING else self._enter(own, *args, **kwargs)
        values = dict(zip(self.names, entered, strict=True))
        del entered, args, kwargs
        at = 0
        while at < len(self.parts):
            run, takes, gives, is_eager = self.parts[at]
            at += 1
            done, *found = run(*[values.get(name, MISSING) for name in takes], MISSING)
            if done:
                return found[0]
            for name, value in zip(gives, found, strict=True):
                if value is MISSING:
                    values.pop(name, None)
                else:
                    values[name] = value
            del found
            if self._rest and is_eager:
                self._add_rest({name for name in gives if type(values.get(name)) in (int, float, complex)})
        return None


class CannotSplit(Exception):
    """Why a function is left whole."""


def can_be_handed_on(value: Item, is_known: Callable[[object], bool]) -> bool:
    """Whether a variable may pass from a captured part to the next one: a replay gives the same, or an equal new one
    where nobody can tell. What is made in a part and may be changed cannot."""
    if isinstance(value, (torch.Tensor, *SIMPLE)) or value is MISSING:
        return True
    if type(value) is tuple:
        return all(can_be_handed_on(item, is_known) for item in value)
    return not isinstance(value, (list, dict, set, tuple)) and is_known(value)


def _function_of(func: Callable[..., Any]) -> types.FunctionType:
    found = func.__func__ if isinstance(func, types.MethodType) else func
    if not isinstance(found, types.FunctionType):
        raise CannotSplit("it is no plain function")
    return found


def code_of(func: Callable[..., Any]) -> types.CodeType | None:
    """The code of a function or method; None for other callables."""
    found = func.__func__ if isinstance(func, types.MethodType) else func
    return found.__code__ if isinstance(found, types.FunctionType) else None


def _identity(func: Callable[..., Any]) -> tuple[object, ...]:
    found = _function_of(func)
    return found.__code__, found.__defaults__, found.__kwdefaults__, found.__globals__


class _Source:
    """The source of a function, and functions made of parts of it."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = function = _function_of(func)
        code, known = function.__code__, vars(function).get(_TREE)
        if known is None:
            self.tree = self._parsed(function)
            if not _are_alike(self._compiled(self.tree.args, self.tree.body).__code__, code):
                raise CannotSplit("its source is not what runs")
        self.argument_names = code.co_varnames[: _count(code)]
        self._locals = frozenset(code.co_varnames)
        self.bound = set(self.argument_names)
        if known is not None:  # a part of a function that is taken apart already
            self.tree, missing = known
            self.bound -= missing

    @staticmethod
    def _parsed(function: types.FunctionType) -> ast.FunctionDef:
        code = function.__code__
        if code.co_cellvars or code.co_flags & _GENERATORS:
            raise CannotSplit("functions inside of it share its variables, or it is a generator")
        try:
            lines, first = inspect.getsourcelines(function)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError) as error:
            raise CannotSplit("its source is not at hand") from error
        node = tree.body[0]
        if not isinstance(node, ast.FunctionDef):
            raise CannotSplit("it is no function that has a name")
        ast.increment_lineno(tree, first - 1)
        for inner in ast.walk(node):
            if isinstance(inner, _REFUSED) or (isinstance(inner, ast.ExceptHandler) and inner.name):
                raise CannotSplit(f"it has a {type(inner).__name__}")
            if isinstance(inner, ast.Delete) and any(isinstance(target, ast.Name) for target in inner.targets):
                raise CannotSplit("it deletes a variable")
            if isinstance(inner, ast.Name) and inner.id in _LOOKING:
                raise CannotSplit(f"it uses {inner.id}")
        return node

    def _compiled(self, args: ast.arguments, body: Sequence[ast.stmt]) -> types.FunctionType:
        """A function with these arguments and statements, where the original stands."""
        func, node = self._func, self.tree
        bare = ast.arguments(
            posonlyargs=[_bare(a) for a in args.posonlyargs],
            args=[_bare(a) for a in args.args],
            vararg=_bare(args.vararg) if args.vararg else None,
            kwonlyargs=[_bare(a) for a in args.kwonlyargs],
            kw_defaults=[None if d is None else ast.Constant(None) for d in args.kw_defaults],
            kwarg=_bare(args.kwarg) if args.kwarg else None,
            defaults=[ast.Constant(None) for _ in args.defaults],
        )
        made = ast.FunctionDef(node.name, bare, list(body), decorator_list=[], returns=None)
        free = func.__code__.co_freevars
        outer_args = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
        outer = ast.FunctionDef(
            _MAKER, outer_args, [made, ast.Return(ast.Name(node.name, ast.Load()))], decorator_list=[], returns=None
        )
        for each in (made, outer):
            if hasattr(node, "type_params"):  # since Python 3.12
                setattr(each, "type_params", [])  # noqa: B010
        module = ast.fix_missing_locations(ast.copy_location(ast.Module([outer], []), node))
        code = compile(module, func.__code__.co_filename, "exec", dont_inherit=True, flags=_future(func))
        maker = next(c for c in code.co_consts if isinstance(c, types.CodeType))
        inner = next(c for c in maker.co_consts if isinstance(c, types.CodeType) and c.co_name == node.name)
        cells = dict(zip(free, func.__closure__ or (), strict=True))
        built = types.FunctionType(
            inner, func.__globals__, func.__name__, None, tuple(cells[name] for name in inner.co_freevars)
        )
        built.__module__, built.__qualname__ = func.__module__, func.__qualname__
        return built

    def entry(self) -> types.FunctionType:
        """A function with the arguments of the original that gives their values."""
        names = [ast.Name(name, ast.Load()) for name in self.argument_names]
        built = self._compiled(self.tree.args, [ast.Return(ast.Tuple(list(names), ast.Load()))])
        built.__defaults__, built.__kwdefaults__ = self._func.__defaults__, self._func.__kwdefaults__
        return built

    def part(self, group: Sequence[ast.stmt], bound: set[str], later: set[str], is_eager: bool) -> Part:
        """Some statements as a function of the variables in them."""
        used = [name for name in dict.fromkeys(_names(group)) if name in self._locals and name != _MISSING]
        gives = tuple(name for name in dict.fromkeys(_stored(group)) if name in self._locals and name in later)
        surely = bound | _surely_bound(group)
        missing = [name for name in used if name not in bound]
        guards: list[ast.stmt] = []
        for name in missing:  # if name is __missing__: del name
            test = ast.Compare(ast.Name(name, ast.Load()), [ast.Is()], [ast.Name(_MISSING, ast.Load())])
            guards.append(ast.If(test, [ast.Delete([ast.Name(name, ast.Del())])], []))
        body: list[ast.stmt] = [_Returns().visit(_copied(s)) for s in group]
        values: list[ast.expr] = [ast.Constant(False)]
        for name in gives:
            if name in surely:
                values.append(ast.Name(name, ast.Load()))
            else:
                look = ast.Attribute(ast.Call(ast.Name("locals", ast.Load()), [], []), "get", ast.Load())
                values.append(ast.Call(look, [ast.Constant(name), ast.Name(_MISSING, ast.Load())], []))
        end = ast.Return(ast.Tuple(values, ast.Load()))
        for made in (*guards, end):
            ast.copy_location(made, group[0] if made is not end else group[-1])
        body.append(end)
        args = ast.arguments([], [ast.arg(name) for name in (*used, _MISSING)], None, [], [], None, [])
        run = self._compiled(args, [*guards, *body])
        tree = ast.FunctionDef(self.tree.name, args, body, decorator_list=[], returns=None)
        vars(run)[_TREE] = ast.copy_location(tree, self.tree), set(missing)
        return Part(run, tuple(used), gives, is_eager)


class _Returns(ast.NodeTransformer):
    """`return x` becomes `return True, x`, but not in functions inside."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        value = node.value or ast.Constant(None)
        return ast.copy_location(ast.Return(ast.Tuple([ast.Constant(True), value], ast.Load())), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node


def _copied(statement: ast.stmt) -> ast.stmt:
    """The statement as a tree of its own, with its lines."""
    fields: dict[str, Item] = {}
    for name, value in ast.iter_fields(statement):
        if isinstance(value, list):
            fields[name] = [_copied(item) if isinstance(item, ast.AST) else item for item in value]  # type: ignore[arg-type]
        else:
            fields[name] = _copied(value) if isinstance(value, ast.AST) else value  # type: ignore[arg-type]
    made: Item = type(statement)(**fields)
    return ast.copy_location(made, statement)


def _bare(arg: ast.arg) -> ast.arg:
    return ast.arg(arg.arg)


def _names(statements: Iterable[ast.stmt]) -> list[str]:
    """All names in statements, in order; those that functions and classes inside are given too."""
    found: list[str] = []
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                found.append(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.append(node.name)
            elif isinstance(node, ast.alias):
                found.append((node.asname or node.name).partition(".")[0])
    return found


def _stored(statements: Iterable[ast.stmt]) -> list[str]:
    """Names that statements give values to."""
    stores = [
        node.id
        for s in statements
        for node in ast.walk(s)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    others = {node.id for s in statements for node in ast.walk(s) if isinstance(node, ast.Name)}
    return stores + [name for name in _names(statements) if name not in others]


def _surely_bound(statements: Iterable[ast.stmt]) -> set[str]:
    """Names that have a value once the statements have run to their end."""
    found: set[str] = set()
    for statement in statements:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.With):
            targets = [item.optional_vars for item in statement.items if item.optional_vars is not None]
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found.add(statement.name)
        for target in targets:
            found |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found


def _count(code: types.CodeType) -> int:
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_argcount + code.co_kwonlyargcount + stars


def _future(func: types.FunctionType) -> int:
    return func.__code__.co_flags & 0x1FFF000  # what `from __future__` has turned on


def _are_alike(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two pieces of code do the same."""
    inner = [[c for c in code.co_consts if isinstance(c, types.CodeType)] for code in (one, other)]
    return (
        (one.co_varnames, one.co_freevars) == (other.co_varnames, other.co_freevars)
        and _instructions(one) == _instructions(other)
        and len(inner[0]) == len(inner[1])
        and all(map(_are_alike, *inner))
    )


def _instructions(code: types.CodeType) -> list[tuple[str, str]]:
    """What code does, step by step; the same whether or not Python knows that a name is a module's, which it calls a
    function of in another way."""
    found = []
    for step in dis.get_instructions(code):
        if step.opname not in ("PUSH_NULL", "CACHE", "NOP", "EXTENDED_ARG"):
            name = "LOAD_ATTR" if step.opname == "LOAD_METHOD" else step.opname
            is_code = isinstance(step.argval, types.CodeType)
            found.append((name, "" if is_code or "JUMP" in name or name == "FOR_ITER" else repr(step.argval)))
    return found
