"""Does a program give on a mesh what it gives on one device? Values, gradients, dtypes, strides, which error."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.argument_types import MeshArgument
from shardwise.comm.messages import clocks
from shardwise.mesh import Mesh, as_mesh, simulate
from shardwise.tensor import DTensor
from shardwise.testing.fuzz.defects import defects
from shardwise.testing.fuzz.program import Program, names_made, names_used
from shardwise.testing.fuzz.setting import Words, on_mesh, plain_torch
from shardwise.testing.spread import is_float
from shardwise.testing.trial import TOLERANCE, differ_in_recording
from shardwise.torch_private.autograd import enable_saved_hooks
from shardwise.torch_private.tensors import DispatchMode

RIGHT = "right"
WRONG = "wrong"  # another value, gradient, shape, dtype, stride or requires_grad, in silence
NO_ERROR = "no error"  # plain torch raises and we do not
OTHER_ERROR = "other error"  # both raise, not the same kind or not on the same line
RAISED = "raised"  # plain torch does not raise and we do
TORCHS = "torch's own"  # a defect of torch (`defects.py`)
INEXACT = "inexact"  # results that plain torch itself does not repeat when the inputs change in their last bits


OUT_OF_STEP = "the ranks have come to different numbers of collectives"
_SHAKES = 3  # how often the inputs are changed, until a result changes

# a change of the inputs in the last bits; results that change by more than their tolerance say nothing
_LAST_BITS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


# a size that one library on this machine does not take, or an op that torch has not for a GPU
_MISSING_THERE = re.compile(r"MKL|Could not run '.*' with arguments from the 'CUDA' backend")

# a statement that may write into memory
_MAY_WRITE = re.compile(r"\w_\(|out=|\][^=]?=[^=]|[-+*/]=|\.data\b|in-?place|InPlace")
# a statement that makes an input; its arguments may name a form of an op that writes
_IS_INPUT = re.compile(r"^\w+ = (tensor|given)\(")


@dataclass(frozen=True)
class Verdict:
    """How a program ended: one of the words above, where and why."""

    kind: str
    message: str = ""
    name: str = ""  # the variable that differs
    refused: bool = False  # whether plain torch raises

    @property
    def right(self) -> bool:
        return self.kind in (RIGHT, INEXACT, TORCHS)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


@dataclass
class Played:
    """What a run of a program left: its variables, and the error that ended it."""

    variables: dict[str, object] = field(default_factory=dict)
    line: int = -1
    error: Exception | None = None


def play(program: Program, setting: AbstractContextManager[Words]) -> Played:
    """Run the statements one after another, until one raises."""
    played = Played()
    enable_saved_hooks()  # torch 2.11 leaves them forbidden after an error inside of torch.func
    with setting as words, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        space = dict(words)
        for n, line in enumerate(program.lines):
            try:
                exec(compile(line, f"<line {n}>", "exec"), space)
            except Exception as error:
                played.line, played.error = n, error
                break
    made = [name for line in program.lines for name in names_made(line)]
    played.variables = {name: space[name] for name in dict.fromkeys(made) if name in space}
    return played


def judge(program: Program, mesh: MeshArgument | None = None, strides: bool = True) -> Verdict:
    """Run a program on one device and on a mesh, and compare everything that it made.

    Args:
        program: The program.
        mesh: A mesh of the program's shape; by default a simulated one. On a mesh of processes, every rank makes this
            call with the same program.
        strides: Whether to compare strides too.

    Returns:
        What was found, RIGHT if nothing.
    """
    mesh = simulate(program.mesh) if mesh is None else mesh
    where = as_mesh(mesh)
    device, told = where.device.type, _itself if where.comm.simulated else _told_by_all
    plain = play(program, plain_torch(device=device))
    ours = play(program, on_mesh(mesh))
    verdict = _compared(program, ours, plain, where, told, strides)
    return replace(verdict, refused=plain.error is not None)


def _compared(
    program: Program, ours: Played, plain: Played, where: Mesh, told: Callable[[Any], list[Any]], strides: bool
) -> Verdict:
    device = where.device.type
    if plain.error is not None and _MISSING_THERE.search(str(plain.error)):
        return Verdict(RIGHT)
    ends = told(f"line {ours.line + 1}: {type(ours.error).__name__}" if ours.error else "the end")
    if len(set(ends)) > 1:
        return Verdict(WRONG, f"the ranks do not end alike: {', '.join(ends)}")
    if not where.comm.simulated:  # a process may still have clocks of process groups that it had earlier
        counts = told({(clock.name, ranks): clock.count for (_, ranks), clock in clocks.items()})
        if not in_step(counts):  # the next program would wait for ever
            return Verdict(WRONG, f"{OUT_OF_STEP}: {counts}")
    # Kernels of GPUs do not give the same each time, so that one rank may find a difference and another none. All ranks
    # compare everything, which communicates, and agree afterwards.
    found = _first(told(_errors(program, ours, plain) or _first_difference(ours, plain, program, strides)))
    if found is None:
        return Verdict(RIGHT)
    if found.kind == WRONG and any(told(_inexact(program, ours, plain, found.name, device))):
        return Verdict(INEXACT, found.message, found.name)
    if found.kind == WRONG:
        inner = _least_exact_inside(program, device)
        if not _first(told(_first_difference(ours, plain, program, strides, inner))):
            return Verdict(INEXACT, found.message, found.name)
    reason = _first(told(_torchs_own(program, ours, found, strides, device)))
    return Verdict(TORCHS, reason, found.name) if reason else found


def in_step(counts: Sequence[dict[tuple[str, tuple[int, ...]], int]]) -> bool:
    """Whether the ranks of each group have counted as many collectives in it. `counts` has what each rank counted."""
    groups = {group for counted in counts for group in counted}
    return all(len({counts[rank].get((name, ranks), 0) for rank in ranks}) < 2 for name, ranks in groups)


T = TypeVar("T")


def _itself(found: T) -> list[T]:
    return [found]


def _told_by_all(found: T) -> list[T]:
    """What every rank found."""
    everyone: list[T] = [found] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def _first(found: Iterable[T]) -> T | None:
    """The first that is something."""
    return next(filter(None, found), None)


def _torchs_own(program: Program, ours: Played, found: Verdict, strides: bool, device: str) -> str:
    """The defect of torch that explains what was found; empty if none does."""
    explained = []
    for defect in defects(program):
        if not defect.instead:
            words = {NO_ERROR: defect.says, WRONG: defect.gives}.get(found.kind, "")
            made = [line for line in program.lines if found.name in names_made(line)]
            of_op = found.name in ("", *_gradients(program)) or any(re.search(defect.op, line) for line in made)
            if words and of_op and re.search(words, found.message):
                explained.append(defect.reason)
            continue
        mended = defect.mended(program)
        plain = play(mended, plain_torch(device=device))
        differs = _first_difference(ours, plain, mended, strides)
        if differs is None and _errors(mended, ours, plain) is None:
            explained.append(defect.reason)
    return explained[0] if explained else ""


def _errors(program: Program, ours: Played, plain: Played) -> Verdict | None:
    if ours.error is None and plain.error is None:
        return None
    said = lambda p: f"{type(p.error).__name__} on line {p.line + 1} ({program.lines[p.line]}): {p.error}"
    if ours.error is None:
        return Verdict(NO_ERROR, f"plain torch raises {said(plain)}")
    if plain.error is None:
        return Verdict(RAISED, said(ours))
    if ours.line < plain.line:
        return Verdict(RAISED, said(ours))
    if ours.line > plain.line:
        return Verdict(NO_ERROR, f"plain torch raises {said(plain)}")
    if not isinstance(ours.error, _kind_of(plain.error)):
        return Verdict(OTHER_ERROR, f"{said(ours)}; plain torch raises {type(plain.error).__name__}: {plain.error}")
    return None


def _kind_of(error: Exception) -> type[BaseException]:
    """What a caller would catch: the first class of the error that is built into Python."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")


