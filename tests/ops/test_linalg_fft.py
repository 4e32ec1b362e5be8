"""Linear algebra, Fourier transforms and products: batches pass, matrices and transformed dims are whole."""

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor, simulate
from shardwise.testing import check_rule
from tests.values import compare, seeded
from tests.workers import device_mesh, run_ranks

MESHES = [(3,), (2, 2), (2, 1, 3)]
L = torch.linalg


def spd(x):
    return x @ x.mT + 4 * torch.eye(x.shape[-1], dtype=x.dtype)


def lower(x):
    return x.tril(-1) + 4 * torch.eye(x.shape[-1], dtype=x.dtype)


MATRICES = (5, 2, 3, 3)
CASES = {
    "cholesky": (lambda x: L.cholesky(spd(x)), [MATRICES]),
    "old cholesky": (lambda x: torch.cholesky(spd(x), upper=True), [(4, 3, 3)]),
    "cholesky inverse": (lambda x: torch.cholesky_inverse(lower(x)), [MATRICES]),
    "cholesky solve": (lambda b, x: torch.cholesky_solve(b, lower(x)), [(5, 2, 3, 4), MATRICES]),
    "checked": (lambda x: L.inv_ex(spd(x), check_errors=True), [MATRICES]),
    "det": (lambda x: (L.det(x), L.slogdet(x), torch.logdet(spd(x))), [MATRICES]),
    "inverse": (lambda x: L.inv(spd(x)), [MATRICES]),
    "solve": (lambda a, b: L.solve(spd(a), b), [(5, 3, 3), (5, 3, 4)]),
    "solve broadcast": (lambda a, b: L.solve(spd(a), b), [(3, 3), (5, 3, 4)]),
    "solve vectors": (lambda a, b: L.solve(spd(a), b), [(5, 3, 3), (5, 3)]),
    "solve from the right": (lambda a, b: L.solve(spd(a), b, left=False), [(2, 3, 3), (2, 4, 3)]),
    "triangular": (lambda a, b: L.solve_triangular(lower(a), b, upper=False), [MATRICES, (5, 2, 3, 4)]),
    "triangular right": (lambda a, b: L.solve_triangular(lower(a), b, upper=False, left=False), [(3, 3), (5, 4, 3)]),
    "old triangular": (lambda b, a: torch.triangular_solve(b, lower(a), upper=False), [(2, 3, 4), (2, 3, 3)]),
    "lu": (lambda x: L.lu(spd(x)), [MATRICES]),
    "lu without pivots": (lambda x: L.lu_factor_ex(spd(x)).LU, [(5, 3, 3)]),
    "lu solve": (lambda x, b: L.lu_solve(*L.lu_factor(spd(x)), b), [(5, 3, 3), (5, 3, 4)]),
    "lu unpack": (lambda x: torch.lu_unpack(*L.lu_factor(spd(x))), [(4, 3, 3)]),
    "ldl": (lambda x, b: L.ldl_solve(*L.ldl_factor(spd(x).detach()), b.detach()), [(5, 3, 3), (5, 3, 4)]),
    "qr": (lambda x: L.qr(x), [(5, 4, 3)]),
    "r of qr": (lambda x: L.qr(x.detach(), "r"), [(5, 2, 4, 3)]),
    "geqrf": (lambda x: torch.geqrf(x.detach()), [(5, 4, 3)]),
    "ormqr": (torch.ormqr, [(2, 4, 3), (2, 3), (2, 4, 5)]),
    "ormqr from the right": (lambda x, t, y: torch.ormqr(x, t, y, False), [(5, 4, 3), (5, 3), (5, 2, 4)]),
    "householder": (L.householder_product, [(5, 4, 3), (5, 3)]),
    "svd": (lambda x: L.svd(x, full_matrices=False).S, [(5, 2, 4, 3)]),
    "svdvals": (L.svdvals, [(5, 4, 3)]),
    "nuclear": (lambda x: (L.matrix_norm(x, "nuc"), torch.norm(x, "nuc", dim=(1, 2)), L.cond(x)), [(5, 3, 3)]),
    "eigh": (lambda x: (L.eigvalsh(spd(x)), L.eigh(spd(x)).eigenvectors.abs()), [MATRICES]),
    "eig": (lambda x: (L.eigvals(x).abs(), L.eig(x).eigenvalues.real), [(5, 3, 3)]),
    "pinv": (lambda x: L.pinv(x), [(5, 4, 3)]),
    "pinv with tolerances": (lambda x, t: L.pinv(x, rtol=t.detach().abs() * 1e-8), [(5, 4, 3), (5,)]),
    "rank": (lambda x: L.matrix_rank(x.detach()), [(5, 4, 3)]),
    "matrix exp": (L.matrix_exp, [MATRICES]),
    "cross": (lambda x, y: L.cross(x, y, dim=1), [(4, 3, 2), (4, 3, 2)]),
    "cross broadcast": (torch.cross, [(1, 3), (5, 3)]),
    "fft": (lambda x: torch.fft.fft(x, dim=1), [(4, 6, 5)]),
    "rfft resized": (lambda x: torch.view_as_real(torch.fft.rfft(x, n=4, norm="ortho")), [(4, 6)]),
    "irfft2": (lambda x: torch.fft.irfft2(torch.view_as_complex(x)), [(4, 3, 3, 2)]),
    "hfft": (lambda x: torch.fft.hfft(torch.view_as_complex(x)), [(4, 3, 2)]),
    "fftn shifted": (lambda x: torch.fft.fftshift(torch.fft.fftn(x, dim=(0, 2)), 1), [(4, 6, 2)]),
    "stft": (lambda x, w: torch.stft(x, 4, window=w, return_complex=True), [(5, 16), (4,)]),
    "istft": (
        lambda x: torch.istft(torch.stft(x, 4, window=torch.ones(4, dtype=x.dtype), return_complex=True), 4),
        [(3, 16)],
    ),
    "addbmm": (lambda a, x, y: torch.addbmm(a, x, y, beta=0.5, alpha=2), [(4,), (3, 5, 2), (3, 2, 4)]),
    "addr": (lambda a, x, y: torch.addr(a, x, y, beta=0.5), [(5, 1), (5,), (4,)]),
    "bilinear": (F.bilinear, [(5, 4), (5, 3), (2, 4, 3), (2,)]),
    "cdist": (torch.cdist, [(2, 5, 3), (2, 4, 3)]),
    "cdist by 1": (lambda x, y: torch.cdist(x, y, 1.0), [(5, 3), (2, 4, 3)]),
    "many distances": (lambda x, y: torch.cdist(x, y), [(30, 3), (4, 3)]),
    "pdist": (F.pdist, [(5, 3)]),
    "kron": (torch.kron, [(3, 2), (2, 5)]),
    "multi dot": (lambda *xs: (L.multi_dot(xs), torch.chain_matmul(*xs)), [(3, 4), (4, 2), (2, 5)]),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([1, 2], [0, 1])), [(3, 4, 2), (4, 2, 5)]),
    "block diag": (torch.block_diag, [(3, 4), (5,), (), (2, 2)]),
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_simulated(name, mesh):
    function, shapes = CASES[name]
    check_rule(function, [seeded(*shapes)], [simulate(mesh)], limit=6, seed=len(name), tolerance=1e-10)


