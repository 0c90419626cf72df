"""Loading a config: files, overrides, and a clear line for every mistake."""

from pathlib import Path

import msgspec
import pytest
from support.configs_to_load import refusal, write

from areal_rloo.config import (
    PRESETS,
    AlgorithmConfig,
    BehaviourWeightConfig,
    Config,
    NormConfig,
    dump_config,
    import_function,
    load_config,
)
from areal_rloo.errors import ConfigError


def test_a_file_with_a_comment_alone_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# all defaults")) == Config()


def test_an_empty_section_gives_its_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "learner:\nalgorithm:\n  loss:\n")) == Config()


def test_an_unknown_key_is_refused_with_file_key_and_suggestion(tmp_path: Path) -> None:
    name = write(tmp_path, "algorithm: {group_sise: 4}")
    assert refusal(name) == f"{name}:1: unknown key 'algorithm.group_sise'; did you mean 'algorithm.group_size'?"


def test_an_unknown_section_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    assert "did you mean 'learner'?" in refusal(write(tmp_path, "lerner: {}"))


def test_a_key_in_the_wrong_section_gets_the_right_section(tmp_path: Path) -> None:
    both = "did you mean 'learner.optimizer.learning_rate' or 'model.tiny.warm_start.learning_rate'?"
    assert both in refusal(write(tmp_path, "learning_rate: 1e-5"))
    assert "did you mean 'algorithm.loss.eps_low'?" in refusal(write(tmp_path, "algorithm: {eps_low: 0.2}"))


def test_a_key_without_similar_keys_is_refused_with_all_keys(tmp_path: Path) -> None:
    assert "expected one of name, seed, folder, entry in run" in refusal(write(tmp_path, "run: {zzz: 1}"))


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("algorithm: {group_size: many}", "algorithm.group_size", "'many'"),
        ("algorithm: {group_size: 2.5}", "algorithm.group_size", "2.5"),
        ("algorithm: {max_staleness: -1}", "algorithm.max_staleness", "-1"),
        ("algorithm: {stale_tokens: keep}", "algorithm.stale_tokens", "'keep'"),
        ("learner: {optimizer: {learning_rate: -1}}", "learner.optimizer.learning_rate", "-1"),
        ("learner: {optimizer: {betas: [0.9]}}", "learner.optimizer.betas", "[0.9]"),
        ("rollout: {sampling: {top_p: 1.5}}", "rollout.sampling.top_p", "1.5"),
        ("wire: {port: 70000}", "wire.port", "70000"),
        ("wire: {max_message_bytes: 1000}", "wire.max_message_bytes", "1000"),
        ("run: 3", "run", "3"),
        ("data: {train: null}", "data.train", None),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(tmp_path: Path, text: str, key: str, value: str | None) -> None:
    name = write(tmp_path, text)
    if value is None:  # null is allowed, and gives the defaults
        assert load_config(name) == Config()
        return
    message = refusal(name)
    assert message.startswith(f"{name}:1: {key}: "), message
    assert message.endswith(f"the value is {value}"), message


def test_a_group_of_one_under_rloo_is_refused() -> None:
    message = refusal("quickstart.yaml", "algorithm.group_size=1")
    assert message.startswith("override 'algorithm.group_size=1': algorithm.group_size: expected at least 2")


def test_a_group_of_one_is_allowed_without_a_group_baseline() -> None:
    for preset in ("reinforce", "reinforce_plus_plus"):
        overrides = ["algorithm.group_size=1", f"algorithm.preset={preset}"]
        assert load_config("quickstart.yaml", overrides).algorithm.group_size == 1
    for preset in ("grpo", "dr_grpo", "reinforce_plus_plus_baseline"):
        assert "every advantage would be 0" in refusal(
            "quickstart.yaml", "algorithm.group_size=1", f"algorithm.preset={preset}"
        )


def test_leave_one_out_without_a_mean_is_refused() -> None:
    assert "set algorithm.adv_norm.mean_level=group" in refusal("quickstart.yaml", "algorithm.adv_norm.mean_level=none")


