"""adopt(), release() and `shardwise run`: programs that import torch's own paths run on this library."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shardwise
from tests.only_torch import run_with_torch
from tests.versions import since_213

HERE = Path(__file__).parent
PROGRAM = HERE / "adopted_program.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def python(text, *arguments):
    """Run a program that finds torch loaded, and nothing else."""
    done = run_with_torch(text, ["program", *arguments])
    assert done.returncode == 0, done.stderr


def ran(*command, **more):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


THEIRS = """
import os, runpy, sys
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_program_under_torchrun():
    """The same numbers as torch's own on one rank, by tensors of ours."""
    done = run_with_torch(THEIRS, [PROGRAM, "--lr", "3"], HERE)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    ours = ran(*TORCHRUN, "-m", "shardwise", "run", str(PROGRAM), "--lr", "3")
    assert theirs.pop("classes") == ["torch.distributed.tensor"] and ours.pop("classes") == ["shardwise.tensor"]
    assert ours.pop("plain") is True
    del theirs["plain"]  # torch's set_model_state_dict lays out the tensors of the dict that it is given
    for name in ("norms", "sums"):
        assert ours.pop(name) == pytest.approx(theirs.pop(name), rel=1e-4)
    assert ours == theirs
    assert ours["argv"] == ["--lr", "3"] and ours["main"] == ["__main__", "adopted_program.py", "compat"]


def test_a_program_alone():
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    said = ran(sys.executable, "-m", "shardwise", "run", str(PROGRAM), **alone)
    assert said["classes"] == ["shardwise.tensor"] and said["uneven"] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_nothing_is_adopted_by_an_import():
    python("""
        import shardwise
        from torch.distributed.tensor import DTensor
        assert DTensor is not shardwise.DTensor and DTensor.__module__ == "torch.distributed.tensor"
    """)


def test_every_path_leads_here():
    python("""
        import shardwise
        assert shardwise.adopt() == []
        import torch.distributed.tensor as dt
        import torch.distributed.tensor.parallel.style, torch.distributed.tensor.experimental
        from torch.distributed.tensor.placement_types import _StridedShard
        from torch.distributed._tensor.placement_types import Shard as OlderShard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec
        from torch.distributed.tensor.debug import CommDebugMode
        import torch.distributed._shard.sharded_tensor as tiles
        assert dt.DTensor is shardwise.DTensor and dt.distribute_tensor is shardwise.distribute_tensor
        assert dt.Shard is OlderShard is shardwise.Shard and dt._StridedShard is _StridedShard
        assert dt.parallel.ColwiseParallel is shardwise.parallel.ColwiseParallel is dt.parallel.style.ColwiseParallel
        assert dt.experimental.local_map is shardwise.local_map and CommDebugMode is shardwise.debug.CommDebugMode
        assert ChunkShardingSpec is shardwise.sharded.ChunkShardingSpec
        assert tiles.ShardedTensor is shardwise.sharded.ShardedTensor
        names = {}
        exec("from torch.distributed.tensor import *", names)
        assert names["DTensor"] is shardwise.DTensor and "Replicate" in dir(dt)
    """)


def test_another_name_of_a_package_elsewhere():
    """torch.distributed._shard.checkpoint is torch.distributed.checkpoint, and what is below may have been imported."""
    python("""
        import torch.distributed._shard.checkpoint.planner, torch.distributed.checkpoint
        import shardwise
        shardwise.adopt()
        from torch.distributed._shard.checkpoint import save_state_dict
        import torch.distributed._shard.checkpoint.planner
        assert save_state_dict is torch.distributed.checkpoint.save_state_dict
        shardwise.release()
        import torch.distributed._shard.checkpoint.planner
        assert torch.distributed._shard.checkpoint is torch.distributed.checkpoint
    """)


def test_modules_of_a_package_elsewhere_that_are_imported_later():
    python("""
        import torch.distributed.checkpoint.default_planner as planner
        import shardwise, shardwise.sharded.checkpoint.default_planner as ours
        assert ours is planner
        shardwise.adopt()
        from torch.distributed._shard.checkpoint.default_planner import DefaultSavePlanner
        import torch.distributed._shard.checkpoint.metadata as metadata
        assert DefaultSavePlanner is planner.DefaultSavePlanner and metadata.Metadata
        for path in ("torch.distributed._shard.checkpoint.nowhere", "shardwise.sharded.checkpoint.nowhere"):
            try:
                __import__(path)
            except ImportError:
                continue
            raise AssertionError(path)
    """)


