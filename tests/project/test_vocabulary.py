"""One word for each idea: no identifier of the package uses a word the glossary of CONTRIBUTING.md rules out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "areal_rloo"

# A word counts where it stands whole between underscores: `age` is not in `message`, `mb` not in `number`.
RULED_OUT = {
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

# Ruled out for one idea and right for others, so that only a reader can tell.
AMBIGUOUS = {"new", "target", "step", "update"}


# Names of HTTP, of OpenAI's protocol and of Ray, right where these are spoken and nowhere else.
HTTP_NAMES = {"Response", "StreamResponse", "json_response", "response_format"}
THEIRS = {
    "rollout/chat_api.py": HTTP_NAMES,
    "rollout/chat_server.py": HTTP_NAMES,
    "launcher/ray_owner.py": {"was_current_actor_reconstructed"},
}


def words_of(identifier: str) -> str:
    """An identifier in snake_case between underscores: `TrainRecord` is `_train_record_`."""
    return f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', identifier).lower().strip('_')}_"


def ruled_out(identifier: str) -> list[str]:
    return [word for word in RULED_OUT if f"_{word}_" in words_of(identifier)]


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that this file chooses or uses: variables, arguments, attributes, functions, classes, imported names."""
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
def test_no_identifier_uses_a_word_that_is_ruled_out(path: Path) -> None:
    found = [
        f"{path.name}:{line}: {name}: say {RULED_OUT[word]}"
        for line, name in identifiers(ast.parse(path.read_text(encoding="utf-8")))
        if name not in THEIRS.get(str(path.relative_to(PACKAGE)), ())
        for word in ruled_out(name)
    ]
    assert not found, "\n".join(sorted(set(found)))


@pytest.mark.parametrize(
    "name", ["old_logprobs", "OldPolicy", "log_probs", "_prox", "numLag", "n_samples", "SyncWeights"]
)
def test_a_word_is_found_wherever_it_stands_whole(name: str) -> None:
    assert ruled_out(name)


@pytest.mark.parametrize("name", ["message", "number", "fold", "max_new_tokens", "asyncio", "approx", "policy_version"])
def test_a_word_inside_another_is_left_alone(name: str) -> None:
    assert not ruled_out(name)


def test_every_word_the_glossary_rules_out_is_looked_for() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    assert rows[0][-1].strip() == "never"
    never = {word for row in rows[1:] for word in re.findall(r"\w+", row[-1])}
    assert never
    assert never - set(RULED_OUT) <= AMBIGUOUS
