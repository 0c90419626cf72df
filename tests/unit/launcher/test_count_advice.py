"""Every advice for too few GPUs, followed literally, gives an accepted plan."""

import re

import pytest

from areal_rloo.config import Config, load_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.fit import model_sizes, resolved, unused_words
from areal_rloo.launcher.placement import Host, TooFewError, place
from areal_rloo.learner.memory import GIB

BOTH = "learner.num_ranks=auto rollout.num_workers=auto"


def _hosts(gpus: int, gigabytes: int, num: int = 1) -> list[Host]:
    ids = tuple(map(str, range(gpus)))
    return [Host(f"n{index}", "10.0.0.1", 32, ids, 512 * GIB, gigabytes * 10**9) for index in range(num)]


def _plan(config: Config, hosts: list[Host]) -> None:
    place(resolved(config, hosts, model_sizes(config, {})), hosts)


def _follow(name: str, given: list[str], hosts: list[Host]) -> list[str]:
    """Follow each advice for a refused plan; return the advice in order."""
    with pytest.raises(PreflightError, match=r"^devices: the plan needs \d+ GPUs ") as refused:
        _plan(load_config(name, given), hosts)
    gigabytes, followed = hosts[0].gpu_bytes // 10**9, str(refused.value).rpartition("; ")[2]
    if followed == "take a smaller model, or more GPUs":
        return []
    advice = [re.sub(r"^(set|combine) ", "", words) for words in re.split(r",? or ", followed)]
    for words in advice:
        if words.startswith("start where "):
            _plan(load_config(name, given), _hosts(int(words.split()[2]), gigabytes))
            continue
        changes = dict(word.split("=", 1) for word in [*given, *words.split()])
        config = load_config(name, [f"{key}={value}" for key, value in changes.items()])
        num = config.launcher.num_hosts
        _plan(config, hosts if num == 1 else _hosts(len(hosts[0].gpu_ids), gigabytes, num))
    return advice


@pytest.mark.parametrize("gigabytes", [16, 24, 80])
@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gsm8k_rloo_areal.yaml", []),
        ("gsm8k_rloo_areal.yaml", ["rollout.engine=embedded", "learner.num_replicas=2"]),
        ("gsm8k_rloo_verl.yaml", []),
        ("gsm8k_rloo_verl.yaml", ["rollout.engine=vllm", "rollout.tensor_parallel=4"]),
        ("quickstart.yaml", ["learner.num_ranks=4", "rollout.num_workers=4"]),
    ],
)
def test_each_advice_for_too_few_gpus_is_accepted(name: str, given: list[str], gpus: int, gigabytes: int) -> None:
    advice = _follow(name, given, _hosts(gpus, gigabytes))
    assert advice or "verl" in name, "only the 8B model may be too large for these GPUs"
    if name == "gsm8k_rloo_areal.yaml" and not given and gigabytes == 80:
        assert advice == [BOTH, "start where 8 GPUs are"]
    if name == "quickstart.yaml":
        assert BOTH in advice


def test_a_count_alone_is_advised_if_it_is_enough() -> None:
    given = ["learner.num_ranks=3", "rollout.num_workers=3"]
    advice = _follow("quickstart.yaml", given, _hosts(4, 80))
    assert advice[:3] == ["rollout.num_workers=auto", "learner.num_ranks=auto", BOTH]


def test_sharing_is_advised_where_it_was_switched_off() -> None:
    advice = _follow("gsm8k_rloo.yaml", ["rollout.share_devices=never"], _hosts(1, 80))
    assert advice == ["rollout.share_devices=auto", "start where 2 GPUs are"]


def test_more_hosts_are_advised_to_a_run_on_several() -> None:
    """The local launcher refuses several hosts, so a run on a single host gets no such advice."""
    advice = _follow("gsm8k_rloo_areal.yaml", ["launcher.num_hosts=2"], _hosts(2, 80, num=2))
    assert advice == [BOTH, "launcher.num_hosts=4"]


def test_a_larger_model_than_the_gpus_hold_gets_no_false_advice() -> None:
    assert _follow("gsm8k_rloo_verl.yaml", [], _hosts(1, 16)) == []


def test_place_alone_names_the_missing_gpus_without_advice() -> None:
    config = load_config("quickstart.yaml", ["learner.num_ranks=3"])
    with pytest.raises(TooFewError, match=r"the host has 2, 2 too few$"):
        place(config, _hosts(2, 80))


# -- GPUs to spare -----------------------------------------------------------------------------------------------------


def _unused(name: str, given: list[str], hosts: list[Host]) -> str:
    config = load_config(name, given)
    model = model_sizes(config, {})
    return unused_words(config, place(resolved(config, hosts, model), hosts), model)


@pytest.mark.parametrize("gpus", [3, 4, 8])
def test_fixed_counts_that_leave_gpus_unused_are_told_with_the_keys(gpus: int) -> None:
    words = _unused("quickstart.yaml", [], _hosts(gpus, 80))
    advice = re.fullmatch(rf"2 of {gpus} GPUs are used; set (.*) to use {gpus}", words)
    assert advice is not None, words
    assert _unused("quickstart.yaml", advice[1].split(), _hosts(gpus, 80)) == ""


def test_a_plan_of_all_gpus_or_of_cpus_has_nothing_to_tell() -> None:
    assert _unused("quickstart.yaml", [], _hosts(1, 80)) == ""
    assert _unused("gsm8k_rloo.yaml", [], _hosts(8, 80)) == ""
    assert _unused("gsm8k_rloo_areal.yaml", [], _hosts(8, 80)) == ""
    assert _unused("quickstart.yaml", ["learner.device=cpu", "rollout.device=cpu"], _hosts(8, 80)) == ""


def test_unused_gpus_without_a_better_count_are_told_alone() -> None:
    pairs = ["rollout.tensor_parallel=2", "learner.num_replicas=2"]
    assert _unused("gsm8k_rloo.yaml", pairs, _hosts(5, 80)) == "4 of 5 GPUs are used"


def test_more_ranks_than_auto_are_advised_if_they_use_more_gpus() -> None:
    words = "3 of 4 GPUs are used; set learner.num_ranks=2 to use 4"
    assert _unused("gsm8k_rloo.yaml", ["rollout.tensor_parallel=2"], _hosts(4, 80)) == words


def test_a_plan_is_found_by_changes_of_all_counts_and_devices_together() -> None:
    (advised,) = _follow("gsm8k_rloo_verl.yaml", ["rollout.share_devices=never"], _hosts(1, 48))
    assert {"rollout.tensor_parallel=1", "rollout.share_devices=auto"} <= {*advised.split()}
