"""One choice of a chat as it grows: its reasoning, text and tool calls, from the pieces of the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from turbojax.engine.response import LogprobOf, Response
from turbojax.serve.parsing import Content, Delta, OutputParser, Reasoning, ToolCallArguments, ToolCallStart
from turbojax.serve.protocol.chat import CalledFunction, Choice, Logprobs, Message, TokenLogprob, ToolCall, TopLogprob
from turbojax.serve.token_texts import TokenTexts, as_json_number


class Part(NamedTuple):
    """What a piece of the engine adds to a choice; `finish_reason` is that of the last."""

    deltas: list[Delta]
    logprobs: list[TokenLogprob]
    finish_reason: str | None


class ChatChoice:
    """Reads the pieces of one choice.

    Attributes:
        num_reasoning_tokens: of the tokens so far; those of the tags around it may count or not.
    """

    def __init__(self, parser: OutputParser | None, tokens: TokenTexts, *, num_top: int | None) -> None:
        """Begins a choice.

        Args:
            parser: of its text; None where all of it is content: reading that costs as much as the rest of a token.
            tokens: names of tokens.
            num_top: so many of the likeliest tokens are listed for each; None: no log-probabilities.
        """
        self._parser, self._tokens, self._num_top = parser, tokens, num_top
        self._unclear_ids: list[int] = []  # tokens whose text the parser holds back
        self.num_reasoning_tokens = 0

    def read(self, piece: Response) -> Part:
        deltas, reason = self._deltas(piece), piece.finish_reason
        logprobs = []
        if self._num_top is not None:
            rows = zip(piece.token_ids, piece.logprobs or (), strict=True)
            logprobs = [token_logprob(self._tokens, token, found, self._num_top) for token, found in rows]
        if reason == "stop" and self._parser is not None and self._parser.num_calls:
            reason = "tool_calls"
        return Part(deltas, logprobs, reason)

    def _deltas(self, piece: Response) -> list[Delta]:
        if self._parser is None:
            return [Content(piece.text)] if piece.text else []
        deltas = self._parser.feed(piece.text)
        if piece.finish_reason is not None:
            deltas += self._parser.finish()
        self._unclear_ids += piece.token_ids
        if deltas:
            num_reasoning = self._num_reasoning(deltas, self._unclear_ids)
            self.num_reasoning_tokens += num_reasoning
            # Behind reasoning there may be more of it, or a call whose name has not come yet.
            self._unclear_ids = self._unclear_ids[num_reasoning:] if num_reasoning else []
        return deltas

    def _num_reasoning(self, deltas: list[Delta], token_ids: list[int]) -> int:
        """How many of these tokens are reasoning, which comes before all else."""
        thoughts = [delta.text for delta in deltas if isinstance(delta, Reasoning)]
        if not thoughts:
            return 0
        texts, thought = [self._tokens.bytes_of(token) for token in token_ids], "".join(thoughts).encode()
        end = b"".join(texts).find(thought) + len(thought)
        return bisect_left(list(accumulate(map(len, texts))), end) + 1


def token_logprob(tokens: TokenTexts, token: int, found: LogprobOf, num_top: int) -> TokenLogprob:
    """A token and the likeliest at its place, in OpenAI's form."""

    def named(one: int) -> dict[str, Any]:
        text = tokens.bytes_of(one)
        return {"token": tokens.text_of(one), "logprob": as_json_number(found[one]), "bytes": list(text)}

    return TokenLogprob(**named(token), top_logprobs=[TopLogprob(**named(one)) for one in list(found)[:num_top]])


def as_choice(index: int, parts: Iterable[Part], *, has_logprobs: bool) -> Choice:
    """A whole choice from its parts."""
    content, reasoning, calls = "", "", dict[int, ToolCall]()
    logprobs, reason = list[TokenLogprob](), None
    for part in parts:
        logprobs += part.logprobs
        reason = part.finish_reason
        for delta in part.deltas:
            match delta:
                case Content():
                    content += delta.text
                case Reasoning():
                    reasoning += delta.text
                case ToolCallStart():
                    called = CalledFunction(name=delta.name, arguments="")
                    calls[delta.index] = ToolCall(id=delta.call_id, function=called)
                case ToolCallArguments():
                    calls[delta.index].function.arguments += delta.text
    message = Message(
        content=None if calls and not content else content,
        reasoning_content=reasoning or None,
        tool_calls=list(calls.values()) or None,
    )
    table = Logprobs(content=logprobs) if has_logprobs else None
    return Choice(index=index, message=message, logprobs=table, finish_reason=reason)  # type: ignore[arg-type]


def as_delta(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Deltas as the `delta` of a chunk: a `ChunkDelta`, without the checks that every token would pay for."""
    chunk: dict[str, Any] = {}
    for delta in deltas:
        match delta:
            case Content():
                chunk["content"] = chunk.get("content", "") + delta.text
            case Reasoning():
                chunk["reasoning_content"] = chunk.get("reasoning_content", "") + delta.text
            case ToolCallStart():
                function: dict[str, Any] = {"name": delta.name, "arguments": ""}
                call = {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}
                chunk.setdefault("tool_calls", []).append(call)
            case ToolCallArguments():
                calls = chunk.setdefault("tool_calls", [])
                if calls and calls[-1]["index"] == delta.index:  # a call stands in a chunk once
                    calls[-1]["function"]["arguments"] += delta.text
                else:
                    calls.append({"index": delta.index, "function": {"arguments": delta.text}})
    return chunk
