"""Doctests of docstrings are shown as code, whatever their heading is called."""

import re

import griffe


class Examples(griffe.Extension):
    """Names sections as griffe expects them."""

    def _mend(self, obj):
        docstring = obj.docstring
        if docstring is None or ">>>" not in docstring.value:
            return
        text = re.sub(r"^Example:$", "Examples:", docstring.value, flags=re.MULTILINE)
        if "Examples:" not in text:
            before, mark, after = text.partition(">>>")
            code = "\n".join(f"    {line}" for line in (mark + after).splitlines())
            text = f"{before.rstrip()}\n\nExamples:\n{code}"
        docstring.value = text

    def on_instance(self, *, obj, **kwargs):
        self._mend(obj)

    def on_object(self, *, obj, **kwargs):
        self._mend(obj)