def test_presets_replace_each_other_and_keys_can_be_overridden(tmp_path: Path) -> None:
    """Keys of the file win over a preset of the file; a preset in an override wins over keys of the file."""
    fills = load_config(write(tmp_path, "algorithm: {preset: grpo, adv_norm: {eps: 1e-4}, group_size: 4}")).algorithm
    assert fills.adv_norm == NormConfig(mean_level="group", std_level="group", eps=1e-4)
    assert (fills.group_size, fills.kl.placement, fills.loss.aggregation) == (4, "loss", "seq_mean_token_mean")
    explicit = (
        "algorithm: {group_size: 5, adv_norm: {mean_level: batch}, loss: {eps_low: 0.3, behaviour_weight: {upper: 3}}}"
    )
    for name in PRESETS:
        wins = load_config(write(tmp_path, explicit), [f"algorithm.preset={name}"]).algorithm
        plain = load_config(write(tmp_path, f"algorithm: {{preset: {name}}}")).algorithm
        loss = msgspec.structs.replace(plain.loss, behaviour_weight=BehaviourWeightConfig(upper=3.0))
        assert wins == msgspec.structs.replace(plain, group_size=5, loss=loss)
    after = load_config("quickstart.yaml", ["algorithm.preset=grpo", "algorithm.adv_norm.std_level=none"]).algorithm
    assert after.adv_norm == NormConfig(mean_level="group")
    before = load_config("quickstart.yaml", ["algorithm.adv_norm.std_level=none", "algorithm.preset=grpo"]).algorithm
    assert before == after, "in any order"


def test_defaults_are_rloo_and_all_presets_set_the_same_keys() -> None:
    def keys(tree: dict[str, object]) -> set[str]:
        return {f"{k}.{s}" for k, v in tree.items() for s in (keys(v) if isinstance(v, dict) else [""])}

    for name, preset in PRESETS.items():
        assert keys(preset) == keys(PRESETS["rloo"]), name
    assert msgspec.convert(PRESETS["rloo"], AlgorithmConfig) == AlgorithmConfig()


def test_keys_absent_from_the_file_come_from_the_preset(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "algorithm: {adv_norm: {eps: 1e-3}}")).algorithm.adv_norm.mean_leave1out