@since_213("pipelining does not name DTensor")
def test_torchs_own_helpers_are_told_and_told_back():
    """Those that were imported before, and those that are imported meanwhile."""
    python("""
        import sys
        import torch.distributed.tensor as before
        import torch.distributed.checkpoint.planner_helpers as early
        import torch.distributed.fsdp as fsdp
        theirs, fully_shard, parent = before.DTensor, fsdp.fully_shard, sys.modules["torch.distributed"]
        import shardwise
        held = {name: vars(module).get("DTensor") for name, module in sys.modules.items() if name.startswith("torch.")}
        for _ in range(2):
            shardwise.adopt()
            shardwise.adopt()
            import torch.distributed.checkpoint.state_dict as states
            import torch.distributed.pipelining.stage as late
            assert late.FSDPModule is shardwise.parallel.FSDPModule and late.fully_shard is fsdp.fully_shard
            assert early.DTensor is late.DTensor is states.DTensor is shardwise.DTensor
            assert states.get_model_state_dict.__module__ == "shardwise.checkpoint.state_dict"
            assert parent.tensor.DTensor is shardwise.DTensor and fsdp.fully_shard is not fully_shard
            from torch.distributed.fsdp._fully_shard._fsdp_param import DTensor as inside
            assert inside is theirs  # torch's FSDP works inside of torch's class
            shardwise.release()
            shardwise.release()
            assert early.DTensor is late.DTensor is states.DTensor is theirs
            assert late.FSDPModule is fsdp.FSDPModule and late.fully_shard is fully_shard
            assert states.get_model_state_dict.__module__ == "torch.distributed.checkpoint.state_dict"
            import torch.distributed.tensor as after
            assert after is before is parent.tensor and after.DTensor is theirs and fsdp.fully_shard is fully_shard
            now = {name: vars(sys.modules[name]).get("DTensor") for name in held}
            assert now == held, {name for name in held if now[name] is not held[name]}
    """)


def test_modules_that_were_never_imported_are_torchs_after_release():
    python("""
        import shardwise
        shardwise.adopt()
        import torch.distributed.checkpoint.default_planner as planner
        assert planner.DTensor is shardwise.DTensor
        shardwise.release()
        from torch.distributed.tensor import DTensor
        assert planner.DTensor is DTensor is not shardwise.DTensor
    """)


def test_our_state_dicts_before_torchs():
    """Ours import torch's, which are replaced by ours once they are complete."""
    python("""
        import shardwise
        shardwise.adopt()
        from shardwise.checkpoint import state_dict as ours
        from torch.distributed.checkpoint import state_dict as torchs
        assert all(getattr(torchs, name) is getattr(ours, name) for name in ours.__all__)
        shardwise.release()
        assert torchs.get_state_dict is not ours.get_state_dict
    """)


def test_what_was_imported_before_is_named():
    python("""
        import types, sys, warnings
        early = types.ModuleType("early_bird")
        exec("from torch.distributed.tensor import DTensor as Tensor, Shard", vars(early))
        sys.modules["early_bird"] = early
        import shardwise
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            left = shardwise.adopt()
        assert left == ["early_bird.Shard", "early_bird.Tensor"], left
        assert "early_bird.Tensor" in str(said[-1].message) and "before these imports" in str(said[-1].message)
    """)


def test_names_that_are_not_here_are_not_torchs():
    python("""
        import shardwise, pytest
        shardwise.adopt()
        import torch.distributed.tensor as dt
        with pytest.raises(ImportError, match="register_op_strategy.*shardwise"):
            from torch.distributed.tensor._ops.utils import register_op_strategy
        with pytest.raises(AttributeError, match="shardwise.adopt.*no 'nowhere'"):
            dt.nowhere
        with pytest.raises(ModuleNotFoundError):
            import torch.distributed.tensor.nowhere
        with pytest.raises(ModuleNotFoundError):
            import torch.distributed.tensor.simulated_mesh  # ours, but torch has no such path
        assert not hasattr(dt, "nowhere")
    """)


