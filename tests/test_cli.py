"""The `shardwise` command: tables, one op explained, fallbacks, errors that help."""

import subprocess
import sys

import pytest

import shardwise
from shardwise.cli import main
from shardwise.strategy import registry
from shardwise.strategy.registry import gathered, rule
from shardwise.strategy.spec import Gathered


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, [" ".join(line.split()) for line in out.splitlines()], err

    return call


@pytest.fixture
def temporary():
    """Ops registered in a test are gone after it."""
    kept = dict(registry._rules)
    yield
    registry._rules.clear()
    registry._rules.update(kept)
    registry._by_function.clear()


def test_all_rules(run):
    code, lines, _ = run("rules")
    assert code == 0
    assert "mm rules/matmul.py m k, k n -> m n" in lines
    assert any(line.startswith("cat rules/join.py") for line in lines)
    assert any(line.startswith("gelu rules/pointwise.py") for line in lines)
    assert len(lines) > len(registry.registered())


def test_a_line(run):
    code, lines, _ = run("rules", "mm")
    assert code == 0
    assert lines == [
        "mm rules/matmul.py m k, k n -> m n",
        "",
        "mm(tensor([4, 6]), tensor([6, 8]))",
        "on one axis operand 0 operand 1 -> result",
        "cut m S(0) R S(0)",
        "cut k S(1) S(0) P(sum)",
        "cut n R S(1) S(1)",
        "leave a sum pending P(sum) R P(sum)",
        "leave a sum pending R P(sum) P(sum)",
        "compute it everywhere R R R",
    ]


def test_several_lines(run):
    code, lines, _ = run("rules", "matmul")
    assert code == 0 and "matmul(tensor([4, 6, 8]), tensor([4, 8, 10]))" in lines and "cut k S(2) S(1) P(sum)" in lines
    assert "cut n R S(1) S(1)" in run("rules", "matmul", "--shapes", "4,6", "6,8")[1]


def test_a_line_with_dims_by_argument(run):
    code, lines, _ = run("rules", "sum", "--shapes", "4,6", "--args", "dim=1")
    assert code == 0 and lines[0] == "sum rules/reduce.py *d -> *d-dim"
    assert "cut d0 S(0) S(0)" in lines and "cut d1 S(1) P(sum)" in lines


@pytest.mark.parametrize("spelling", ["aten::mm", "aten.mm.default", "torch.mm"])
def test_spellings(run, spelling):
    assert run("rules", spelling) == run("rules", "mm")


def test_given_shapes(run):
    code, lines, _ = run("rules", "add", "--shapes", "4,5", "5")
    assert code == 0 and "add(tensor([4, 5]), tensor([5]))" in lines
    assert "cut d0 S(0) R S(0)" in lines and "cut d1 S(1) S(0) S(1)" in lines


def test_a_rule_that_is_no_line(run):
    """It is run, and what travels is seen."""
    code, lines, _ = run("rules", "view", "--shapes", "4,6", "--args", "24")
    assert code == 0 and lines[3:5] == ["operand 0 -> result what travels", "S(0) S(0) nothing"]
    code, lines, _ = run("rules", "_foreach_norm")
    assert code == 0 and "S(0) S(0) R, R all_reduce 32 B" in lines


def test_dtypes_and_named_arguments(run):
    code, lines, _ = run("rules", "embedding", "--shapes", "8:int64", "10,4")
    assert code == 0 and "embedding(tensor([8], int64), tensor([10, 4]))" in lines
    code, lines, _ = run("rules", "softmax", "--shapes", "8,16", "--args", "dim=1")
    assert code == 0 and "softmax(tensor([8, 16]), dim=1)" in lines and "S(0) S(0) nothing" in lines


def test_dims_that_must_be_whole(run):
    code, lines, _ = run("rules", "logcumsumexp", "--shapes", "4,6", "--args", "1")
    assert code == 0 and lines[0].startswith("logcumsumexp rules/")


def test_fallbacks(run, temporary):
    gathered("made_up_whole", "gather, since it is made up")

    @rule("made_up_sometimes")
    def sometimes(x, flag=False):
        return Gathered("gather, since the flag says so") if flag else None

    code, lines, _ = run("rules", "--fallback")
    assert code == 0
    assert "made_up_whole always gather, since it is made up" in lines
    assert "made_up_sometimes in some forms gather, since the flag says so" in lines
    assert not any("no rule" in line for line in lines)
    code, lines, _ = run("rules", "--fallback", "--all")
    missing = [line.split()[0] for line in lines if line.endswith("no rule, and torch does not take it apart")]
    assert "_ctc_loss" in missing or "_local_scalar_dense" in missing
    assert not {"mm", "linalg_cond", "add_", "mm_backward", "zeros"} & set(missing)


def test_op_without_a_rule(run):
    code, lines, _ = run("rules", "linalg_cond")
    assert code == 0 and lines == [
        "linalg_cond has no rule of its own: torch takes it apart, and its parts have rules."
    ]


def test_unknown_op(run):
    code, lines, err = run("rules", "sofmax")
    assert code == 2 and not lines
    assert err.startswith("shardwise rules: no op is called 'sofmax'; did you mean softmax")


def test_call_that_no_rule_takes(run):
    code, _, err = run("rules", "mm", "--shapes", "4,5")
    assert code == 2 and "mm: its rule knows no call with tensor([4, 5]). Say what it is called with" in err


def test_bad_shape(run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("rules", "mm", "--shapes", "4,5:float99")
    assert stopped.value.code == 2 and "'float99' is no dtype of torch" in capsys.readouterr().err


def test_module_and_version():
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "--version"], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == f"shardwise {shardwise.__version__}\n"


@pytest.mark.parametrize(
    "command",
    [[], *([name] for name in ("rules", "run", "checkpoint", "estimate", "calibrate", "report", "blame"))]
    + [["checkpoint", action] for action in ("ls", "show", "verify", "stats", "diff", "reshard", "merge", "convert")],
    ids=" ".join,
)
def test_help_fits_into_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4 and max(map(len, lines)) <= 80, lines


def test_shapes_that_do_not_fit(run, capsys):
    code, _, err = run("rules", "mm", "--shapes", "4,5", "6,7")
    assert code == 2 and "mm(tensor([4, 5]), tensor([6, 7])) raises RuntimeError" in err
    with pytest.raises(SystemExit):
        run("rules", "mm", "--shapes", "4,x")
    assert "'4,x' are no sizes; write 4,5 or 4,5:int64" in capsys.readouterr().err


def test_what_is_not_there(run, tmp_path):
    code, _, err = run("checkpoint", "ls", str(tmp_path / "none"))
    assert code == 1 and err == f"shardwise checkpoint: {tmp_path / 'none'}: there is no such folder\n"
    code, _, err = run("calibrate", "--device", "tpu")
    assert code == 2 and "device 'tpu' cannot be measured; use --device cuda or --device cpu" in err


def test_a_script_that_does_nothing_is_not_said_to_fit(run, tmp_path):
    script = tmp_path / "nothing.py"
    script.write_text("def main():\n    pass\n")
    code, lines, err = run("estimate", str(script), "--mesh", "2x2")
    assert code == 2 and not lines and "came to its end without an op on its mesh, so there is nothing to estimate" in err


def test_every_rule_is_explained_or_asks_for_arguments(run):
    """A table, or what to give; never a traceback."""
    codes = {name: run("rules", name)[0] for name in ("embedding", "rmatmul", "matmul", "view", "einsum")}
    assert codes == {"embedding": 0, "rmatmul": 0, "matmul": 0, "view": 2, "einsum": 2}