@pytest.mark.parametrize("name", ["det", "solve", "eigh", "svd", "lu", "householder", "pinv", "matrix exp", "qr"])
def test_a_cut_batch_gathers_no_matrix(name):
    function, shapes = CASES[name]
    given = [distribute_tensor(t, simulate((3,)), [Shard(0)]) for t in seeded(*shapes)]
    with shardwise.debug.ledger() as log:
        function(*given)
    assert log.total_bytes <= 3 * 5 * 2 * 4, log  # one int a matrix, to hear of errors


def test_columns_pass_and_parts_stay():
    mesh = simulate((3,))
    a, b, c = seeded((3, 3), (3, 6), (6, 4))
    with shardwise.strict():
        columns = distribute_tensor(b, mesh, [Shard(1)])
        x, *same = torch._linalg_solve_ex(distribute_tensor(spd(a), mesh, [Replicate()]), columns)
        assert x.placements == (Shard(1),)
        for got, want in zip(same, torch._linalg_solve_ex(spd(a), b)[1:], strict=True):
            compare(got, want, "the factors of a", 1e-10)
        rows = distribute_tensor(c, mesh, [Shard(0)])
        assert torch.fft.fft(rows).placements == (Shard(0),)
        assert torch.fft.fft(rows.sum(0)).placements == (Partial(),)
        assert torch.cdist(rows, distribute_tensor(c, mesh, [Replicate()])).placements == (Shard(0),)


def test_every_rank_hears_of_a_singular_matrix():
    (x,) = seeded((4, 3, 3))
    x[3] = 0
    mine = distribute_tensor(x, simulate((3,)), [Shard(0)])
    for function in (L.inv, lambda x: L.solve(x, x), lambda x: L.inv_ex(x, check_errors=True)):
        with pytest.raises(L.LinAlgError, match="Batch element 3"):
            function(mine)


def test_named_results_and_dtypes():
    x = seeded((4, 3, 3), dtype=torch.float32)[0]
    mine = distribute_tensor(x, simulate((3,)), [Shard(0)])
    for function, fields in [(L.slogdet, ("sign", "logabsdet")), (L.lu_factor_ex, ("LU", "pivots", "info"))]:
        got, want = function(mine), function(x)
        for field in fields:
            compare(getattr(got, field), getattr(want, field), field, 1e-5)


def on_gloo(rank, world_size):
    for name in ["solve", "inverse", "eigh", "householder", "fft", "cdist", "bilinear", "block diag"]:
        function, shapes = CASES[name]
        check_rule(function, [seeded(*shapes)], [device_mesh((2, 2))], limit=2, tolerance=1e-10)


def test_processes():
    run_ranks(on_gloo, 4)