class _DtypesInside(DispatchMode):
    """Notes how exact the dtypes are that are computed with, also between the variables: ``x.float().sum() * y``."""

    least_exact = 0.0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        made = _tensors(result if isinstance(result, (tuple, list)) else [result])
        self.least_exact = max(self.least_exact, *(TOLERANCE.get(x.dtype, 0.0) for x in made), 0.0)
        return result


def _least_exact_inside(program: Program, device: str) -> float:
    with _DtypesInside() as inside:
        play(program, plain_torch(device=device))
    return inside.least_exact


def _first_difference(
    ours: Played, plain: Played, program: Program, strides: bool, inside: float = 0.0
) -> Verdict | None:
    least_exact = max((TOLERANCE.get(x.dtype, 0.0) for x in _tensors(plain.variables.values())), default=inside)
    least_exact = max(least_exact, inside)
    gradients, differences = _gradients(program), []
    shared = _share_gradients(plain.variables.values())
    half_written = names_used(program.lines[plain.line]) if plain.error is not None else ()
    for name, want in plain.variables.items():
        if name in half_written:  # torch's kernels raise in the midst of writing
            continue
        if name not in ours.variables:
            differences.append(Verdict(WRONG, f"{name} is missing", name))
            continue
        try:
            with_strides, with_grads = strides and name not in gradients, plain.error is None and not shared
            found = different(ours.variables[name], want, least_exact, with_strides, with_grads)
        except Exception as error:
            if _raises(want):
                continue
            differences.append(Verdict(RAISED, f"{type(error).__name__} when {name} is read: {error}"))
            continue
        if found:
            differences.append(Verdict(WRONG, f"{name}: {found}", name))
    return differences[0] if differences else None


