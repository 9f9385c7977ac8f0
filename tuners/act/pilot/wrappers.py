"""Settings of FSDP2 (`fully_shard`), changed between two steps. Those of DistributedDataParallel
gain nothing (docs/several_gpus.md).

Of FSDP2's private state (torch/distributed/fsdp/_fully_shard, torch 2.6 to 2.14), these attributes
are set, as its own setters and constructor set them: `post_forward_mesh_info`, `_mp_policy` with
`mp_policy`, and a parameter's gathered copies.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from advisor.cache.config import Config, Value
from advisor.tuners import knobs
from advisor.tuners.act import ranks
from advisor.tuners.faults import Stopped

_FORMAT = knobs.FORMATS[0]
_JOINED = "ranks under torch's Join take different numbers of steps: none is the same for all"
_SHARDED = "its weights are sharded: only flags and the loader are tuned"
_GATHERED = ("all_gather_outputs", "_unsharded_param")


class Shards:
    """The settings of models that FSDP2 shards; all methods do nothing if it shards none."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = modules
        states = list(dict.fromkeys(one._get_fsdp_state() for one in modules))
        self._roots = [one for one in states if one._is_root]
        self._policies = {one: one._mp_policy for one in states}
        self._groups = {g: g.post_forward_mesh_info for one in states for g in _groups(one)}
        self._kept: dict[tuple[Any, Any], dict[str, Any]] = {}
        self._idle, self._own = True, Config()
        self._given, self._now = self._own, self._own
        policies = self._policies.values()
        self.dtype = next((p.param_dtype for p in policies if p.param_dtype is not None), None)
        policed = any((p.reduce_dtype or p.output_dtype) is not None for p in policies)
        self.locked = policed and self.dtype is None
        inner = [g for one in states if one not in self._roots for g in _groups(one)]
        reshards = any(one.post_forward_mesh_info is not None for one in inner)
        self.names = [knobs.RESHARD] if reshards else []
        self.own = Config({knobs.RESHARD: False} if inner and not reshards else {})
        in_half = [one for one in policies if (one.reduce_dtype or one.param_dtype) is not None]
        if all(one.reduce_dtype == torch.float32 for one in in_half):
            self.names.append(knobs.BF16_REDUCE)

    @property
    def why_not(self) -> str:
        """Why the models are left alone; '' if they are not."""
        if not all(hasattr(group.mesh_info, "shard_mesh_size") for group in self._groups):
            return "replicate() wraps it"
        for one in (one for group in self._groups for one in group.fsdp_params):
            elsewhere = getattr(one, "offload_to_cpu", False) or getattr(one, "is_dtensor", False)
            if elsewhere or hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather"):
                return "its weights lie on the host, or are split otherwise too"
            if getattr(one.sharded_param, "_post_accumulate_grad_hooks", None):
                return "a weight has a hook on its gradient"
        return ""

    def set(self, given: Config) -> None:
        self._given = given or self._own
        self._put(self._given)

    def begin_step(self) -> None:
        self._idle = True

    def train(self) -> None:
        if self._now is not self._given:
            self._put(self._given)
        self._idle = False

    def evaluate(self) -> None:
        """Before a call without gradients: evaluation is the script's own. Not while a backward
        pass may still need the weights that were gathered for it."""
        if self._idle and self._now is not self._own:
            self._put(self._own)

    def recover(self) -> bool:
        """After an exception in a call, begin anew with the script's own settings. Returns False
        if another rank has not failed, or this version of torch cannot."""
        if not self._roots:
            return True
        can = all(hasattr(one, "_reset_iter_state") for one in self._roots)
        if not (can and ranks.all_failed()):
            return False
        for root in self._roots:
            root._reset_iter_state()
        self.set(self._own)
        return True

    def reshard(self) -> None:
        for one in self.modules:
            one.reshard()

    def _put(self, given: Config) -> None:
        self._now = given
        policies = {state: self._policy(state, given) for state in self._policies}
        if any(state._mp_policy != policy for state, policy in policies.items()):
            self.reshard()
            for state, policy in policies.items():
                self._set_policy(state, policy)
        for group, mesh in self._groups.items():
            group.post_forward_mesh_info = mesh if given.get(knobs.RESHARD, True) else None

    def _policy(self, state: Any, given: Mapping[str, Value]) -> Any:
        """FSDP2's MixedPrecisionPolicy. The root returns float32, as under autocast."""
        own = self._policies[state]
        named = knobs.AUTOCAST.get(given.get(_FORMAT))
        if named:
            own = dataclasses.replace(
                own,
                param_dtype=getattr(torch, named),
                reduce_dtype=torch.float32,
                output_dtype=torch.float32 if state in self._roots else None,
            )
        elif given.get(_FORMAT) == knobs.BY_NAME[_FORMAT].default and self.dtype is not None:
            own = dataclasses.replace(own, param_dtype=None, reduce_dtype=None)
        if given.get(knobs.BF16_REDUCE):
            own = dataclasses.replace(own, reduce_dtype=torch.bfloat16)
        return own

    def _set_policy(self, state: Any, policy: Any) -> None:
        """Set a policy while weights are sharded. The gathered copies of each policy stay, empty:
        compiled code and later switches use the same ones."""
        state._mp_policy = policy
        for group in _groups(state):
            group.mp_policy = policy
            for one in group.fsdp_params:
                held = {n: vars(one).pop(n) for n in _GATHERED if n in vars(one)}
                self._kept[one, one.mp_policy] = held
                one.mp_policy = policy
                vars(one).update({"all_gather_outputs": []} | self._kept.get((one, policy), {}))
            group._init_mp_dtypes()


