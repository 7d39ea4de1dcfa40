"""Hypothesis as it is, but that each example is drawn anew.

By default, up to five of six examples are an earlier one with one part copied over another. That finds what
depends on equal parts; but where an example is a history or a large document, it is much of the same again.
"""

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS

UNMUTATED = "unmutated"  # for `settings(backend=...)`: its other backends do without mutations
AVAILABLE_PROVIDERS[UNMUTATED] = "hypothesis.internal.conjecture.providers.HypothesisProvider"
