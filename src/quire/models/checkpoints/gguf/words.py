"""How byte-level tokenizers cut text into words, by the names that llama.cpp has for the rules.

The rules are those of the published tokenizers; llama.cpp's own differ where its regular expressions cannot.
"""

from __future__ import annotations

import dataclasses

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (
    _SUFFIXES + r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+|{digits}"
    r"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|" + _SPACES
)
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{suffix}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{suffix}"
    r"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
_TRIPLES = r"\p{N}{1,3}"


@dataclasses.dataclass(slots=True, frozen=True)
class Words:
    """The rules of one family of tokenizers.

    Text is cut by each of `splits` in turn and, if they are not all, by GPT-2's rules.
    """

    splits: tuple[str, ...] = ()
    with_gpt2: bool = False
    has_nfc: bool = False  # text is brought into Unicode's composed form before
    keeps_known: bool = False  # a word that is a token is not cut, whatever the merges say
    begins_with_bos: bool = False  # a prompt does, where a file does not say

    def configure(self, backend: Tokenizer, *, prefix_space: bool = False) -> None:
        """Make a tokenizer cut text so.

        Args:
            backend: the tokenizer.
            prefix_space: a space is put before text that does not begin with one.
        """
        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        octets = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=self.with_gpt2)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, octets])
        if self.has_nfc:
            backend.normalizer = normalizers.NFC()


_GPT2 = Words(with_gpt2=True)
_STARCODER = Words((r"\p{N}",), with_gpt2=True)
_LLAMA3 = Words((_WORDS.format(digits=_TRIPLES, marks=""),), keeps_known=True, begins_with_bos=True)
_CL100K = Words(_LLAMA3.splits)
QWEN2 = Words((_WORDS.format(digits=r"\p{N}", marks=""),), has_nfc=True)
_QWEN35 = Words((_WORDS.format(digits=r"\p{N}", marks=r"\p{M}"),), has_nfc=True)
_TEKKEN = Words((_CASED.format(digits=r"\p{N}", suffix=""),), keeps_known=True, begins_with_bos=True)
_O200K = Words((_CASED.format(digits=_TRIPLES, suffix=f"{_SUFFIXES}?"),))
_DEEPSEEK3 = Words((_TRIPLES, "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK))  # Chinese and Japanese together
WORDS = {
    **dict.fromkeys(("gpt-2", "olmo"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "smollm"), _STARCODER),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "deepseek-v3": _DEEPSEEK3,
}
"""By tokenizer.ggml.pre."""
