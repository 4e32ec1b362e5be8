"""Random programs: every statement is tried on plain torch when it is chosen, so that what comes next fits it."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.layout import Partial, Placement
from shardwise.testing.fuzz.grammar import (
    FAMILIES,
    MODULE_CALLS,
    MODULES,
    OPTIMIZERS,
    OPTIONS,
    SCHEDULES,
    WRITING,
    templates,
)
from shardwise.testing.fuzz.program import Program
from shardwise.testing.fuzz.setting import plain_torch, samples
from shardwise.testing.fuzz.slots import Fits, NothingFits, Slots
from shardwise.testing.spread import is_float, random_placements, reductions_for
from shardwise.testing.subjects import Operator, subjects
from shardwise.torch_private.autograd import enable_saved_hooks

MESHES = ((2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (2, 1, 2), (1,), (5,), (2, 2, 2))
_DTYPES = (
    [torch.float64] * 24 + [torch.float32] * 5 + [torch.complex128] * 3 + [torch.int64] * 4 + [torch.bool] * 2
    + [torch.bfloat16, torch.float16, torch.complex64, torch.int32, torch.uint8, torch.int8]
)  # fmt: skip
_SLOT = re.compile(r"\{([a-z]+\d?)(?::([^}]*))?\}")
# Under no_grad, what these leave of a tensor with a graph depends on how the gradient of the last op is written.
_CHANGES_SHAPE = re.compile(r"\.(unsqueeze|squeeze|transpose|t|swapaxes|resize_as)_\(")
_WRITES_OF_RESULT = (
    "{y}.mul_(2)", "{y}.add_({y}.detach())", "{y}.sin_()", "{y}.pow_(2)", "{y}[...,:1].mul_(3)", "{y}.unsqueeze_(0)",
    "{y}.squeeze_()", "{y}.swapdims_(0,-1)", "{y}.view(-1).mul_(2)", "{y}.flatten()[:1].zero_()",
)  # fmt: skip
_LARGEST = 1e4  # what grows beyond is not computed on


def compose(
    seed: int,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    length: tuple[int, int] = (5, 20),
    errors: bool = True,
) -> Program:
    """A random program.

    Args:
        seed: The same seed gives the same program.
        meshes: Shapes of meshes to choose from.
        length: The least and largest number of statements besides inputs.
        errors: Whether the last statement may make plain torch raise. On a GPU some errors end the process.

    Returns:
        The program.
    """
    rng = random.Random(f"program {seed}")
    composer = Composer(rng, rng.choice(list(meshes)), errors)
    if rng.random() < 0.15:
        composer.add_written_result()
        return Program(composer.mesh, tuple(composer.lines))
    for _ in range(rng.randint(1, 3)):
        composer.new_input(composer.any_shape(), rng.choice(_DTYPES))
    wanted = rng.randint(*length)
    for _ in range(6 * wanted):
        if composer.statements >= wanted or composer.ended:
            break
        composer.add_statement()
    if not composer.ended:
        composer.add_derivatives()
    return Program(composer.mesh, tuple(composer.lines))


class Composer:
    """A program while it is written, with what plain torch made of it so far."""

    def __init__(self, rng: random.Random, mesh: tuple[int, ...], errors: bool) -> None:
        self.rng, self.mesh, self.errors = rng, mesh, errors
        self.lines: list[str] = []
        self.space: dict[str, Any] = {}
        self.leaves: list[str] = []
        self.statements = self.count = 0
        self.ended = False
        self.writes = rng.random() < 0.6  # whether there are writes in place
        self.restart()

    # -- running on plain torch ----------------------------------------------------------------------------------
    def restart(self) -> None:
        """Run what is written so far again: a statement that failed may have changed something."""
        enable_saved_hooks()
        with plain_torch() as words:
            self.space = dict(words)
        lines, self.lines = self.lines, []
        for line in lines:
            self.take(line)

    def take(self, line: str) -> None:
        """Run a statement and keep it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(line, self.space)
        self.lines.append(line)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: x for name, x in self.space.items() if isinstance(x, torch.Tensor) and name[0] in "xy"}

    def fresh_name(self, kind: str = "y") -> str:
        self.count += 1
        return f"{kind}{self.count}"

    # -- inputs --------------------------------------------------------------------------------------------------
    def any_shape(self, dims: int | None = None) -> tuple[int, ...]:
        dims = self.rng.choice([0, 1, 1, 2, 2, 2, 2, 3, 3, 4]) if dims is None else dims
        return tuple(self.rng.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 0] if dims < 4 else [1, 2, 3, 4]) for _ in range(dims))

    def placements(self, x: torch.Tensor) -> str:
        """Random placements, as text."""
        chosen = random_placements(x, self.mesh, self.rng, reductions_for(x))
        return f"[{', '.join(map(_as_text, chosen))}]"

    def new_input(self, shape: Sequence[int], dtype: torch.dtype = torch.float64, grad: bool | None = None) -> str:
        """Write a statement that makes an input, and give its name."""
        name, seed = self.fresh_name("x"), self.rng.randrange(1000)
        made = f"{name} = tensor({tuple(shape)}, {dtype}, seed={seed}"
        with plain_torch() as words:
            value = words["tensor"](shape, dtype, seed=seed)
        places = self.placements(value)
        floating = is_float(dtype) and "product" not in places  # a factor's gradient is its own
        grad = floating and (self.rng.random() < 0.7 if grad is None else grad)
        self.take(f"{made}, grad={grad}, at={places})")
        if grad:
            self.leaves.append(name)
        return name

    # -- statements ----------------------------------------------------------------------------------------------
    def add_statement(self) -> None:
        """Choose a statement and write it, if plain torch takes it. One on which plain torch raises may be the last."""
        chance, before = self.rng.random(), len(self.lines)
        kept = (list(self.lines), list(self.leaves))
        try:
            if chance < 0.12:
                self.add_move()
            elif chance < 0.28:
                self.add_operator()
            elif chance < 0.31:
                self.add_module()
            else:
                families = {k: weight for k, (weight, _) in FAMILIES.items() if self.writes or k not in WRITING}
                family = self.rng.choices(list(families), list(families.values()))[0]
                self.add_from(family)
        except (NothingFits, RuntimeError):  # plain torch does not let some tensors be read any more
            self.lines, self.leaves = kept
            self.restart()
            return
        self.statements += len(self.lines) > before

    def add_move(self) -> None:
        name = self.pick(lambda t: True, new=False)
        at = self.placements(self.space[name])
        if "Partial" in at:  # a tensor is not moved to parts
            at = re.sub(r"Partial\([^)]*\)", "Replicate()", at)
        self.take(f"{self.fresh_name()} = move({name}, {at})")

    def add_operator(self) -> None:
        """A call of PyTorch's database of operators, on inputs of its own or on tensors of the program that fit."""
        name = self.rng.choice([n for n, s in subjects().items() if isinstance(s, Operator)])
        form = self.rng.choice(["function"] * 6 + ["in-place", "out=", "ties", "complex128", "int64", "bool"])
        found = samples(name, form)
        if not found or name.partition(" ")[0] in NOT_IN_PROGRAMS:
            raise NothingFits
        which = self.rng.randrange(len(found))
        if len(found[which].tensors) > 6:
            raise NothingFits
        operands = []
        for n, x in enumerate(found[which].tensors):
            fits = [k for k, t in self.tensors().items() if t.shape == x.shape and t.dtype == x.dtype]
            fits = [k for k in fits if k not in operands]
            if fits and self.rng.random() < 0.5 and (not x.dtype.is_floating_point or x.dim()):
                operands.append(self.rng.choice(fits))
                continue
            made = self.fresh_name("x")
            at = self.placements(x)
            grad = found[which].differentiable[n] and "product" not in at and self.rng.random() < 0.7
            self.take(f"{made} = given({name!r}, {form!r}, {which}, {n}, grad={grad}, at={at})")
            if grad:
                self.leaves.append(made)
            operands.append(made)
        self.assign(f"call({', '.join([repr(name), repr(form), str(which), *operands])})")

    def add_module(self) -> None:
        """A module with parameters laid out at random, called; sometimes an optimizer's step."""
        x = self.pick(lambda t: t.dtype is torch.float64 and t.dim() in (2, 3) and t.shape[-1] < 9 and t.numel() > 0)
        shape = self.space[x].shape
        text = self.rng.choice(templates(MODULES))
        making = text.format(last=shape[-1], second=shape[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = eval(making, self.space)
            except Exception as error:
                raise NothingFits from error
        at = ", ".join(
            re.sub(r"Partial\([^)]*\)", "Replicate()", self.placements(p.detach().double())) for p in made.parameters()
        )
        name = self.fresh_name("m")
        self.take(f"{name} = module({making}, seed={self.rng.randrange(1000)}, at=[{at}])")
        call = next((c for kind, c in MODULE_CALLS.items() if kind in making), "{m}({x})")
        self.assign(call.format(m=name, x=x))
        y = f"y{self.count}"
        if self.rng.random() < 0.3 and y in self.space:
            optimizer = self.rng.choice(templates(OPTIMIZERS))
            self.statement(f"train({name}.parameters(), lambda p: {optimizer}(p, lr=0.01), weigh({y}))")
        elif self.rng.random() < 0.3 and y in self.space:
            made, schedule = self.rng.choice(templates(OPTIONS)), self.rng.choice(templates(SCHEDULES))
            clip = self.rng.choice(["norm", "value", ""])
            ways = f"lambda p: {made}, lambda o: {schedule}, {clip!r}"
            self.statement(f"train_longer({name}.parameters(), lambda: weigh({call.format(m=name, x=x)}), {ways})")

    def add_from(self, family: str) -> None:
        template = self.rng.choice(FAMILIES[family][1])
        text = self.fill(template)
        if family in WRITING:
            if self.rng.random() < 0.35 and not _CHANGES_SHAPE.search(text):
                text = f"with torch.no_grad(): {text}"
            self.statement(text)
        elif "register_hook" in text or "retain_grad" in text:
            self.statement(text)
        else:
            self.assign(text)

    def statement(self, text: str) -> None:
        """Write a statement that makes no name."""
        try:
            self.take(text)
        except Exception as error:
            self.after_error(text, error)

    def assign(self, text: str) -> None:
        """Write a statement that gives the results of an expression names."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = eval(text, self.space)
        except Exception as error:
            self.after_error(f"{self.fresh_name()} = {text}", error)
            return
        if not self.worth(value):
            raise NothingFits
        listed = isinstance(value, (tuple, list)) and not isinstance(value, torch.Size) and len(value) > 0
        several = listed and all(isinstance(v, torch.Tensor) for v in value)
        names = [self.fresh_name() for _ in range(len(value) if several else 1)]
        self.lines.append(f"{', '.join(names)}{',' if several and len(names) == 1 else ''} = {text}")
        self.space.update(zip(names, value if several else [value], strict=True))

    def after_error(self, line: str, error: Exception) -> None:
        """Plain torch raised: sometimes that is how the program ends."""
        if self.errors and self.rng.random() < 0.15 and not isinstance(error, (NameError, SyntaxError)):
            self.restart()
            self.lines.append(line)
            self.ended = True
            self.statements += 1
            return
        raise NothingFits from error

    def worth(self, value: object) -> bool:
        """Whether results are numbers that can be compared, and few."""
        found = [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, torch.Tensor)]
        for x in found:
            if x.layout is not torch.strided or x.is_quantized or x.numel() > 2000:
                return False
            if is_float(x.dtype) and x.numel():
                size = x.detach().abs().to(torch.float64)
                if not bool(size.isfinite().all()) and self.rng.random() < 0.9:
                    return False
                if float(size.nan_to_num(0, 0, 0).max()) > _LARGEST:
                    return False
        return True

    def add_written_result(self) -> None:
        """A whole short program: a result, a write into it or another form of it, something made of all its elements,
        and second derivatives. Ranks that hold none of the few elements need a graph like that of the others."""
        self.writes, self.errors = False, False
        self.new_input(self.any_shape(self.rng.choice([1, 1, 2, 2, 3])), grad=True)
        found: list[str] = []
        for _ in range(30):
            self.add_statement()
            found = [n for n, t in self.tensors().items() if n[0] == "y" and t.requires_grad and t.is_floating_point()]
            if found:
                break
        else:
            return
        y, z = self.rng.choice(found), self.fresh_name()
        try:
            self.take(self.rng.choice(_WRITES_OF_RESULT).format(y=y))
        except Exception:  # plain torch refuses it
            self.restart()
        if self.rng.random() < 0.6:
            self.take(f"{z} = {y}.flatten()[:2] * {y}.sum()")
            if self.rng.random() < 0.5:
                self.take(f"{z}.sin_()")
            found.append(z)
        chosen = self.rng.sample(found, self.rng.randint(1, min(2, len(found))))
        self.ending(f"{self.fresh_name('g')} = second(weigh({', '.join(chosen)}), [{', '.join(self.leaves)}])")

    # -- derivatives ---------------------------------------------------------------------------------------------
    def add_derivatives(self) -> None:
        """End with gradients, in one of their forms."""
        roots = [n for n, t in self.tensors().items() if n[0] == "y" and t.requires_grad and is_float(t.dtype)]
        leaves = [n for n in self.leaves if n in self.space]
        if not roots or not leaves:
            return
        chosen = self.rng.sample(roots, self.rng.randint(1, min(3, len(roots))))
        loss = f"weigh({', '.join(chosen)})"
        forms = ["grads", "grads", "second", "second", "backward", "backward twice"]
        # a hook that replaces a gradient sees second derivatives where a gradient is written with an op's result
        replaced = any(f"register_hook({hook})" in line for line in self.lines for hook in ("doubled", "clamped"))
        form = self.rng.choice([form for form in forms if not (replaced and form == "second")])
        # a second derivative by what is in between depends on whether a gradient is written with an op's result
        inner = self.rng.sample(roots, 1) if self.rng.random() < 0.3 and form != "second" else []
        wanted = f"[{', '.join([*leaves, *inner])}]"
        if form in ("grads", "second"):
            self.ending(f"{self.fresh_name('g')} = {form}({loss}, {wanted})")
        else:
            for name in inner:
                self.ending(f"{name}.retain_grad()")
            self.ending(f"backward_passes({loss}{', 2' if form == 'backward twice' else ''})")

    def ending(self, line: str) -> None:
        if self.ended:
            return
        try:
            self.take(line)
        except Exception:
            if self.errors:
                self.lines.append(line)  # plain torch raises here: so must we
            self.ended = True

    # -- slots ---------------------------------------------------------------------------------------------------
    def pick(self, fits: Fits, new: bool = True, shape: Sequence[int] | None = None) -> str:
        """A tensor of the program that fits; later ones are likelier."""
        found = [name for name, t in self.tensors().items() if fits(t)]
        if found and (not new or self.rng.random() < 0.9):
            return self.rng.choices(found, range(1, len(found) + 1))[0]
        if not new:
            raise NothingFits
        made = self.new_input(self.any_shape() if shape is None else shape)
        if not fits(self.space[made]):
            raise NothingFits
        return made

    def fill(self, template: str) -> str:
        """A template with its slots filled; the first tensor decides about what stands before it, too."""
        slots = Slots(self)
        for kind in (found[1] for found in _SLOT.finditer(template)):
            if slots.is_tensor(kind):
                slots.tensor(kind)
                break
        return _SLOT.sub(lambda found: slots.text(found[1], found[2]), template)


# these look at memory that torch does not fill, or at what differs from one run to the next
NOT_IN_PROGRAMS = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize_as_",
    "linalg.lstsq", "geqrf", "linalg.eig", "linalg.svd", "svd", "pca_lowrank", "svd_lowrank", "linalg.eigh",
    "linalg.eigvals",     "nn.functional.rrelu", "lu", "ormqr", "linalg.householder_product", "linalg.qr", "qr",
    "_batch_norm_with_update",
}  # fmt: skip


def _as_text(placement: Placement) -> str:
    return f'Partial("{placement.reduce_op}")' if isinstance(placement, Partial) else repr(placement)
