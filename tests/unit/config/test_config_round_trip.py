"""Any config survives dumping and loading."""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_rloo.config import Config, dump_config, load_config

# `validate` has checks between these fields, which keep their defaults here; test_load_config.py tests the checks.
RELATED = {
    *("group_size", "mean_level", "mean_leave1out", "over", "top_p", "top_k", "min_new_tokens", "max_new_tokens"),
    *("max_prompt_tokens", "num_minibatches", "groups_per_step", "microbatch_tokens", "keep_every_n_steps"),
    *("target_kl", "num_ranks", "num_replicas", "betas", "state_dtype", "schedule", "final_share", "decay_all"),
    *("warmup_steps", "warmup_share"),
    *("rule", "metric", "lower", "upper", "clip", "overlong_tokens", "returns", "discount", "adaptive"),
    *(
        "kind",
        "decoupled",
        "proximal",
        "dual_clip",
        "ratio_level",
        "aggregate",
        "level",
        "overlong_penalty",
        "count_masked",
    ),
    *("estimator", "correction", "placement", "train", "eval", "episode", "chat_template", "curriculum"),
    *("tensor_parallel", "share_devices", "urls", "api_key_env", "cache_tokens"),
    *("time_limit", "warn_before_s", "drain_timeout_s", "runtime", "image", "mounts"),
    *(
        "name",
        "folder",
        "path",
        "host",
        "metrics_host",
        "metrics_port",
        "max_message_bytes",
        "python",
        "partition",
        "account",
        "arguments",
    ),
    *("heartbeat_s", "heartbeat_timeout_s", "reference", "hidden_size", "num_heads", "num_kv_heads"),
    *("memory_per_host", "memory_per_gpu", "publish_every_n_steps", "num_train_steps"),
}
TREACHEROUS = [
    "1e-6",
    "1e3",
    "none",
    "null",
    "~",
    "on",
    "no",
    "0x10",
    "1:30",
    "3",
    ".5",
    "",
    " a",
    "a: b",
    "#",
    "é",
]


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - a return for each kind of type
    """Values that a field of this type may hold."""
    match kind:
        case msgspec.inspect.StructType():
            fields = {f.name: values(f.type) for f in kind.fields if f.name not in RELATED}
            return st.fixed_dictionaries({}, optional=fields).map(lambda given: kind.cls(**given))
        case msgspec.inspect.Metadata():
            return values(kind.type)
        case msgspec.inspect.UnionType():
            return st.one_of([values(one) for one in kind.types])
        case msgspec.inspect.LiteralType():
            return st.sampled_from(kind.values)
        case msgspec.inspect.IntType():
            return st.integers(kind.ge, 2**53 if kind.le is None else kind.le)
        case msgspec.inspect.FloatType():
            low = kind.gt if kind.gt is not None else kind.ge
            high = kind.lt if kind.lt is not None else kind.le
            return st.floats(
                low,
                high,
                exclude_min=kind.gt is not None,
                exclude_max=kind.lt is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        case msgspec.inspect.VarTupleType():
            return st.lists(values(kind.item_type), max_size=3).map(tuple)
        case msgspec.inspect.TupleType():
            return st.tuples(*[values(one) for one in kind.item_types])
        case msgspec.inspect.StrType():
            return st.sampled_from(TREACHEROUS) | st.text(
                st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=8
            )
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case msgspec.inspect.NoneType():
            return st.none()
    raise AssertionError(f"no values known for {kind}")


@settings(max_examples=150, deadline=None)
@given(values(msgspec.inspect.type_info(Config)))
def test_a_dumped_config_loads_as_an_equal_config(config: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        assert load_config(str(path)) == config


@given(st.floats(min_value=0, exclude_min=True, max_value=1e30))
def test_a_float_in_an_override_keeps_its_exact_value(value: float) -> None:
    for text in (repr(value), f"{value:.17e}", f"{value:.17g}"):
        config = load_config("quickstart.yaml", [f"learner.optimizer.learning_rate={text}"])
        assert config.learner.optimizer.learning_rate == value
