"""Pictures: HTML that needs nothing else, the right ranks in the right places, and few of them on large meshes."""

import io
import re
import time
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, debug, distribute_tensor, outline, plan_move, simulate
from shardwise.drawing.picture import colour_of
from shardwise.layout.picture import picture_of
from shardwise.sharded import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.showing import picture_of as picture_of_tiles

R = Replicate()
GRID = simulate((2, 4), axis_names=("dp", "tp"))
CUBE = simulate((2, 2, 2))
LAYOUTS = {
    "blocks": (GRID, (5, 7), [Shard(0), Shard(1)]),
    "replicas": (GRID, (4, 6), [R, Shard(1)]),
    "uneven": (GRID, (10, 3), [Shard(0, sizes=(9, 1)), Shard(0)]),
    "empty": (GRID, (3, 2), [Shard(0), Shard(0)]),
    "pending": (GRID, (4, 6), [Partial(), Shard(0)]),
    "one dim": (GRID, (11,), [Shard(0), Shard(0)]),
    "no dims": (GRID, (), [R, Partial()]),
    "3 dims": (CUBE, (4, 4, 4), [Shard(0), Shard(1), Shard(2)]),
    "4 dims": (CUBE, (4, 4, 4, 4), [Shard(0), Shard(1), Shard(3)]),
    "nothing": (GRID, (0, 2), [Shard(0), R]),
}


def tree(html):
    """The HTML as a tree: it must be well formed, and name nothing outside of itself."""
    assert "http" not in html.replace('xmlns="http://www.w3.org/2000/svg"', "") and "<script" not in html
    return ElementTree.fromstring(f"<all>{html}</all>")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_in_the_box_of_its_holders(name):
    mesh, shape, placements = LAYOUTS[name]
    layout = distribute_tensor(torch.zeros(shape), mesh, [R if p.is_partial() else p for p in placements]).layout
    layout = layout.replace(placements=placements)
    picture = picture_of(layout)
    covered = 0
    for panel in picture.panels:
        outer = [tuple(map(int, side.split(":"))) for side in re.findall(r"\d+:\d+", panel.title)]
        for box in panel.boxes:
            sides = [*outer, box.rows, box.columns][-layout.ndim :] if layout.ndim else []
            index = [start for start, _ in sides]
            last = [stop - 1 for _, stop in sides]
            assert layout.holders(index)[:6] == box.ranks == layout.holders(last)[:6]
            assert box.count == len(layout.holders(index)) and box.is_pending == layout.is_partial
            covered += torch.Size([stop - start for start, stop in sides]).numel()
    assert covered == torch.Size(shape).numel()
    tree(layout._repr_html_())
    idle = [rank for rank in mesh.ranks if not all(layout.local_shape(rank))]
    if idle and 0 not in shape:
        assert any(note == f"holding nothing: {'rank' if len(idle) == 1 else 'ranks'} {', '.join(map(str, idle))}" for note in picture.notes)


def shown_in_terminal(what):
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(what)
    return out.getvalue()


def test_tensors_plans_meshes_and_ledgers_have_pictures():
    x = distribute_tensor(torch.randn(8, 6), GRID, [Shard(0), Shard(1)])
    with debug.ledger() as log:
        y = x.redistribute(placements=[R, Shard(1)])
    plan = plan_move(x.layout, y.layout)
    for what, words in {x: "shape (8, 6)", plan: "lower bound", GRID: "dp=2, tp=4", log: "all_gather"}.items():
        html = what._repr_html_()
        found = "".join(tree(html).itertext())
        assert words in found, found
        shown = shown_in_terminal(what)
        assert max(map(len, shown.splitlines())) <= 80
    assert "Σ ranks 0, 4" in shown_in_terminal(y.sum(0, keepdim=True).redistribute(placements=[Partial(), Shard(1)]))
    assert len(tree(plan._repr_html_()).findall(".//{http://www.w3.org/2000/svg}svg")) == 2


