"""The learner's ranks: how they talk, and how a policy is spread over them. Nobody else knows torch.distributed."""

from areal_rloo.learner.parallel.files import ShardsError, load_shards, save_shards, saved_names
from areal_rloo.learner.parallel.gathering import gather_weights
from areal_rloo.learner.parallel.ranks import RankLostError, Ranks
from areal_rloo.learner.parallel.sharding import Sharding, fill_shards, norm_of_whole, shard, with_product

__all__ = [
    "RankLostError",
    "Ranks",
    "Sharding",
    "ShardsError",
    "fill_shards",
    "gather_weights",
    "load_shards",
    "norm_of_whole",
    "save_shards",
    "saved_names",
    "shard",
    "with_product",
]