def _groups(state: Any) -> list[Any]:
    """A state's groups of parameters; before torch 2.11 it has at most one."""
    groups = vars(state).get("_fsdp_param_groups")
    if groups is None:
        groups = [state._fsdp_param_group]
    return [one for one in groups if one is not None]


class Wrappers:
    """The wrappers of a script's models, and which of their settings may be changed.

    Attributes:
        names: the knobs that all ranks offer. All ranks create this object at the same step.
        own: the script's own settings that are not the default.
        dtype: the number format of FSDP2's policy.
        locked: whether that policy keeps fp32 and sets something else.
        limits: what is not tuned, and why.
        is_sharded: whether FSDP2 shards weights, with settings that are tuned.
        left_alone: whether only flags and the loader are tuned.
    """

    def __init__(self, outers: Iterable[nn.Module]) -> None:
        modules = list(dict.fromkeys(itertools.chain(*(one.modules() for one in outers))))
        parallel = [one for one in modules if isinstance(one, DistributedDataParallel)]
        if any(one._join_config.enable for one in parallel):
            raise Stopped("unclear", _JOINED)
        self._replicated = [one.process_group for one in parallel]
        fsdp = sys.modules.get("torch.distributed.fsdp")
        sharded = [one for one in modules if isinstance(one, getattr(fsdp, "FSDPModule", ()))]
        self.shards = Shards(sharded)
        kinds = {type(one).__name__ for one in modules if one not in sharded}
        older = any(one.startswith(("FullyShardedDataParallel", "DeepSpeed")) for one in kinds)
        self.left_alone = older or self.shards.why_not != ""
        why = f": {self.shards.why_not}" if self.shards.why_not else ""
        self.limits = (_SHARDED + why,) if self.left_alone else ()
        if self.left_alone:
            self.shards = Shards(())
        self.dtype, self.locked = self.shards.dtype, self.shards.locked
        self.is_sharded = bool(self.shards.modules)
        self.own = self.shards.own
        self.names = tuple(sorted(ranks.common({*self.shards.names}) if self.is_sharded else ()))

    def set(self, rows: Mapping[str, Value]) -> None:
        """Set a config's values that differ from the script's, between two steps. All ranks do it
        at the same step. Knobs that this script does not offer are ignored."""
        given = {name: value for name, value in rows.items() if name in (*self.names, _FORMAT)}
        self.shards.set(Config(given))

    def reduced(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """This rank's parts of gradients that are averaged over the ranks, as
        DistributedDataParallel does now; FSDP2 has done it already."""
        for group in self._replicated[:1]:
            vector = torch.cat([*gradients])
            rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
            torch.distributed.all_reduce(vector, group=group)
            vector /= size
            whole = vector.split([len(one) for one in gradients])
            return [one.tensor_split(size)[rank] for one in whole]
        return gradients


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