@pytest.mark.parametrize("shape", [(64,), (64, 32), (4, 16, 16)])
def test_pictures_of_large_meshes_fit_into_80_columns(shape):
    mesh = simulate(shape)
    x = distribute_tensor(torch.zeros(4096, 64, 64, device="meta"), mesh, [Shard(dim) for dim in range(len(shape))])
    for what in (x.layout, mesh):
        wide = io.StringIO()
        Console(file=wide, width=1000, color_system=None).print(what)
        assert max(map(len, wide.getvalue().splitlines())) <= 80
    assert len(shape) > 2 or f"rank {mesh.size() - 1}" in wide.getvalue()


def test_tiles():
    tiles = [ShardMetadata([0, 0], [3, 4], "rank:0/cpu"), ShardMetadata([0, 4], [3, 2], "rank:1/cpu"), ShardMetadata([3, 0], [2, 6], "rank:5/cpu")]
    picture = picture_of_tiles(ShardedTensorMetadata(tiles, torch.Size([5, 6]), TensorProperties()))
    cells = picture.panels[0].cells()
    assert [[box.ranks[0] for box in row] for row in cells] == [[0, 1], [5, 5]]


@pytest.mark.parametrize("shape", [(1024,), (4096,), (64, 64), (16, 16, 16)])
def test_large_meshes_are_summarised(shape):
    mesh = simulate(shape)
    x = distribute_tensor(torch.zeros(8192, 16, 16, device="meta"), mesh, [Shard(dim) for dim in range(len(shape))])
    started = time.process_time()
    html = x.layout._repr_html_()
    mesh_html = mesh._repr_html_()
    assert time.process_time() - started < 6
    assert max(len(html), len(mesh_html)) < 500_000 and "more" in html
    tree(html), tree(mesh_html)


def test_the_html_is_not_of_values_and_nothing_is_communicated():
    loss = distribute_tensor(torch.ones(4, 4), GRID, [Shard(0), Shard(1)]).sum()
    with debug.ledger() as log:
        html = loss._repr_html_()
    assert not len(log) and "not reduced yet" in html and isinstance(loss, DTensor)


def test_neighbours_have_different_colours():
    colours = [colour_of(rank) for rank in range(16)]
    assert len(set(colours)) == 16
    assert all(sum(abs(a - b) for a, b in zip(x, y)) > 80 for x, y in zip(colours, colours[1:]))


def _labels(html):
    """The words of a picture with the place of each: x, the letters and where they are anchored."""
    found = re.findall(r'<text x="([\d.-]+)" y="([\d.-]+)" text-anchor="(\w+)"[^>]*>([^<]*)</text>', html)
    return [(float(x), float(y), anchor, text) for x, y, anchor, text in found]


def test_names_of_indices_are_neither_cut_off_nor_written_over_each_other():
    grid = outline((512, 128), axis_names=("nodes", "gpus"))
    with grid as mesh:
        pictures = [
            distribute_tensor(torch.zeros(4096, 64), simulate(1024), [Shard(0)])._repr_html_(),
            shardwise.zeros(1024, 1024, device_mesh=mesh, placements=[Shard(0), Shard(1)])._repr_html_(),
            mesh._repr_html_(),
        ]
    for html in pictures:
        labels = _labels(html)
        assert labels and not any("…" in text for *_, text in labels)
        assert min(x - 6.6 * len(text) for x, _, anchor, text in labels if anchor == "end") >= 0
        lines = {}
        for x, y, anchor, text in labels:
            if anchor == "middle":
                lines.setdefault(y, []).append((x, 6.6 * len(text)))
        for line in lines.values():
            line.sort()
            assert all(b - a >= (wide + long) / 2 for (a, wide), (b, long) in zip(line, line[1:]))
    assert "nodes 0" in pictures[2] and "gpus 127" in pictures[2]
    assert ">0</text>" in simulate((2, 2))._repr_html_()  # axes without names of their own


def test_a_ledgers_picture_has_no_empty_column():
    with debug.ledger() as log:
        distribute_tensor(torch.zeros(4), simulate(2), [Shard(0)]).full_tensor()
    assert "reason" not in log._repr_html_()
