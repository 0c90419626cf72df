"""Any text gives a config or a ConfigError of a single line, and a loaded config survives dumping and loading.

The work for a text is bounded (`reading`), so these tests need no clock: a hang would be a test that does not end.
"""

import tempfile
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_rloo.config import Config, dump_config, load_config
from areal_rloo.config.typed import hints_of
from areal_rloo.errors import ConfigError

REPO = Path(__file__).resolve().parents[3]
SHIPPED = [path.read_text(encoding="utf-8") for path in sorted((REPO / "configs").glob("*.yaml"))]
KEYS = sorted(hints_of(Config))
ODD = [
    *(
        "null",
        "~",
        "",
        "true",
        "no",
        "auto",
        "none",
        "0",
        "1",
        "-1",
        "3",
        "0.5",
        "1e300",
        "1e999",
        ".nan",
        "-.inf",
        "2**9",
    ),
    *(
        "1" * 5000,
        "0x_",
        "2024-13-45",
        "1:30",
        "010",
        "a" * 300,
        "../x",
        "[]",
        "{}",
        "[1, 2]",
        "{a: 1}",
        "[{}]",
        "[[[[1]]]]",
    ),
    *(
        "&a [*a]",
        "*a",
        "!!int abc",
        "!x y",
        "<<",
        "'",
        '"',
        '"\\0"',
        '"\\ud800"',
        "|\n  a",
        "? a",
        "- 1",
        "@",
        "`",
        "%",
        "#",
    ),
    *("http://[::1", "http://a:99999", "::1", "a b", "/nowhere", "\x00", "\x1b", "\u2028", "é", "\U0001f600", "9" * 20),
]
LINES = [line for text in SHIPPED for line in text.splitlines()]

words = st.sampled_from(ODD) | st.text(max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def edited(draw: st.DrawFn) -> str:
    """A shipped config with some lines removed, repeated, cut, indented, or with another value."""
    lines = draw(st.sampled_from(SHIPPED)).splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        head = lines[at].partition(":")[0]
        lines[at] = draw(
            st.sampled_from(["", f"{lines[at]}\n{lines[at]}", f" {lines[at]}", lines[at][: len(lines[at]) // 2]])
            | words.map(lambda word, head=head: f"{head}: {word}")
            | st.sampled_from(LINES)
        )
    return "\n".join(lines)


def nested(key: str, value: object) -> object:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


trees = st.dictionaries(
    st.sampled_from([key for key in KEYS if "." not in key]) | st.text(max_size=5), values, max_size=4
)
written = st.one_of(
    edited(),
    st.text(max_size=200),
    st.lists(words, max_size=12).map("\n".join),
    trees.map(yaml.safe_dump),
    st.builds(nested, st.sampled_from(KEYS), values).map(yaml.safe_dump),
)
arguments = st.lists(
    st.builds(
        lambda dashes, key, value: f"{dashes}{key}={value}",
        st.sampled_from(["", "--"]),
        st.sampled_from(KEYS) | st.builds("{}.{}".format, st.sampled_from(KEYS), st.sampled_from(["0", "x", "0.path"])),
        words | values.map(str),
    )
    | st.text(max_size=20),
    max_size=4,
)


@settings(max_examples=200)
@given(written, arguments)
def test_any_text_and_arguments_give_a_config_or_one_line(text: str, overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my.yaml"
        path.write_text(text, encoding="utf-8", errors="replace")
        _loads_or_refuses(str(path), overrides)


@settings(max_examples=200)
@given(st.sampled_from(["quickstart.yaml", "gsm8k_rloo.yaml"]), arguments)
def test_any_arguments_to_a_shipped_config_give_a_config_or_one_line(name: str, overrides: list[str]) -> None:
    _loads_or_refuses(name, overrides)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_config_or_one_line(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my.yaml"
        path.write_bytes(content)
        _loads_or_refuses(str(path), [])


@given(st.text(max_size=300) | st.sampled_from(["a" * 300, "a/" * 3000, "\0", "", ".", "/", "..", "/dev/zero"]))
def test_any_name_of_a_config_gives_a_config_or_one_line(name: str) -> None:
    _loads_or_refuses(name, [])


def _loads_or_refuses(name: str, overrides: list[str]) -> None:
    try:
        config = load_config(name, overrides)
    except ConfigError as error:
        assert str(error).isprintable()
        assert str(error)
        return
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "config.yaml"
        again.write_text(dump_config(config), encoding="utf-8")
        assert load_config(str(again)) == config
