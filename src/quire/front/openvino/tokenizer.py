"""The model's tokenizer under OpenVINO GenAI's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidRequestError
from quire.front.openvino.chat_history import ChatHistory

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer as ModelTokenizer


class TokenIds(list[int]):
    """Token ids of a text, also as OpenVINO GenAI's arrays [1, tokens]."""

    @property
    def input_ids(self) -> npt.NDArray[np.int64]:
        """The token ids."""
        return np.array([self], dtype=np.int64)

    @property
    def attention_mask(self) -> npt.NDArray[np.int64]:
        """A one for each token."""
        return np.ones((1, len(self)), dtype=np.int64)


class Tokenizer:
    """Turns texts and conversations into tokens and back.

    Args:
        tokenizer: the model's tokenizer, whose other attributes are available here, too.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @property
    def chat_template(self) -> str:
        """The model's chat template, as jinja2 text; empty: it has none."""
        return self._tokenizer.chat_template_source or ""

    def encode(self, prompt: str, add_special_tokens: bool = True) -> TokenIds:
        """Return the tokens of a text, with `add_special_tokens` including the model's special tokens.

        Raises:
            InvalidRequestError: it is not a text.
        """
        if not isinstance(prompt, str):
            raise InvalidRequestError(f"encode takes one text, not {type(prompt).__name__}", param="prompt")
        return TokenIds(self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens))

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str | list[str]:
        """Return the text of token ids [n], or the texts of a list or tensor of such rows."""
        rows = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
        if rows and not isinstance(rows[0], int):
            return [self._tokenizer.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]
        return self._tokenizer.decode(rows, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        history: ChatHistory | Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra_context: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """Render a conversation with the model's chat template.

        Args:
            history: the conversation.
            add_generation_prompt: whether the text ends where the next message begins.
            chat_template: must be empty; the model's own is used.
            tools: tools that the model may call; None: those of `history`.
            extra_context: variables for the template; None: those of `history`.
            options: more options of the model's tokenizer.

        Raises:
            InvalidRequestError: the template refuses the conversation, or another is given.
        """
        if chat_template:
            raise InvalidRequestError(
                "apply_chat_template uses the model's chat template; build the pipeline with another",
                param="chat_template",
            )
        if isinstance(history, ChatHistory):
            tools = history.get_tools() if tools is None else tools
            extra_context = history.get_extra_context() if extra_context is None else extra_context
            history = history.get_messages()
        return self._tokenizer.apply_chat_template(
            history,
            add_generation_prompt=add_generation_prompt,
            tools=tools or None,
            variables=extra_context or {},
            **options,
        )

    def get_original_chat_template(self) -> str:
        """Return the model's chat template."""
        return self.chat_template

    def get_bos_token(self) -> str:
        """Return the text of the token that begins a sequence; empty: there is none."""
        return self._tokenizer.special_tokens.get("bos_token", "")

    def get_bos_token_id(self) -> int:
        """Return its id, or -1."""
        return self._id_of("bos_token")

    def get_eos_token(self) -> str:
        """Return the text of the token that ends a sequence; empty: there is none."""
        return self._tokenizer.special_tokens.get("eos_token", "")

    def get_eos_token_id(self) -> int:
        """Return its id, or -1."""
        return self._id_of("eos_token")

    def get_pad_token(self) -> str:
        """Return the text of the padding token; empty: there is none."""
        return self._tokenizer.special_tokens.get("pad_token", "")

    def get_pad_token_id(self) -> int:
        """Return its id, or -1."""
        return self._id_of("pad_token")

    def _id_of(self, role: str) -> int:
        text = self._tokenizer.special_tokens.get(role)
        token_id = None if text is None else self._tokenizer.backend.token_to_id(text)
        return -1 if token_id is None else token_id
