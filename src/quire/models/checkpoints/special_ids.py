"""Special token ids, checked against the vocabulary before use."""

from __future__ import annotations

from typing import Any

from quire.errors import ModelError


def special_ids(value: Any, *, source: str, vocab_size: int) -> list[int]:
    """Return the ids in an entry that holds none, one or a list.

    Args:
        value: the entry; None: it is missing.
        source: file and key of the entry, for the error.
        vocab_size: number of token ids that the model or its tokenizer has.

    Raises:
        ModelError: an id is not an integer, or not in the vocabulary.
    """
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ModelError(
                f"{source} has {token_id!r:.100}, not a token id: the vocabulary has ids 0 to "
                f"{vocab_size - 1}; correct the entry, or remove it"
            )
    return ids
