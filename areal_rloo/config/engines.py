"""Options of single engines."""

from __future__ import annotations

from areal_rloo.config.section import PositiveInt, Section


class EmbeddedConfig(Section, frozen=True):
    """The embedded engine. Evaluation takes its rows from the same cache, and beside it a copy of the weights."""

    # Tokens whose keys and values fit, of all completions together; a single one may take them all. When they do not
    # fit any more, the completion started last waits and is computed again. null: half of num_slots whole contexts.
    cache_tokens: PositiveInt | None = None
    prefill_chunk_tokens: PositiveInt = 512  # of prompts computed between two decode steps while others decode