def _gradients(program: Program) -> set[str]:
    """The names of gradients, and of what is made of them. Plain torch promises nothing about their strides: whichever
    node came last decides."""
    found: set[str] = set()
    for line in program.lines:
        made = line.startswith("g") or any(word in line for word in ("torch.func.", "torch.autograd.", "forward_mode"))
        if made or not found.isdisjoint(names_used(line)):
            found.update(names_made(line))
    return found


def _share_gradients(found: Iterable[object]) -> bool:
    """Whether ``.grad`` of two leaves is the same memory: plain torch then adds the next gradients to it twice."""
    readable = [x for x in _tensors(found) if not _raises(x)]
    grads = [x.grad for x in readable if x.is_leaf and x.grad is not None and x.grad.numel()]
    return len({grad.data_ptr() for grad in grads}) < len(grads)


def _raises(plain: object) -> bool:
    """Whether plain torch's own variable cannot be read."""
    try:
        different(plain, plain, 0.0, True)
    except Exception:
        return True
    return False


def _tensors(found: Iterable[object]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for value in found:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += _tensors(value)
    return tensors


def different(got: object, want: object, least_exact: float, strides: bool, grads: bool = True) -> str:
    """How a variable differs from plain torch's; empty if it does not. `grads`: whether ``.grad`` counts."""
    if isinstance(want, torch.nn.Module) and isinstance(got, torch.nn.Module):
        mine, theirs = got.state_dict(keep_vars=True), want.state_dict(keep_vars=True)
        pairs = [(name, different(mine[name], theirs[name], least_exact, strides, grads)) for name in theirs]
        return next((f"{name}: {found}" for name, found in pairs if found), "")
    if isinstance(want, (tuple, list)) and not isinstance(want, torch.Size):
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            return f"{got!r} instead of {len(want)} results"
        each = [different(g, w, least_exact, strides, grads) for g, w in zip(got, want, strict=True)]
        return next((f"[{i}]: {found}" for i, found in enumerate(each) if found), "")
    if not isinstance(want, torch.Tensor):
        return _different_value(got, want, least_exact)
    if not isinstance(got, torch.Tensor):
        return "" if got is None and not want.any() else f"{got!r} instead of a tensor"
    return _different_tensor(got, want, least_exact, strides, grads)


def _different_value(got: object, want: object, least_exact: float) -> str:
    if want is None and isinstance(got, torch.Tensor):  # no gradient and a gradient of zeros say the same
        return "a tensor instead of None" if bool(got.any()) else ""
    if isinstance(want, float) and isinstance(got, float):
        near = abs(got - want) <= least_exact * max(1.0, abs(want))
        return "" if near or got == want or (got != got and want != want) else f"{got!r} instead of {want!r}"
    if isinstance(want, (int, str, tuple, type(None))) and not isinstance(got, torch.Tensor):
        return "" if got == want else f"{got!r} instead of {want!r}"
    return ""


def _different_tensor(got: torch.Tensor, want: torch.Tensor, least_exact: float, strides: bool, grads: bool) -> str:
    facts = {
        "shape": (tuple(got.shape), tuple(want.shape)),
        "dtype": (got.dtype, want.dtype),
        "requires_grad": (got.requires_grad, want.requires_grad),
        "is_leaf": (got.is_leaf, want.is_leaf),
    }
    if not want.numel() and not strides:
        del facts["requires_grad"], facts["is_leaf"]  # of nothing, torch's gradient of cummin is the operand itself
    if strides:
        facts["stride"] = (got.stride(), want.stride())
    for fact, (mine, theirs) in facts.items():
        if mine != theirs:
            return f"{fact} {mine} instead of {theirs}"
    if isinstance(got, DTensor) and differ_in_recording(got):
        return "requires_grad differs between the ranks"  # which then communicate at different times
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        full = DTensor.full_tensor(got.detach()) if isinstance(got, DTensor) else got.detach()  # type: ignore[arg-type]
        found = _different_numbers(full, want.detach(), least_exact)
        # how far a backward pass came that raised is nobody's business
        if grads and (want.is_leaf or want.retains_grad) and want.grad is not None:
            in_gradient = _different_gradient(got.grad, want.grad, least_exact)
            return found or in_gradient
        return found


def _different_gradient(got: torch.Tensor | None, want: torch.Tensor, least_exact: float) -> str:
    if got is None:
        return "" if not want.any() else "grad: None instead of a tensor"
    found = _different_tensor(got, want, least_exact, False, False)
    return f"grad: {found}" if found else ""


def _different_numbers(got: torch.Tensor, want: torch.Tensor, least_exact: float) -> str:
    if tuple(got.shape) != tuple(want.shape) or got.dtype != want.dtype:
        return f"the whole tensor is of {tuple(got.shape)}, {got.dtype}, instead of {tuple(want.shape)}, {want.dtype}"
    tolerance = max(TOLERANCE[want.dtype], least_exact) if want.dtype in TOLERANCE else 0.0
    scale = 1.0
    if want.dtype in TOLERANCE and want.numel():  # errors of sums grow with the largest value
        scale = max(1.0, want.abs().to(torch.float64).nan_to_num(0, 0, 0).max().item())
    try:
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    except AssertionError as error:
        first = lambda x: x.flatten().tolist()[:12]
        return f"{' '.join(str(error).split())}\n  got  {first(got)}\n  want {first(want)}"
    return ""


def _inexact(program: Program, ours: Played, plain: Played, name: str, device: str) -> bool:
    """Whether plain torch's own result changes with the last bits of the inputs, or of what is computed from them; or
    zeros, that it may have been computed from, are not of the same sign: parts of a sum keep no such signs."""
    dtypes = {x.dtype for x in _tensors(plain.variables.values())}
    jitter = max((bits for dtype, bits in _LAST_BITS.items() if dtype in dtypes), default=1e-13)
    least_exact = max((TOLERANCE.get(x.dtype, 0.0) for x in _tensors(plain.variables.values())), default=0.0)
    follows = _follows(program, ours, plain, name, least_exact, device)
    before = itertools.takewhile(lambda made: made != name, plain.variables)
    other_zeros = [_other_zeros(ours.variables.get(made), plain.variables[made]) for made in before]
    if follows or any(other_zeros):
        return True
    shaken = (play(program, plain_torch(jitter, device, seed)).variables.get(name) for seed in range(_SHAKES))
    return any(different(found, plain.variables[name], least_exact / 10, True) for found in shaken)


def _follows(program: Program, ours: Played, plain: Played, name: str, least_exact: float, device: str) -> bool:
    """Whether plain torch's statement gives our result for our own operands, which differ in their last bits: a number
    that is zero but for rounding, and then compared with zero."""
    made = [line for line in program.lines if name in names_made(line)]
    since = program.lines[program.lines.index(made[-1]) :] if made else ()
    calls = (line for line in since if not _IS_INPUT.search(line))
    if any(map(_MAY_WRITE.search, calls)):  # to the operands, the result, or to what shares memory with them
        return False
    used = {word: ours.variables[word] for word in names_used(made[-1]) if word in ours.variables}
    if len(made) != 1 or not used or not all(isinstance(value, DTensor) for value in used.values()):
        return False
    got, other = ours.variables[name], plain.variables[name]
    if not isinstance(got, DTensor) or not isinstance(other, torch.Tensor):
        return False
    numbers = DTensor.full_tensor(got.detach())  # type: ignore[arg-type]
    with plain_torch(device=device) as words, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        space = words | {word: _stored_as(plain.variables[word], x) for word, x in used.items()}
        try:
            exec(compile(made[0], "<line>", "exec"), space)
        except Exception:
            return False
    want = space[name]
    if not isinstance(want, torch.Tensor):
        return False
    facts_agree = (got.dtype, got.requires_grad) == (other.dtype, other.requires_grad)
    differ = bool(_different_numbers(numbers, other.detach(), least_exact))  # else it is strides that do
    return facts_agree and differ and not _different_numbers(numbers, want.detach(), least_exact)


def _stored_as(plain: object, ours: object) -> torch.Tensor:
    """The whole of our tensor with the strides of plain torch's: kernels may go through it in that order."""
    whole = DTensor.full_tensor(ours.detach())  # type: ignore[attr-defined]
    if not isinstance(plain, torch.Tensor) or plain.shape != whole.shape or _has_overlaps(plain):
        return whole
    return torch.empty_strided(whole.shape, plain.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)


def _has_overlaps(x: torch.Tensor) -> bool:
    """Whether elements of a tensor are one in memory."""
    places = torch.zeros((), dtype=torch.int64)
    for size, step in zip(x.shape, x.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * step
    return len(places.unique()) < x.numel()


def _other_zeros(got: object, want: object) -> bool:
    """Whether two tensors have zeros of other signs."""
    if not isinstance(got, DTensor) or not isinstance(want, torch.Tensor) or not is_float(want.dtype):
        return False
    with torch.no_grad():
        pair = DTensor.full_tensor(got.detach()), want.detach()  # type: ignore[arg-type]
        if want.dtype.is_complex:
            pair = torch.view_as_real(pair[0].resolve_conj()), torch.view_as_real(pair[1].resolve_conj())
        return any(x.shape != pair[1].shape for x in pair) or bool(
            ((pair[1] == 0) & (pair[0].signbit() != pair[1].signbit())).any()
        )
