"""The embedded engine against transformers' forward pass; versions and scheduling."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from support.model_versions import model_of
from support.requests_to_serve import PROMPT, logprobs_by_version, request, results, serving, wait_until
from transformers import PreTrainedModel

from areal_rloo.engines.base import GenerationRequest
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.errors import EngineError
from areal_rloo.trajectory import Completion

MakeEngine = Callable[..., EmbeddedEngine]


@pytest.fixture
def make_engine(tiny_folders: dict[str, Path]) -> Iterator[MakeEngine]:
    with ExitStack() as engines:
        yield lambda name="qwen2", **options: engines.enter_context(serving(tiny_folders[name], **options))


def _assert_agree(
    models: dict[int, PreTrainedModel], one: GenerationRequest, completion: Completion, tolerance: float = 1e-4
) -> None:
    expected = logprobs_by_version(models, one, completion)
    np.testing.assert_allclose(completion.behaviour_logprobs, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_logprobs_agree_with_transformers_for_every_architecture(
    name: str, make_engine: MakeEngine, tiny_folders: dict[str, Path]
) -> None:
    requests = [request(str(i), seed=i, temperature=0.7, prompt=PROMPT[: 2 + i % 4]) for i in range(12)]
    completions = results(make_engine(name).submit(requests))
    models = {0: model_of(tiny_folders[name])}
    for one, completion in zip(requests, completions, strict=True):
        _assert_agree(models, one, completion)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_greedy_tokens_are_those_of_transformers_generate(
    name: str, make_engine: MakeEngine, tiny_folders: dict[str, Path]
) -> None:
    (completion,) = results(make_engine(name).submit([request("a", greedy=True)]))
    model = model_of(tiny_folders[name])
    expected = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert completion.tokens.tolist() == expected[0, len(PROMPT) :].tolist()
    assert completion.finish_reason == "length"


def test_untied_weights_are_served(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=False, num_key_value_heads=1, **sizes))
    model.save_pretrained(tmp_path)
    with serving(tmp_path) as engine:
        (completion,) = results(engine.submit([request("a")]))
    _assert_agree({0: model.eval()}, request("a"), completion)


def test_a_groups_prompt_is_computed_once(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=4)
    results(engine.submit([request(str(i), seed=i) for i in range(8)]))
    assert engine.statistics().prefill_tokens == len(PROMPT) - 1


def test_the_time_in_decoding_counts_each_running_completion(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=4)
    results(engine.submit([request(str(i), seed=i) for i in range(8)]))
    statistics = engine.statistics()
    assert statistics.busy_s < statistics.decoding_s <= 4 * statistics.busy_s


def test_more_requests_than_slots_are_served_independently(make_engine: MakeEngine) -> None:
    requests = [request(str(i), seed=i, max_new_tokens=3 + 5 * (i % 5)) for i in range(20)]
    together = results(make_engine(num_slots=3).submit(requests))
    engine = make_engine(num_slots=3)
    alone = [results(engine.submit([one]))[0] for one in requests]
    for one, other in zip(together, alone, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.behaviour_logprobs, other.behaviour_logprobs, atol=1e-5)


def test_the_same_submissions_give_bit_equal_completions(make_engine: MakeEngine) -> None:
    requests = [request(str(i), seed=i, max_new_tokens=3 + 5 * (i % 5)) for i in range(20)]
    runs = [results(make_engine(num_slots=6).submit(requests)) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert one.behaviour_logprobs.tobytes() == other.behaviour_logprobs.tobytes()
        assert one.tokens.tolist() == other.tokens.tolist()


def test_a_stop_token_ends_a_completion_after_min_new_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(context_tokens=512)
    (free,) = results(engine.submit([request("a", max_new_tokens=60)]))
    stop = int(free.tokens[4])
    first = free.tokens.tolist().index(stop)
    stopped, held = results(
        engine.submit(
            [
                request("b", max_new_tokens=60, stop_token_ids=(stop,)),
                request("c", max_new_tokens=60, stop_token_ids=(stop,), min_new_tokens=30),
            ]
        )
    )
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stop not in held.tokens[:30].tolist()
    assert len(held.tokens) > 30


def test_top_k_and_top_p_give_logprobs_of_the_renormalized_distribution(
    make_engine: MakeEngine, tiny_folders: dict[str, Path]
) -> None:
    engine = make_engine()
    by_k, by_p = results(engine.submit([request("k", top_k=3), request("p", top_p=0.5)]))
    model = model_of(tiny_folders["qwen2"])
    for completion, kept in ((by_k, lambda p: 3), (by_p, lambda p: int((p.cumsum(0) < 0.5).sum()) + 1)):
        ids = torch.tensor([[*PROMPT, *completion.tokens.tolist()]])
        with torch.no_grad():
            probabilities = model(ids).logits[0, len(PROMPT) - 1 : -1].softmax(-1)
        for place, token in enumerate(completion.tokens.tolist()):
            ordered, order = probabilities[place].sort(descending=True)
            num = kept(ordered)
            assert token in order[:num].tolist()
            expected = (probabilities[place, token] / ordered[:num].sum()).log()
            assert completion.behaviour_logprobs[place] == pytest.approx(float(expected), abs=1e-4)


def test_sampled_frequencies_match_the_probabilities(make_engine: MakeEngine, tiny_folders: dict[str, Path]) -> None:
    engine = make_engine(num_slots=64)
    num = 2000
    drawn = results(engine.submit([request(str(i), seed=i, max_new_tokens=1) for i in range(num)]))
    with torch.no_grad():
        probabilities = model_of(tiny_folders["qwen2"])(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    counts = Counter(int(completion.tokens[0]) for completion in drawn)
    for token in probabilities.topk(5).indices.tolist():
        expected = float(probabilities[token])
        deviation = (expected * (1 - expected) / num) ** 0.5
        assert abs(counts[token] / num - expected) < 5 * deviation


def test_a_completion_across_an_update_has_both_versions(
    make_engine: MakeEngine, tiny_folders: dict[str, Path]
) -> None:
    engine = make_engine(context_tokens=2048)
    models = {0: model_of(tiny_folders["qwen2"]), 1: model_of(tiny_folders["qwen2"], factor=1.02)}
    futures = engine.submit([request(str(i), seed=i, max_new_tokens=1500) for i in range(4)])
    wait_until(lambda: engine.statistics().decode_steps >= 50)
    assert engine.load_weights(1, models[1].named_parameters()).result(timeout=60) == 1
    for completion in results(futures):
        assert set(completion.versions.tolist()) == {0, 1}
        assert (np.diff(completion.versions) >= 0).all()
        _assert_agree(models, request("a"), completion)


def test_weights_that_do_not_fit_change_nothing(make_engine: MakeEngine, tiny_folders: dict[str, Path]) -> None:
    engine = make_engine()
    (before,) = results(engine.submit([request("a")]))
    weights = {name: p.detach() + 1 for name, p in model_of(tiny_folders["qwen2"]).named_parameters()}
    name = list(weights)[-1]
    wrong_shape = {**weights, name: weights[name][:-1]}
    unknown = {**weights, "model.extra": torch.zeros(1)}
    missing = {key: value for key, value in weights.items() if key != name}
    for broken in (wrong_shape, unknown, missing):
        with pytest.raises(EngineError, match=r"weights"):
            engine.load_weights(1, broken.items()).result(timeout=60)
    (after,) = results(engine.submit([request("b")]))
    assert after.behaviour_logprobs.tobytes() == before.behaviour_logprobs.tobytes()
    assert engine.statistics().policy_version == 0


def test_an_earlier_version_is_not_loaded(make_engine: MakeEngine, tiny_folders: dict[str, Path]) -> None:
    engine = make_engine()
    weights = dict(model_of(tiny_folders["qwen2"]).named_parameters())
    assert engine.load_weights(3, weights.items()).result(timeout=60) == 3
    assert engine.load_weights(2, weights.items()).result(timeout=60) == 3
    assert engine.statistics().weight_updates == 1


def test_a_pinned_request_keeps_its_version_over_an_update(
    make_engine: MakeEngine, tiny_folders: dict[str, Path]
) -> None:
    engine = make_engine(context_tokens=2048)
    models = {0: model_of(tiny_folders["qwen2"]), 1: model_of(tiny_folders["qwen2"], factor=1.05)}
    pinned, moving = engine.submit(
        [request("pinned", max_new_tokens=1500, pinned=True), request("moving", max_new_tokens=1500)]
    )
    wait_until(lambda: engine.statistics().decode_steps >= 40)
    engine.load_weights(1, models[1].named_parameters()).result(timeout=60)
    completion = pinned.result(timeout=60)
    assert set(completion.versions.tolist()) == {0}
    _assert_agree(models, request("a"), completion)
    assert set(moving.result(timeout=60).versions.tolist()) == {0, 1}
    (again,) = results(engine.submit([request("later", pinned=True)]))
    assert set(again.versions.tolist()) == {1}


def test_a_request_waits_for_its_version_without_blocking_others(
    make_engine: MakeEngine, tiny_folders: dict[str, Path]
) -> None:
    engine = make_engine()
    waiting, free = engine.submit([request("waiting", min_version=2), request("free")])
    free.result(timeout=120)
    assert not waiting.done()
    engine.load_weights(2, model_of(tiny_folders["qwen2"]).named_parameters())
    assert set(waiting.result(timeout=120).versions.tolist()) == {2}


def test_an_abort_returns_the_tokens_so_far(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, context_tokens=4096)
    running, waiting = engine.submit([request("a", max_new_tokens=4000), request("b", max_new_tokens=4000)])
    wait_until(lambda: engine.statistics().decode_steps >= 10)
    engine.abort(["a", "b", "unknown"])
    assert running.result(timeout=60).finish_reason == "abort"
    assert len(running.result().tokens) == len(running.result().versions) >= 10
    assert len(waiting.result(timeout=60).tokens) == 0
    (next_one,) = results(engine.submit([request("a", max_new_tokens=5)]))
    assert len(next_one.tokens) == 5


@pytest.mark.gpu
def test_logprobs_agree_with_transformers_on_a_gpu(tiny_folders: dict[str, Path]) -> None:
    engine = EmbeddedEngine(
        tiny_folders["qwen2"], device=torch.device("cuda"), dtype=torch.float32, num_slots=4, context_tokens=64
    )
    (completion,) = results(engine.submit([request("a")]))
    engine.close()
    _assert_agree({0: model_of(tiny_folders["qwen2"])}, request("a"), completion, 1e-3)
