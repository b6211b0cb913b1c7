"""Conversations to token ids. The text of the chat template is trusted, the contents of the messages are not.

A template may trim contents, leave some out, or depend on them, so their place is only known after rendering. To locate them,
the conversation is rendered a second time with a random mark before and after each content. If no control token of the rendered
text lies in a content or across its border, the text is encoded in one piece, as the tokenizer does it. Otherwise the template's
text and the contents are encoded separately.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdmlm.errors import ControlText
from sdmlm.language_model.content import EncodedText, TextEncoder

Messages = Sequence[Mapping[str, str]]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model")


def _secret() -> str:
    """A random word that nobody can guess; letters only, so that templates and normalizers treat it as ordinary text."""
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(32))


class ChatTemplate:
    """The chat template of a tokenizer. Raises jinja2's TemplateError where the template refuses a conversation."""

    def __init__(self, text: TextEncoder) -> None:
        self._text, self._tokenizer = text, text.tokenizer
        self._begin, self._end, self._hidden = _secret(), _secret(), _secret()
        self._marks = re.compile(f"{self._begin}|{self._end}", re.IGNORECASE)
        text.add_control(self._written_tokens())

    def render(self, messages: Messages, begin: bool = True) -> str:
        """The text of a conversation; with `begin` it ends where an answer begins."""
        plain = [dict(m) for m in messages]
        return str(self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=begin))

    def ids(self, messages: Messages) -> list[int]:
        """The ids of a conversation up to where an answer begins; no content becomes a control token."""
        self._check(messages)
        rendered = self.render(messages)
        contents = self._contents(messages, rendered)
        encoded = self._text.encoded([rendered], follows=False)[0]
        if self._harmless(messages, encoded, contents):
            return encoded.ids
        return self._apart(messages)

    def _check(self, messages: Messages) -> None:
        """Refuse unknown roles, and control tokens in fields other than role and content: these are not encoded as content."""
        source = str(self._tokenizer.chat_template)
        for message in messages:
            role = message.get("role")
            if role is not None and role not in ROLES:
                quoted = f"'{role}'" in source or f'"{role}"' in source
                if not isinstance(role, str) or not re.fullmatch(r"[A-Za-z][\w-]*", role) or not quoted:
                    raise ControlText(f"the role {role!r} is not known: use one of {', '.join(ROLES)}.")
            for name, value in message.items():
                if name in ("role", "content") and isinstance(value, str):
                    continue
                if any(map(self._control_strings, _strings(value))):
                    raise ControlText(f"the field {name!r} of a message holds a control token: remove it.")

    def _control_strings(self, text: str) -> list[tuple[int, int]]:
        """The (start, end) of each control string in a text, as the tokenizer or a template may read it."""
        return sorted({*self._text.control_strings(self._text.encoded([text])[0]), *self._text.names(text)})

    def _contents(self, messages: Messages, rendered: str) -> list[tuple[int, int]] | None:
        """The (start, end) of each content in the rendered text; None if the template changes them so that they cannot be located."""
        from jinja2 import TemplateError

        def around(content: str) -> str:
            return self._begin + content + self._end

        def inside(content: str) -> str:  # for templates that trim
            core = content.strip()
            return content.replace(core, around(core), 1)

        for mark in (around, inside):
            try:
                marked = self.render(_changed(messages, mark))
            except TemplateError:
                continue
            parts = self._marks.split(marked)
            marks = [m.group().lower() for m in self._marks.finditer(marked)]
            if "".join(parts) == rendered and marks == [self._begin, self._end] * (len(marks) // 2):
                ends = [0]
                for part in parts:
                    ends.append(ends[-1] + len(part))
                return [(ends[n], ends[n + 1]) for n in range(1, len(parts), 2)]
        return None

    def _harmless(self, messages: Messages, encoded: EncodedText, contents: list[tuple[int, int]] | None) -> bool:
        """Whether no control token of the rendered text comes from a content, or from a part of one."""
        control_spans = self._text.control_strings(encoded)
        if contents is not None and encoded.spans is not None:
            return not any(a < end and start < b for a, b in control_spans for start, end in contents)
        # Positions are not known: the contents must hold no control string, and add none to those of the template.
        if any(self._control_strings(_content(m)) for m in messages):
            return False
        if contents is not None:
            text, last = "", 0
            for start, end in contents:
                text, last = text + encoded.text[last:start] + "a", end
            return self._controls(text + encoded.text[last:]) == self._controls(encoded.text)
        from jinja2 import TemplateError

        try:
            return self._controls(self.render(_changed(messages, lambda _: "a"))) == self._controls(encoded.text)
        except TemplateError:
            return False

    def _controls(self, text: str) -> list[int]:
        return [i for i in self._text.trusted(text, follows=False) if i in self._text.control_ids]

    def _apart(self, messages: Messages) -> list[int]:
        """The ids if the template's text and the contents are encoded separately.

        Control strings of a content are hidden from the template, which otherwise might act on them.
        """
        strings: list[str] = []

        def hide(content: str) -> str:
            out, last = "", 0
            for start, end in self._control_strings(content):
                if start >= last:
                    name = "".join(string.ascii_lowercase[int(digit)] for digit in str(len(strings)))
                    strings.append(content[start:end])
                    out, last = out + content[last:start] + f"{self._hidden}{name}z", end
            return out + content[last:]

        def show(match: re.Match[str]) -> str:
            number = "".join(str(string.ascii_lowercase.index(letter)) for letter in match[1].lower())
            return strings[int(number)].upper() if match[0].isupper() else strings[int(number)]

        hidden = _changed(messages, hide)
        rendered = self.render(hidden)
        contents = self._contents(hidden, rendered)
        if contents is None:
            raise ControlText("a message holds a control token, and the chat template rewrites the message: remove it.")
        names = re.compile(f"{self._hidden}([a-j]+)z", re.IGNORECASE)
        ids: list[int] = []
        last = 0
        for start, end in [*contents, (len(rendered), len(rendered))]:
            ids += self._text.trusted(rendered[last:start], follows=last > 0)
            ids += self._text.content(names.sub(show, rendered[start:end]), follows=start > 0)
            last = end
        return ids

    def _written_tokens(self) -> set[int]:
        """Tokens that the template writes as markers although the tokenizer does not list them as special."""
        from jinja2 import TemplateError

        written: set[int] = set()
        added = self._tokenizer.added_tokens_decoder
        for role in ROLES:
            for turns in ([role], ["user", role], [role, "user"]):
                try:
                    text = self.render([{"role": r, "content": "a"} for r in turns])
                except TemplateError:
                    continue
                ids = {*self._text.trusted(text, follows=False)}
                names = zip(ids, self._tokenizer.convert_ids_to_tokens(list(ids)), strict=True)
                written |= {
                    i
                    for i, name in names
                    if (i in added and added[i].content.strip())
                    or re.fullmatch(r"[▁Ġ]?(<[^\s<>]+>|\[[^\s\[\]]+\]|\{[^\s{}]+\})", name or "")
                }
        return written - {*self._text.trusted("a"), *self._text.trusted("a", follows=False)}


def _changed(messages: Messages, change: Callable[[str], str]) -> list[dict[str, str]]:
    """Messages with changed contents. Those without text stay as they are: a template may check whether there is any."""
    return [{**m, "content": change(_content(m))} if _content(m).strip() else dict(m) for m in messages]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    values = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return [s for v in values for s in _strings(v)] if isinstance(values, (list, tuple)) else []
