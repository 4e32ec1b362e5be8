"""Hooks of the documentation: pictures made by the library, and the reference of all public names.

`<!-- picture: EXPRESSION -->` on a page becomes the picture of that object, in the names that the page's Python blocks
have made up to there.
"""

import contextlib
import io
import re

import shardwise

PICTURE = re.compile(r"<!-- picture: (.*?) -->")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PACKAGES = {
    "shardwise": "Tensors, layouts, meshes, moves",
    "shardwise.parallel": "Parallel modules and training",
    "shardwise.sharded": "Tile tensors",
    "shardwise.debug": "Looking at what happens",
    "shardwise.experimental": "torch's experimental names",
    "shardwise.optim": "Optimizers",
    "shardwise.testing": "Checks of your own rules and programs",
    "shardwise.reports": "Recorded runs",
    "shardwise.checkpoint": "Checkpoints",
}


def with_pictures(text):
    """A page with its pictures drawn."""
    if not PICTURE.search(text):
        return text
    names, out, done = {"__name__": "page"}, "", 0
    for found in PICTURE.finditer(text):
        for block in BLOCK.findall(text[done : found.start()]):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(block, names)
        picture = eval(found.group(1), names)._repr_html_()
        out += text[done : found.start()] + f'\n<div markdown="0">{picture}</div>\n'
        done = found.end()
    return out + text[done:]


def public_names():
    """Every public name, by package: classes, functions and values, not modules."""
    found = {}
    for package in PACKAGES:
        module = shardwise
        for part in package.split(".")[1:]:
            module = getattr(module, part) if hasattr(module, part) else __import__(package, fromlist=["*"])
        names = [n for n in module.__all__ if not isinstance(getattr(module, n), type(shardwise))]
        found[package] = [name for name in names if _is_ours(getattr(module, name))]
    return found


def _is_ours(thing):
    return (getattr(thing, "__module__", "") or "").partition(".")[0] == "shardwise"


def _place(package, name):
    """Where a name is defined: that is what its docstring is read from."""
    module = __import__(package, fromlist=["*"])
    thing = getattr(module, name)
    return f"{thing.__module__}.{getattr(thing, '__qualname__', name)}"


def api():
    """The reference page."""
    lines, seen = ["# API", ""], set()
    for package, names in public_names().items():
        lines += [f"## {package}", "", f"{PACKAGES[package]}.", ""]
        for name in sorted(names, key=str.lower):
            place = _place(package, name)
            if place in seen:
                continue
            seen.add(place)
            shown = f"{package}.{name}"  # as programs import it, wherever it is defined
            options = ("heading_level: 3", f"heading: {shown}", f"toc_label: {name}")
            lines += [f"::: {place}", "    options:", *(f"      {option}" for option in options), ""]
    return "\n".join(lines)


def on_files(files, config):
    from mkdocs.structure.files import File

    files.append(File.generated(config, "api.md", content=api()))
    return files


def on_post_page(output, page, config):
    """Search works from a folder too: what stands in for a worker there is ours, not fetched from elsewhere."""
    up = "../" * page.url.count("/")
    return output.replace("https://unpkg.com/iframe-worker/shim", f"{up}assets/worker.js")


def on_page_markdown(markdown, page, config, files):
    if page.file.src_path == "operators.md":
        page.meta["hide"] = ["toc"]  # a table as wide as the page
    return with_pictures(markdown)
