"""Cuts texts by a tokenizer in a process of its own, which `tokenise` can end.

A tokenizer's file may come from anywhere, and its steps may take any time and memory: a regular
expression that backtracks, or a replacement that doubles the text. This file runs as a script, so
it imports nothing of chipwise.

A message is 8 bytes of length and that many bytes. The first is the tokenizer's JSON. Each further
one is "e" and texts, answered by "=" and the uint32 tokens of each, or "d" and tokens, answered by
"=" and their texts, where each is a message itself. Another answer is "!" and what the library
said.
"""

from __future__ import annotations

import array
import contextlib
import io
import sys

MEMORY = 4 << 30, 64, 1024  # bytes, for a byte of the file, and for a byte of a text
SECONDS = 5.0, 2e5  # for a text, and its bytes a second; usual are millions


def seconds_for(text: int) -> float:
    """The longest time for a text of `text` bytes."""
    return SECONDS[0] + text / SECONDS[1]


def read(stream) -> bytes:
    """The next message. Raises `EOFError` at the end."""
    length = stream.read(8)
    content = stream.read(int.from_bytes(length, "big")) if len(length) == 8 else b""
    if len(length) < 8 or len(content) < int.from_bytes(length, "big"):
        raise EOFError("the process has ended")
    return content


def write(stream, content: bytes) -> None:
    stream.write(joined([content]))
    stream.flush()


def joined(contents) -> bytes:
    """Several messages as one content."""
    return b"".join(len(one).to_bytes(8, "big") + one for one in contents)


def divided(content: bytes) -> list[bytes]:
    """The messages that were `joined`."""
    stream, found = io.BytesIO(content), []
    while stream.tell() < len(content):
        found.append(read(stream))
    return found


def limit(file: int, text: int) -> None:
    """Limits the memory of this process, and the time that it computes when nobody waits for it
    any more."""
    try:
        import resource
    except ImportError:  # Windows: its parent still ends it
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        resource.RLIMIT_AS: MEMORY[0] + MEMORY[1] * file + MEMORY[2] * text,
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime + 2 * seconds_for(text)) + 1,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        # A system may refuse one, as macOS does memory below what is mapped. The others, and the
        # time that the parent waits, still hold
        with contextlib.suppress(ValueError, OSError):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))


def serve(given, answers) -> None:
    import tokenizers

    content = read(given)
    tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def cut(content):
        found = tokenizer.encode(content.decode(), add_special_tokens=False).ids
        return array.array("I", found).tobytes()

    def text(content):
        tokens = list(array.array("I", content))
        return tokenizer.decode(tokens, skip_special_tokens=False).encode()

    longest = 0
    while asked := read(given):
        longest = max(longest, len(asked))  # the memory of a long text may not come back
        limit(len(content), longest)
        try:
            answer = joined(map(cut if asked[:1] == b"e" else text, divided(asked[1:])))
        except BaseException as error:  # the library's panics are no `Exception`
            write(answers, b"!" + str(error).encode(errors="replace")[:1000])
        else:
            write(answers, b"=" + answer)


if __name__ == "__main__":
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except EOFError:
        sys.exit()