@pytest.mark.parametrize("early", [False, True])
def test_fully_shard_and_its_policies_are_ours(early):
    """By either path, whether its modules are imported before or after; torch's own after release()."""
    python("""
        import importlib, sys
        paths = ["torch.distributed.fsdp", "torch.distributed._composable.fsdp",
                 "torch.distributed._composable.fsdp.fully_shard"]
        def names():
            for path in paths:
                importlib.import_module(path)
                for name in names_of_torch:
                    if hasattr(sys.modules[path], name):
                        yield path, name, getattr(sys.modules[path], name)
        names_of_torch = ("fully_shard FSDPModule MixedPrecisionPolicy OffloadPolicy CPUOffloadPolicy UnshardHandle "
                          "register_fsdp_forward_method share_comm_ctx").split()
        early = len(sys.argv) > 1
        before = list(names()) if early else None
        import shardwise
        for _ in range(2):
            shardwise.adopt()
            ours = list(names())
            assert {name for path, name, _ in ours if path == paths[0]} == set(names_of_torch)
            for path, name, found in ours:
                assert found is getattr(shardwise.parallel, name), (path, name)
            shardwise.release()
            before = before or list(names())
            assert list(names()) == before
            assert all(found.__module__.startswith("torch.") for _, _, found in before)
    """, *["early"][:early])


def test_torchs_tensors_still_convert():
    """interop gets torch's own class, also if nobody has imported it before."""
    python("""
        import shardwise
        shardwise.adopt()
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        x = shardwise.distribute_tensor(torch.ones(3), shardwise.init_device_mesh("cpu", (1,)), [shardwise.Shard(0)])
        theirs = shardwise.interop.to_torch(x)
        assert type(theirs).__module__ == "torch.distributed.tensor" and type(theirs) is not shardwise.DTensor
        assert shardwise.interop.is_torchs(theirs) and not shardwise.interop.is_torchs(x)
        assert torch.equal((theirs + theirs).full_tensor(), torch.full((3,), 2.0))
        assert shardwise.interop.from_torch(theirs).placements == x.placements
    """)


# -- shardwise run -----------------------------------------------------------------------------------------
def run(folder, *arguments, code=0):
    """As `python -m shardwise run`, but for the time to load torch."""
    text = "import runpy; runpy.run_module('shardwise', run_name='__main__', alter_sys=True)"
    done = run_with_torch(text, ["shardwise", "run", *arguments], folder)
    assert done.returncode == code, done.stderr
    return done


def run_alone(folder, *arguments):
    """The same by an interpreter of its own."""
    command = [sys.executable, "-m", "shardwise", "run", *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def folder(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "beside.py").write_text("from torch.distributed.tensor import DTensor\n")
    (inner / "__init__.py").write_text("")
    (inner / "train.py").write_text(
        textwrap.dedent("""
        import multiprocessing, os, pickle, sys
        if __package__:
            from . import beside
        else:
            import beside
        import shardwise

        class Mine:
            pass

        def child(queue):
            from torch.distributed.tensor import DTensor
            queue.put([DTensor.__module__, beside.DTensor.__module__, Mine.__module__])

        if __name__ == "__main__":
            assert beside.DTensor is shardwise.DTensor
            assert type(pickle.loads(pickle.dumps(Mine()))) is Mine and sys.modules["__main__"].Mine is Mine
            print(sys.argv[1:], os.path.basename(sys.argv[0]))
            if "spawn" in sys.argv:
                context = multiprocessing.get_context("spawn")
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                print(queue.get(timeout=240))
                process.join()
            sys.exit(7 if "fail" in sys.argv else 0)
        """)
    )
    return tmp_path


@pytest.mark.parametrize("how", [["inner/train.py"], ["-m", "inner.train"]])
def test_a_file_or_a_module(folder, how):
    assert run(folder, *how, "--a", "-m").stdout == "['--a', '-m'] train.py\n"
    assert run(folder, *how, "fail", code=7).stdout == "['fail'] train.py\n"


@pytest.mark.parametrize("how", [["inner/train.py"], ["-m", "inner.train"]])
def test_processes_that_it_spawns_have_adopted_too(folder, how):
    said = run_alone(folder, *how, "spawn").stdout.splitlines()
    assert said[-1] == "['shardwise.tensor', 'shardwise.tensor', '__mp_main__']"


def test_a_folder(folder):
    (folder / "inner" / "__main__.py").write_text("import beside, sys; print(beside.DTensor.__module__, sys.argv)\n")
    assert run(folder, "inner", "x").stdout.startswith("shardwise.tensor ['inner")


def test_a_program_that_raises(folder):
    (folder / "bad.py").write_text("def f():\n    raise KeyError('here')\n\nf()\n")
    done = run(folder, "bad.py", code=1)
    assert done.stderr.endswith("KeyError: 'here'\n") and 'bad.py", line 2, in f' in done.stderr


def test_no_such_program(folder):
    assert "no such file: 'nowhere.py'" in run(folder, "nowhere.py", code=2).stderr
    assert "no module named 'nowhere'" in run(folder, "-m", "nowhere", code=1).stderr
