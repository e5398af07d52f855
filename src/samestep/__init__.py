"""samestep: the same training step on every device a script is given.

>>> import torch, samestep
>>> model = samestep.DataParallel(torch.nn.Linear(5, 2), replicas=2)
>>> model(torch.randn(30, 5)).shape
torch.Size([30, 2])

What is around the step (proofs, checkpoints, loaders, inference) is imported when it is first asked
for, so that a script that only trains does not pay for it. No module may have the name of something
public: importing it would put the module in its place.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.collectives import all_gather as all_gather
from samestep.collectives import all_reduce as all_reduce
from samestep.context import Shard as Shard
from samestep.context import current_shard as current_shard
from samestep.devices import Slot as Slot
from samestep.errors import DrawWarning as DrawWarning
from samestep.errors import MergeError as MergeError
from samestep.errors import RankError as RankError
from samestep.errors import ReplicaError as ReplicaError
from samestep.errors import SplitError as SplitError
from samestep.errors import StateWarning as StateWarning
from samestep.functional import gather as gather
from samestep.functional import parallel_apply as parallel_apply
from samestep.functional import replicate as replicate
from samestep.functional import scatter as scatter
from samestep.module import DataParallel as DataParallel
from samestep.module import data_parallel as data_parallel
from samestep.rendezvous import is_main as is_main
from samestep.rendezvous import seed_alike as _seed_alike
from samestep.tree import register_batch_type as register_batch_type

if TYPE_CHECKING:
    from samestep.checkpoint import load as load
    from samestep.checkpoint import save as save
    from samestep.infer import map_batches as map_batches
    from samestep.loader import split_loader as split_loader
    from samestep.proof import check as check
    from samestep.tune import tune_cpu as tune_cpu

__all__ = [
    "DataParallel",
    "DrawWarning",
    "MergeError",
    "RankError",
    "ReplicaError",
    "Shard",
    "Slot",
    "SplitError",
    "StateWarning",
    "all_gather",
    "all_reduce",
    "check",
    "current_shard",
    "data_parallel",
    "gather",
    "is_main",
    "load",
    "map_batches",
    "parallel_apply",
    "register_batch_type",
    "replicate",
    "save",
    "scatter",
    "split_loader",
    "tune_cpu",
]

__version__ = "0.1.0"

# By name, the module that has it.
_LATER = {
    "check": "proof",
    "load": "checkpoint",
    "map_batches": "infer",
    "save": "checkpoint",
    "split_loader": "loader",
    "tune_cpu": "tune",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


_seed_alike()
