"""samestep: the same training step on every device a script is given.

>>> import torch, samestep
>>> model = samestep.DataParallel(torch.nn.Linear(5, 2), replicas=2)
>>> model(torch.randn(30, 5)).shape
torch.Size([30, 2])
"""

from samestep.check import check as check
from samestep.checkpoint import load as load
from samestep.checkpoint import save as save
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
from samestep.infer import map_batches as map_batches
from samestep.loader import split_loader as split_loader
from samestep.module import DataParallel as DataParallel
from samestep.module import data_parallel as data_parallel
from samestep.rendezvous import is_main as is_main
from samestep.rendezvous import seed_alike as _seed_alike
from samestep.tree import register_batch_type as register_batch_type
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

_seed_alike()
