"""Which options may change on a resume, and the effect of each change.

`exact` changes no number of the training. `allowed` changes numbers from the step of the resume on; the words say how.
`refused` contradicts the checkpoint; the words give the reason. Every key of the config is in `_RULES` once
(tests/unit/config/test_resume_rules.py); an optional section and a list of sections have a rule of their own, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from areal_rloo.config.schema import Config

_MOST_SHOWN = 60  # characters of a value in a line
_INDEX = re.compile(r"\.\d+(?=\.|$)")

Effect = Literal["exact", "allowed", "refused"]


class Rule(NamedTuple):
    """The effect of changing a key."""

    effect: Effect
    words: str  # exact: empty


class Change(NamedTuple):
    """A key with another value than before."""

    key: str
    before: Any
    now: Any
    rule: Rule

    @property
    def both(self) -> tuple[str, str]:
        """Both values, each shortened; the second with the place of the difference, if this is beyond."""
        before, now = shown(self.before), shown(self.now)
        if before != now:
            return before, now
        texts = enumerate(zip(f"{_text(self.before)}\0", f"{_text(self.now)}\0", strict=False), start=1)
        place = next(place for place, (one, other) in texts if one != other)
        return before, f"{now} (different from character {place} on)"

    @property
    def values(self) -> str:
        """Both values in a line."""
        return " -> ".join(self.both)

    def line(self, version: int) -> str:
        """Describe the change for the terminal and the logs; `version`: of the checkpoint."""
        words = f"; {self.rule.words}" if self.rule.words else ""
        return f"resume: {self.key} {self.values} from step {version} on{words}"


def changes(before: Config, now: Config) -> list[Change]:
    """List the keys with other values, in the order of the config."""
    special: dict[str, Rule] = {}
    if _refreshes(before) != _refreshes(now):
        special |= dict.fromkeys(_REFRESHED_BY, _REFRESHED)
    if before.data.overlong_prompts == "error" and before.data.max_prompt_tokens <= now.data.max_prompt_tokens:
        special |= dict.fromkeys(_FITTING_BY, _FITTING)
    return [
        change._replace(rule=special.get(change.key, change.rule)) for change in _changes(_tree(before), _tree(now), "")
    ]


def shown(value: Any) -> str:
    """Write a value for a line, shortened."""
    text = " ".join(_text(value).split()) or "''"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)


def rules() -> dict[str, Rule]:
    """Return the rule of each key; keys of list items have no index."""
    return dict(_RULES)


def _exact(section: str, keys: str) -> dict[str, Rule]:
    return _each("exact", section, keys, "")


def _allowed(section: str, keys: str, words: str) -> dict[str, Rule]:
    return _each("allowed", section, keys, words)


def _refused(section: str, keys: str, words: str) -> dict[str, Rule]:
    return _each("refused", section, keys, words)


def _server(section: str) -> dict[str, Rule]:
    return {
        **_allowed(section, "arguments python urls pause", "behaviour logprobs may differ in the last digits"),
        **_exact(section, "api_key_env start_timeout_s health_every_s health_timeout_s max_server_restarts"),
        **_allowed(section, "request_timeout_s", "slower requests are aborted, and go on from the tokens so far"),
    }


def _each(effect: Effect, section: str, keys: str, words: str) -> dict[str, Rule]:
    return {f"{section}.{key}": Rule(effect, words) for key in keys.split()}


def _episode(section: str) -> dict[str, Rule]:
    return {
        **_refused(section, "type tools", _LIVE_PROMPTS),
        **_allowed(section, f"{_TURNS} tool_timeout_s", _LATER),
        **_allowed(section, "mcp_servers", "the servers must have the same tools, because these are in the prompts"),
        **_allowed(f"{section}.python", _SANDBOX, _LATER),
    }


_ROUNDING = "numbers are the same up to rounding"
_ARRIVAL = "samples arrive in another order"
_REWARD_ROUNDING = "rewards of a model may differ in the last digits"
_BUFFERED = "also for buffered samples"
_LATER = "samples generated so far stay as they are"
_FITTED = "groups that do not fit the staleness bound are dropped, and their prompts come again"
_ROWS = "groups longer than a row are dropped, their prompts come again; other numbers are the same up to rounding"
_SCORED = "samples scored so far keep their reward"
_EVALUATED = "accuracies before and after cannot be compared"
_LEASED_AGAIN = "samples of a worker without progress for so long are leased again, at most wire.max_attempts times"
_LIVE_PROMPTS = "the prompts under way would become other prompts"
_SOURCE = "task name hub hub_split fields parameters num_prompts few_shot few_shot.num few_shot.path few_shot.seed"
_REWARD = "task parameters function url model name weight"
_SHORTER = "finished samples stay; longer unfinished turns begin anew"
_TURNS = "max_turns max_turn_tokens feedback success_reward turn_discount"
_SANDBOX = "cpu_s wall_s memory_bytes"
_NORM = "mean_level mean_leave1out std_level std_unbiased over eps"
_TINY = "architecture hidden_size num_layers num_heads num_kv_heads max_position seed"
_WARM_START = "until_accuracy keep_accuracy max_steps batch_size learning_rate error_rate"

_RULES: dict[str, Rule] = {
    **_exact("run", "name folder"),
    **_refused("run", "seed", "another seed gives another order of prompts"),
    **_allowed("run", "entry", "your code decides the rest"),
    **_refused("model", "path", "architecture, tokenizer and the initial reference policy are of this model"),
    **_refused("model.tiny", _TINY, "the weights in the checkpoint are of the model made by this recipe"),
    **_refused("model.tiny", "warm_start", "the initial reference policy is of this warm start"),
    **_refused("model.tiny.warm_start", _WARM_START, "the initial reference policy is of this warm start"),
    **_allowed("model", "reference", "the KL term is of this reference policy"),
    **_allowed("model.reference", "path", "the KL term is of this policy; a refreshed reference stays as it is"),
    **_allowed("model.reference", "refresh_every_n_versions", "the reference policy is refreshed this often"),
    **_exact("model.reference", "offload"),
    **_allowed("model", "dtype", "logprobs are computed in this type; master weights and moments go on"),
    **_refused("data", "train", "the position in the stream of prompts is of these sources"),
    **_refused("data.train", _SOURCE, "the position in the stream of prompts is of this source"),
    **_refused("data.train", "weight", "past prompts would count for the present shares"),
    **_allowed("data.train", "path", "the learner compares the number and some of the prompts"),
    **_allowed("data.train", "rewards", _SCORED),
    **_allowed("data.train.rewards", _REWARD, _SCORED),
    **_allowed("data.train.rewards", "device batch_size", _REWARD_ROUNDING),
    **_refused("data.train", "episode", _LIVE_PROMPTS),
    **_episode("data.train.episode"),
    **_allowed("data.train", "max_new_tokens", _SHORTER),
    **_allowed("data", "eval", _EVALUATED),
    **_allowed("data.eval.episode", f"{_TURNS} type tools mcp_servers tool_timeout_s", _EVALUATED),
    **_allowed("data.eval.episode.python", _SANDBOX, _EVALUATED),
    **_allowed("data.eval", f"{_SOURCE} path rewards episode max_new_tokens", _EVALUATED),
    **_allowed("data.eval", "num_samples temperature top_p top_k", _EVALUATED),
    **_allowed("data.eval.rewards", _REWARD, _EVALUATED),
    **_allowed("data.eval.rewards", "device batch_size", _REWARD_ROUNDING),
    **_allowed("data", "num_epochs", "passes so far count; the run ends after the last"),
    **_allowed("data", "curriculum", "for the next prompts; a curriculum that begins here knows no reward"),
    **_refused("data", "deduplicate", "the position in the stream of prompts is of all prompts that were kept"),
    **_refused("data", "max_prompt_tokens overlong_prompts system_prompt chat_template", _LIVE_PROMPTS),
    **_allowed("rollout", "engine tensor_parallel", "behaviour logprobs are of this engine; watch behaviour_weight"),
    **_allowed("rollout", "num_workers share_devices num_slots lease_ahead_samples num_threads", _ARRIVAL),
    **_allowed("rollout", "num_reward_workers num_async_rewards", _ARRIVAL),
    **_allowed("rollout", "device", _ROUNDING),
    **_exact("rollout", "max_reward_failure_share"),
    **_allowed("rollout", "reward_memory_bytes", "rewards that need more are dropped"),
    **_allowed("rollout", "reward_timeout_s", "rewards slower than this are dropped"),
    **_episode("rollout.episode"),
    **_allowed("rollout.episode", "agent", _LATER),
    **_allowed("rollout.episode", "num_agents", _ARRIVAL),
    **_allowed("rollout.episode", "max_trajectories", "samples with more trajectories are dropped"),
    **_allowed("rollout.episode", "agent_timeout_s timeout_s", "slower episodes are dropped"),
    **_allowed("rollout.sampling", "temperature", "the learner's logprobs are at this temperature"),
    **_allowed("rollout.sampling", "top_p top_k min_new_tokens", _LATER),
    **_allowed("rollout.sampling", "max_new_tokens", _SHORTER),
    **_exact("rollout.sampling", "allow_truncated"),
    **_allowed("rollout.embedded", "cache_tokens prefill_chunk_tokens", _ARRIVAL),
    **_server("rollout.sglang"),
    **_server("rollout.vllm"),
    **_exact("algorithm", "preset"),  # the keys that the preset sets have rules
    **_allowed("algorithm", "group_size", "groups under way keep their size"),
    **_allowed("algorithm", "max_staleness", _FITTED),
    **_allowed("algorithm", "pipeline_depth", "groups under way stay; new ones wait until as few are live"),
    **_allowed("algorithm", "stale_tokens", _FITTED),
    **_allowed("algorithm", "drop_groups_of_one", _BUFFERED),
    **_allowed("algorithm", "min_reward_std group_filter", "complete groups are not filtered again"),
    **_allowed("algorithm", "max_filtered_batches", "the count begins anew"),
    **_allowed("algorithm.rewards", "bias scale clip truncated_penalty missing_eos_penalty", _BUFFERED),
    **_allowed("algorithm.rewards", "overlong_tokens overlong_penalty mask_truncated", _BUFFERED),
    **_allowed("algorithm.reward_norm", _NORM, _BUFFERED),
    **_allowed("algorithm.adv_norm", _NORM, _BUFFERED),
    **_allowed("algorithm", "advantages sample_weights returns discount", _BUFFERED),
    **_allowed("algorithm.loss", "kind ratio_level decoupled proximal eps_low eps_high dual_clip", _BUFFERED),
    **_allowed("algorithm.loss", "aggregation count_masked entropy_coefficient", _BUFFERED),
    **_allowed("algorithm.loss.behaviour_weight", "rule level metric aggregate lower upper", _BUFFERED),
    **_allowed("algorithm.kl", "coefficient", "with kl.adaptive, the adapted coefficient goes on"),
    **_allowed("algorithm.kl", "placement estimator correction", _BUFFERED),
    **_allowed("algorithm.kl", "adaptive", "the coefficient goes on from the last value if it is adaptive now"),
    **_allowed("algorithm.kl.adaptive", "target horizon", "the coefficient goes on from the last value"),
    **_allowed("learner", "device num_ranks num_replicas num_threads", _ROUNDING),
    **_allowed("learner", "microbatch_tokens", _ROWS),
    **_allowed("learner", "gradient_checkpointing offload compile kernels", _ROUNDING),
    **_allowed("learner", "num_train_steps", "a linear or cosine schedule ends at this step"),
    **_allowed("learner", "groups_per_step", _FITTED),
    **_allowed("learner", "num_minibatches num_epochs_per_batch", "warm-up and decay count optimizer steps, and move"),
    **_exact("learner", "target_kl"),
    **_refused("learner", "lora", "the checkpoint has the weights and moments of this kind of training"),
    **_refused("learner.lora", "rank alpha targets", "the adapters in the checkpoint have these shapes and scales"),
    **_allowed("learner.lora", "publish", _ROUNDING),
    **_exact("learner", "max_skipped_steps collective_timeout_s peak_flops"),
    **_allowed("learner.optimizer", "learning_rate", "the moments go on"),
    **_allowed("learner.optimizer", "betas eps weight_decay decay_all max_grad_norm", "the moments go on"),
    **_allowed(
        "learner.optimizer", "schedule warmup_steps warmup_share final_share", "the schedule goes on at the same step"
    ),
    **_refused("learner.optimizer", "state_dtype", "the moments in the checkpoint have this type"),
    **_exact("weights", "transport bucket_bytes timeout_s"),
    **_allowed("weights", "publish_every_n_steps", "groups under way keep their deadline"),
    **_exact("wire", "transport host port heartbeat_s record"),
    **_allowed("wire", "heartbeat_timeout_s stall_timeout_s", _LEASED_AGAIN),
    **_allowed("wire", "max_message_bytes", "samples that need more are dropped"),
    **_allowed("wire", "max_attempts", "attempts so far count"),
    **_exact("checkpoint", "every_n_steps at_end keep keep_best keep_every_n_steps"),
    **_allowed("checkpoint", "partial_rollouts", "a later resume goes on with unfinished samples, or begins them anew"),
    **_exact("evaluation", "every_n_versions"),
    **_allowed("evaluation", "max_new_tokens", _EVALUATED),
    **_exact("telemetry", "metrics_port metrics_host targets_folder log_level progress trajectories_per_step"),
    **_exact("telemetry", "most_trajectories_bytes"),
    **_exact("telemetry", "trackers tracker_names trace"),
    **_allowed("launcher", "num_hosts cores_per_host gpus_per_host", _ROUNDING),  # as the numbers of threads and GPUs
    **_exact("launcher", "memory_per_host memory_per_gpu max_restarts max_learner_restarts"),
    **_exact("launcher", "drain_timeout_s hang_timeout_s place_timeout_s min_free_disk_bytes"),
    **_exact("launcher.slurm", "partition account time_limit warn_before_s requeue num_seeds arguments setup"),
    **_exact("launcher.container", "runtime image mounts"),
}

_REFRESHED = Rule("refused", "the checkpoint has a reference policy exactly if the run refreshes the policy")
_FITTING = Rule("allowed", "for the next prompts; those under way are shorter")
_FITTING_BY = ("data.max_prompt_tokens", "data.overlong_prompts")
_REFRESHED_BY = ("algorithm.kl.coefficient", "model.reference", "model.reference.refresh_every_n_versions")


def _refreshes(config: Config) -> bool:
    reference = config.model.reference
    refreshes = reference is not None and reference.refresh_every_n_versions is not None
    return refreshes and config.algorithm.kl.coefficient > 0


def _tree(config: Config) -> dict[str, Any]:
    """Return the config as plain values; a single source is a list of sources."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    for split in ("train", "eval"):
        sources = tree["data"][split]
        if not isinstance(sources, tuple):
            tree["data"][split] = () if sources is None else (sources,)
    return tree


def _changes(before: Any, now: Any, path: str) -> Iterator[Change]:
    if before == now:
        return
    key = _INDEX.sub("", path)
    is_section = not path or any(name.startswith(f"{key}.") for name in _RULES)
    if is_section and isinstance(before, dict) and isinstance(now, dict):
        for name in now:
            yield from _changes(before[name], now[name], f"{path}.{name}" if path else name)
    elif is_section and isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _changes(one, other, f"{path}.{index}" if len(now) > 1 else path)
    else:
        yield Change(path, before, now, _RULES[key])
