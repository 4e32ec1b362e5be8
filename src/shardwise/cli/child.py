"""The main module of a process that a program under `shardwise run` has spawned: the program's, after adopt().

Run by multiprocessing under the name `__mp_main__`; imported, it does nothing.
"""

from shardwise.cli.as_main import Program
from shardwise.torch_paths.adopting import adopt

if __name__ == "__mp_main__":
    adopt()
    program = Program.of_parent()
    __file__, __package__ = program.file, program.package  # type: ignore[assignment]
    exec(program.code, globals())