def test_an_unknown_preset_is_refused_with_all_presets(tmp_path: Path) -> None:
    message = refusal("quickstart.yaml", "algorithm.preset=rlo")
    assert message.startswith(
        "override 'algorithm.preset=rlo': algorithm.preset: expected one of rloo, reinforce, grpo"
    )
    assert message.endswith("rloo_ms_swift; the value is 'rlo'")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.discount=0.9", "algorithm.discount: expected 1 with algorithm.returns=trajectory, got 0.9"),
        (
            "algorithm.returns=token",
            "use the leave-one-out mean before the returns: set algorithm.reward_norm={mean_level: group",
        ),
        (
            "algorithm={returns: token, adv_norm: {mean_leave1out: false}}",
            "algorithm.adv_norm.over: expected tokens with algorithm.returns=token",
        ),
        ("algorithm.kl={coefficient: 0.1, placement: loss}", "expected k2, k3 or abs with placement=loss, got k1"),
        (
            "algorithm.kl={coefficient: 0.1, placement: loss, estimator: k2, correction: gradient}",
            "algorithm.kl.correction: expected weight or none with estimator=k2, got gradient",
        ),
        (
            "learner.optimizer={schedule: constant, final_share: 0.1}",
            "learner.optimizer.final_share: expected 0 with schedule=constant, got 0.1",
        ),
        (
            "learner.optimizer={decay_all: true}",
            "learner.optimizer.decay_all: expected false with weight_decay=0, which shrinks nothing",
        ),
        (
            "algorithm.loss.count_masked=true",
            "algorithm.loss.count_masked: expected false with aggregation=token_mean, which divides by tokens, got",
        ),
        (
            "algorithm.kl.correction=none",
            "algorithm.kl.correction: none is read only with placement=loss; leave it out",
        ),
        (
            "rollout.embedded.cache_tokens=100",
            "rollout.embedded.cache_tokens: expected at least data.max_prompt_tokens and the longest completion "
            "together = 128, got 100; raise it, or set null",
        ),
        (
            "algorithm.loss={kind: reinforce, decoupled: false}",
            "set algorithm.loss.behaviour_weight.rule=ignore if you want this",
        ),
        ("algorithm.loss={kind: reinforce, ratio_level: sequence_mean}", "expected token with kind=reinforce"),
        ("algorithm.loss={kind: cispo, dual_clip: 3}", "expected null with kind=cispo, got 3.0; only ppo has it"),
        ("algorithm.loss={decoupled: false, proximal: reuse}", "reuse is read only with decoupled=true"),
        ("algorithm.loss={decoupled: false, behaviour_weight: {upper: 2}}", "read only with decoupled=true"),
        ("algorithm.loss.behaviour_weight.aggregate=sum", "expected mean with level=token, got sum"),
        (
            "algorithm.loss.behaviour_weight={level: sequence, aggregate: max}",
            "the largest token does not bound the weight of a sequence",
        ),
        (
            "algorithm.rewards.overlong_penalty=0.5",
            "overlong_tokens: expected at least 1 with overlong_penalty=0.5, got 0",
        ),
        (
            "algorithm={preset: reinforce, group_size: 1, min_reward_std: 0.1}",
            "expected 0 with algorithm.group_size=1, got 0.1",
        ),
        ("algorithm.rewards.scale=.nan", "algorithm.rewards.scale: expected a finite number; the value is .nan"),
        ("learner.optimizer.learning_rate=.inf", "expected a finite number; the value is .inf"),
        (
            "learner.optimizer.betas=[0.9,.nan]",
            "learner.optimizer.betas.1: expected a finite number; the value is .nan",
        ),
        ("learner.optimizer.betas=[1.5,0.9]", "learner.optimizer.betas.0: expected `float` < 1.0".replace("`", "")),
        ("algorithm.preset=[1]", "algorithm.preset: expected str, got a list; the value is [1]"),
        ("algorithm.rewards.clip=[1,0]", "algorithm.rewards.clip: expected [lowest, highest] in this order"),
        ("algorithm.rewards.overlong_tokens=97", "expected at most rollout.sampling.max_new_tokens=96, got 97"),
        ("algorithm.kl.adaptive={}", "algorithm.kl.coefficient: expected more than 0 with algorithm.kl.adaptive"),
        ("algorithm.loss.behaviour_weight.metric=k3", "expected ratio with rule=clamp, got k3"),
        ("algorithm.loss.behaviour_weight.upper=null", "expected a bound with rule=clamp, got none"),
        ("algorithm.loss.behaviour_weight.lower=6", "lower: expected at most upper=5.0, got 6.0"),
        ("algorithm.loss.behaviour_weight={rule: mask, upper: -1}", "upper: expected more than 0 with metric=ratio"),
    ],
)
def test_contradicting_options_are_refused_with_the_reason(override: str, expected: str) -> None:
    message = refusal("quickstart.yaml", override)
    assert expected in message


def test_a_function_is_imported_by_path_or_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def keep(group):\n    return True\nx = 3\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for path in ("mine:keep", "mine.py:keep", f"{tmp_path / 'mine.py'}:keep"):
        assert import_function("algorithm.group_filter", path)(None) is True
    for path, reason in (
        ("keep", "expected module:function or path/to/file.py:function, got 'keep'"),
        ("mine.py:kep", "mine.py has no function 'kep'; did you mean 'keep'?"),
        ("mine.py:x", "expected a function, but mine.py:x is a value of the type int"),
        ("broken.py:f", "broken.py cannot be imported: ZeroDivisionError: division by zero ({folder}/broken.py:1)"),
        ("absent.py:f", "FileNotFoundError: no such file, seen from {folder}; correct the file"),
        ("mine.py:nothing", "mine.py has no function 'nothing'; correct the name"),
        ("absent_module:f", "No module named 'absent_module'; correct the name, or install it, or name a file.py"),
    ):
        with pytest.raises(ConfigError, match=r"algorithm\.group_filter: ") as caught:
            import_function("algorithm.group_filter", path)
        assert reason.format(folder=tmp_path) in str(caught.value)


