"""Check that no identifier of the package uses a word from the `never` column of CONTRIBUTING.md's glossary."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "areal_rloo"

# A word matches only between underscores: `age` does not match `message`, and `mb` does not match `number`.
FORBIDDEN = {
    "old": "behaviour (it sampled the token) or proximal (it anchors the clip)",
    "prox": "proximal",
    "new_logprobs": "current_logprobs",
    "new_policy": "current",
    "target_logprobs": "current_logprobs",
    "target_policy": "current",
    "log_probs": "logprobs",
    "log_prob": "logprob",
    "logps": "logprobs",
    "logp": "logprob",
    "coef": "ratio",
    "imp_weight": "behaviour_weight",
    "importance_weight": "behaviour_weight",
    "lag": "staleness",
    "age": "staleness",
    "offpolicyness": "staleness",
    "model_version": "policy_version",
    "weight_version": "policy_version",
    "query": "prompt",
    "queries": "prompts",
    "response": "completion",
    "responses": "completions",
    "response_mask": "loss_mask",
    "experience": "trajectory",
    "experiences": "trajectories",
    "n_samples": "group_size",
    "num_generations": "group_size",
    "actor": "rollout",
    "trainer": "learner",
    "mini_batch": "minibatch",
    "micro_batch": "microbatch",
    "mb": "microbatch",
    "sync": "broadcast (the learner) or receive (a worker)",
}

# These words are forbidden for some ideas and correct for others, so only a reader can decide.
AMBIGUOUS = {"new", "target", "step", "update"}


# Names of HTTP, OpenAI's protocol, Ray and transformers are allowed in the files that use these protocols.
HTTP_NAMES = {"Response", "StreamResponse", "json_response", "response_format"}
EXTERNAL_NAMES = {
    "engines/embedded/families.py": {"query_pre_attn_scalar"},
    "rollout/chat_api.py": HTTP_NAMES,
    "rollout/chat_server.py": HTTP_NAMES,
    "launcher/ray/owner.py": {"was_current_actor_reconstructed"},
}


def words_of(identifier: str) -> str:
    """Return an identifier in snake_case between underscores: `TrainRecord` becomes `_train_record_`."""
    return f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', identifier).lower().strip('_')}_"


def forbidden_words(identifier: str) -> list[str]:
    return [word for word in FORBIDDEN if f"_{word}_" in words_of(identifier)]


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of variables, arguments, attributes, functions, classes and imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)):
                yield node.value.lineno, name
            case ast.alias(name=name, asname=asname):
                yield node.lineno, asname or name.rpartition(".")[2]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_identifier_uses_a_forbidden_word(path: Path) -> None:
    found = [
        f"{path.name}:{line}: {name}: say {FORBIDDEN[word]}"
        for line, name in identifiers(ast.parse(path.read_text(encoding="utf-8")))
        if name not in EXTERNAL_NAMES.get(str(path.relative_to(PACKAGE)), ())
        for word in forbidden_words(name)
    ]
    assert not found, "\n".join(sorted(set(found)))


@pytest.mark.parametrize(
    "name", ["old_logprobs", "OldPolicy", "log_probs", "_prox", "numLag", "n_samples", "SyncWeights"]
)
def test_a_whole_word_is_found(name: str) -> None:
    assert forbidden_words(name)


@pytest.mark.parametrize("name", ["message", "number", "fold", "max_new_tokens", "asyncio", "approx", "policy_version"])
def test_a_word_inside_another_word_is_ignored(name: str) -> None:
    assert not forbidden_words(name)


def test_every_forbidden_word_of_the_glossary_is_checked() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, glossary = text.partition("\n## Glossary")
    rows = [line.split("|")[1:-1] for line in glossary.splitlines() if line.startswith("| ")]
    assert rows[0][-1].strip() == "never"
    never = {word for row in rows[1:] for word in re.findall(r"\w+", row[-1])}
    assert never
    assert never - set(FORBIDDEN) <= AMBIGUOUS
