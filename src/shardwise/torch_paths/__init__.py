"""Modules that exist only so that programs written for torch import them: `torch.distributed.tensor.X` is
`shardwise.X`, `torch.distributed._shard.X` is `shardwise.sharded.X`.

None of them is a file. `table.py` says which names each one has and where the code behind each name is; `finder.py`
makes the modules from the table. The other files here hold the functions that torch has and that nothing else in the
library calls.
"""

from shardwise.torch_paths.finder import install
from shardwise.torch_paths.table import TABLE

__all__ = ["TABLE", "install"]