def test_a_kl_term_without_a_reference_is_refused() -> None:
    message = refusal("quickstart.yaml", "algorithm.kl.coefficient=0.1", "model.reference=null")
    assert "model.reference: expected a reference policy with algorithm.kl.coefficient=0.1, got null" in message
    load_config("quickstart.yaml", ["model.reference=null"])


@pytest.mark.parametrize(
    "override", ["rollout.sampling.top_p=0.9", "rollout.sampling.top_k=50", "rollout.sampling.min_new_tokens=2"]
)
def test_truncated_sampling_is_refused_unless_allowed(override: str) -> None:
    assert "rollout.sampling.allow_truncated=true" in refusal("quickstart.yaml", override)
    load_config("quickstart.yaml", [override, "rollout.sampling.allow_truncated=true"])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.sampling.min_new_tokens=1000", "rollout.sampling.min_new_tokens"),
        ("learner.num_minibatches=1000", "learner.num_minibatches"),
        ("learner.microbatch_tokens=10", "learner.microbatch_tokens"),
        ("wire.heartbeat_timeout_s=1", "wire.heartbeat_timeout_s"),
        ("algorithm.adv_norm.over=tokens", "algorithm.adv_norm.over"),
        ("model.tiny.num_heads=7", "model.tiny"),
    ],
)
def test_contradicting_values_are_refused_with_expected_and_actual(override: str, key: str) -> None:
    message = refusal("quickstart.yaml", override)
    assert f"{key}: expected" in message
    assert "got" in message


@pytest.mark.parametrize(("host", "expected"), [("[::1]", "a host name or an address"), ("fe80::1%eth0", "an address")])
def test_an_ipv6_host_with_brackets_or_a_zone_is_refused(host: str, expected: str) -> None:
    assert f"wire.host: expected {expected}" in refusal("quickstart.yaml", f"wire.host='{host}'")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_ipv6_host_is_refused_for_the_collectives_of_servers(engine: str) -> None:
    server = (f"rollout.engine={engine}", "wire.host=fd00::1")
    assert f"wire.host: expected an IPv4 address with rollout.engine={engine}" in refusal("quickstart.yaml", *server)
    load_config("quickstart.yaml", [*server, "weights.transport=shared_memory"])
    load_config("quickstart.yaml", ["wire.host=fd00::1"])


def test_a_missing_file_is_refused_with_the_shipped_names() -> None:
    message = refusal("nope.yaml")
    assert message.startswith("nope.yaml: no such config file")
    assert "quickstart.yaml" in message


@pytest.mark.parametrize("value", ["2024-02-30", "0x_", "1:30", "1" * 5000, "010", "1_", "_1"])
def test_a_text_that_yaml_would_guess_at_is_no_number(tmp_path: Path, value: str) -> None:
    for message in (
        refusal(write(tmp_path, f"run: {{seed: {value}}}")),
        refusal("quickstart.yaml", f"run.seed={value}"),
    ):
        assert "run.seed: expected int, got str; the value is '" in message


@pytest.mark.parametrize("value", ["2024-02-30", "1_0", "1:30", "3", "010", "no", "1e5", "true"])
def test_a_text_that_yaml_would_guess_at_stays_a_text(tmp_path: Path, value: str) -> None:
    assert load_config(write(tmp_path, f"data: {{system_prompt: {value}}}")).data.system_prompt == value
    assert load_config("quickstart.yaml", [f"data.system_prompt={value}"]).data.system_prompt == value


def test_bad_yaml_is_refused_with_the_place(tmp_path: Path) -> None:
    name = write(tmp_path, "run: {seed: 1\nlearner: [")
    message = refusal(name)
    assert message.startswith(f"{name}:2: not valid YAML: ")


@pytest.mark.parametrize("text", ["- run", "run", "3"])
def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "expected a mapping of sections" in refusal(write(tmp_path, text))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(b"\xff\xfe\x00run")
    assert refusal(str(path)).startswith(f"{path}: ")


