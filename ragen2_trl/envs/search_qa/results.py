"""What a search shows the player of SearchQA."""

from collections.abc import Sequence

from ragen2_trl.envs.responses import plain_text
from ragen2_trl.envs.search_qa.passages import Passage

MAX_DOCUMENT_CHARS = 800


def numbered(passages: Sequence[Passage], max_chars: int) -> str:
    """A line for each passage, the best first, cut at `max_chars` characters.

    >>> numbered([Passage("Osk", "A river.")], 100)
    '[1] Osk: A river.'
    """
    lines = [
        # Cut before it is cleaned: a server's passage may have megabytes.
        f"[{number}] {plain_text(passage.title[:max_chars])}: {plain_text(passage.text[:max_chars])}"
        for number, passage in enumerate(passages, start=1)
    ]
    return "\n".join(lines)[:max_chars] or "No passages found."


def documents(passages: Sequence[Passage], max_chars: int) -> str:
    """RAGEN-2's results: each with its number, id and score above its text, which is cut, as is the whole.

    >>> print(documents([Passage("Osk", "A river.", "doc_7", 3.14159)], 100))
    [Document 1] (ID: doc_7, Score: 3.142)
    Osk
    A river.
    """
    blocks = [
        f"[Document {number}] (ID: {plain_text(passage.id[:100])}, Score: {passage.score:.3f})\n"
        f"{_cut(plain_text(passage.content[: 2 * MAX_DOCUMENT_CHARS], keep_lines=True), MAX_DOCUMENT_CHARS)}"
        for number, passage in enumerate(passages, start=1)
    ]
    return _cut("\n\n".join(blocks), max_chars) or "No relevant documents found for the query."


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