@pytest.mark.parametrize("spelling", ["1e-6", "1E-6", "1.0e-6", "0.000001", "+1e-6", "1e-06"])
def test_a_float_may_be_written_in_any_usual_way(tmp_path: Path, spelling: str) -> None:
    config = load_config(write(tmp_path, f"learner: {{optimizer: {{learning_rate: {spelling}}}}}"))
    assert config.learner.optimizer.learning_rate == 1e-6


@pytest.mark.parametrize("spelling", ["none", "null", "~", ""])
def test_no_level_may_be_written_as_none_or_null(tmp_path: Path, spelling: str) -> None:
    config = load_config(
        write(tmp_path, f"algorithm:\n  adv_norm:\n    mean_level: group\n    std_level: {spelling}\n")
    )
    assert config.algorithm.adv_norm.std_level == "none"
    config = load_config("quickstart.yaml", [f"algorithm.adv_norm.std_level={spelling}"])
    assert config.algorithm.adv_norm.std_level == "none"


def test_overrides_win_over_the_file_with_or_without_dashes(tmp_path: Path) -> None:
    name = write(tmp_path, "run: {seed: 1, name: a}")
    config = load_config(name, ["run.seed=2", "--learner.optimizer.learning_rate=3e-5"])
    assert (config.run.seed, config.run.name, config.learner.optimizer.learning_rate) == (2, "a", 3e-5)


def test_the_last_of_two_overrides_wins() -> None:
    assert load_config("quickstart.yaml", ["run.seed=1", "run.seed=2"]).run.seed == 2


def test_an_override_may_hold_a_section() -> None:
    config = load_config("quickstart.yaml", ["rollout.sampling={temperature: 0.7}"])
    assert config.rollout.sampling.temperature == 0.7
    assert config.rollout.sampling.max_new_tokens == Config().rollout.sampling.max_new_tokens


def test_an_override_may_switch_a_section_off() -> None:
    config = load_config("quickstart.yaml", ["model.tiny.warm_start=null", "data.eval=null"])
    assert config.model.tiny.warm_start is None
    assert config.data.eval is None


def test_a_mistake_in_an_override_names_the_override() -> None:
    message = refusal("quickstart.yaml", "--algorithm.group_sise=4")
    assert message.startswith("override '--algorithm.group_sise=4': unknown key 'algorithm.group_sise'")
    assert refusal("quickstart.yaml", "run.seed=x").startswith(
        "override 'run.seed=x': run.seed: expected `int`".replace("`", "")
    )


@pytest.mark.parametrize("override", ["run.seed", "=3", "--=3", "run.seed=[", "run.seed.deep=3", "a..b=1", ".=1"])
def test_a_malformed_override_is_refused_with_its_text(override: str) -> None:
    assert f"override '{override}'" in refusal("quickstart.yaml", override)


def test_a_bare_name_is_found_in_the_current_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart.yaml").write_text("run: {name: mine}")
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart.yaml").run.name == "mine"


def test_a_shipped_config_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart.yaml").run.name == "quickstart"


def test_the_resolved_config_is_complete(tmp_path: Path) -> None:
    text = dump_config(load_config("quickstart.yaml"))
    for section in msgspec.structs.fields(Config):
        assert f"\n{section.name}:" in f"\n{text}"


@pytest.mark.parametrize(
    ("task", "warms"),
    [("arithmetic", True), ("rows", True), ("mine.py:Task", True), ("gsm8k", False), ("reasoning_gym", False)],
)
def test_the_tiny_model_warm_starts_if_the_task_may_have_sums(task: str, warms: bool) -> None:
    assert load_config("quickstart.yaml", [f"data.train.task={task}"]).warm_starts == warms
    assert not load_config("quickstart.yaml", [f"data.train.task={task}", "model.tiny.warm_start=null"]).warm_starts


def test_a_correction_that_the_preset_s_estimator_lacks_is_named() -> None:
    arguments = ("algorithm.preset=reinforce_plus_plus_baseline", "algorithm.kl.correction=gradient")
    assert refusal("quickstart.yaml", *arguments).startswith("override 'algorithm.kl.correction=gradient': ")
    config = load_config("quickstart.yaml", [*arguments, "algorithm.kl.coefficient=0"])
    assert config.algorithm.kl.coefficient == 0, "nothing reads the correction"
