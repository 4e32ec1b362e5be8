"""Which statements programs are made of: templates, whose slots `compose.py` fills.

Slots that stand for a tensor: ``{x}`` any, ``{f}`` real floating, ``{c}`` floating or complex, ``{i}`` integer, ``{b}``
bool, ``{m}`` a real matrix, ``{q}`` a real square matrix, ``{v}`` a real vector, ``{t}`` a real tensor of three dims,
``{img}`` one of four dims, ``{w}`` a tensor that is written. What comes after the first refers to it: ``{y}`` a tensor
that broadcasts with it, ``{same}`` one of its shape and dtype, ``{target}`` one of these to write to, ``{mask}`` bools
of its shape, ``{index}`` indices into its dim ``{dim}``. ``{shape:4,b}`` makes a new input of that shape, where a, b, c
are the sizes of the first and -1 its last.
"""

from __future__ import annotations

from shardwise.testing.fuzz.more import CALLED, EINSUMS, FORMS, LOSSES, PICKED, REDUCED, VIEWED, WRITTEN

POINTWISE = """
torch.sin({c}) torch.cos({c}) torch.tanh({f}) torch.sigmoid({f}) torch.relu({f}) F.gelu({f}) F.silu({f})
F.softplus({f}) torch.abs({c}) torch.neg({c}) torch.square({c}) torch.log1p({f}.abs()) torch.erf({f}) torch.sign({f})
torch.round({f}) torch.floor({f}) torch.frac({f}) torch.exp(-{f}.abs()) torch.rsqrt({f}.abs()+1)
torch.logit(torch.sigmoid({f})) {f}.square() torch.nan_to_num({f}) torch.clamp({f},-0.5,0.5) torch.clamp({f},min=0.1)
F.leaky_relu({f},0.1) F.elu({f}) F.hardtanh({f}) F.mish({f}) torch.bitwise_not({i}) {i}//2 {i}%3
torch.logical_not({x}) torch.isfinite({f}) torch.real({c}) torch.conj({c}) torch.angle({c}) torch.signbit({f}) {c}+{y}
{c}-{y} {c}*{y} {x}+1 2-{x} {c}*0.5 {f}/({y}.abs()+1) torch.maximum({f},{y}) torch.minimum({f},{y})
torch.atan2({f},{y}) torch.hypot({f},{y}) torch.where({f}>0,{f},{y}) torch.where({mask},{same},{x}) {x}=={y} {f}<{y}
{f}>={y} torch.lerp({f},{y},0.3) torch.lerp({f},{same},{same}) torch.addcmul({f},{y},{y})
torch.addcdiv({f},{y},{y}.abs()+1,value=0.5) torch.pow({f}.abs()+1,2) torch.pow({f}.abs()+0.5,{y})
torch.masked_fill({x},{mask},1) torch.fmod({f},2.0) torch.copysign({f},{y}) torch.add({f},{y},alpha=0.5)
torch.sub({f},{y},alpha=2) torch.float_power({f}.abs()+1,1.5) torch.logaddexp({f},{y})
torch.xlogy({f}.abs(),{y}.abs()+1) torch.heaviside({f},{y}) torch.ldexp({f},{i}) torch.bitwise_and({i},{y})
torch.bitwise_xor({i},{y}) torch.logical_or({x},{y}) torch.gcd({i},{y}) {i}+{f} {b}*{f} {b}&{y} {f}+{i}
torch.true_divide({i},2) torch.polygamma(1,{f}.abs()+1) torch.sum(torch.stack([{f},{same}]),0) torch.where({b},1.5,2)
torch.dist({f},{y}) torch.isclose({f},{y}) torch.special.expit({f}) torch.clamp({f},{y}-1,{y}+1)
F.prelu({f},{shape:1}) torch.where({f}>0,{f},0.0) {f}*torch.tensor(2.0,dtype=torch.float64) {i}.to(torch.int8)*100
{i}.to(torch.uint8)+200 {i}.to(torch.int32)<<3 {i}*{f}.sum() {f}.float()+{y} torch.add({i},1.5)
"""

REDUCTIONS = """
{x}.sum() {x}.sum({dim}) {x}.sum({dim},keepdim=True) {c}.mean() {c}.mean({dim}) {f}.amax({dim})
{f}.amin({dim},keepdim=True) {f}.amax() {f}.prod({dim}) {f}.prod() {f}.std({dim}) {f}.var({dim},correction=0)
{f}.var() {f}.std() torch.var_mean({f},{dim}) torch.std_mean({f},{dim}) {f}.norm() {f}.norm(dim={dim})
torch.linalg.vector_norm({f},1,{dim}) torch.linalg.vector_norm({f},float("inf")) torch.logsumexp({f},{dim}) {x}.all()
{x}.any({dim}) {f}.argmax() {f}.argmax({dim}) {f}.argmin({dim},keepdim=True) torch.max({f},{dim}) torch.min({f},{dim})
torch.max({f}) torch.median({f},{dim}) torch.median({f}) torch.mode({i},{dim}) torch.nansum({f},{dim})
torch.nanmean({f}) torch.count_nonzero({x},{dim}) torch.cumsum({x},{dim}) torch.cumprod({f},{dim})
torch.cummax({f},{dim}) torch.cummin({f},{dim}) torch.logcumsumexp({f},{dim}) torch.diff({f},dim={dim})
torch.trapezoid({f},dim={dim}) torch.softmax({f},{dim}) torch.log_softmax({f},{dim}) F.softmin({f},{dim})
torch.aminmax({f}) torch.aminmax({f},dim={dim}) torch.quantile({f},0.3,dim={dim}) torch.kthvalue({f},1,{dim})
{f}.sum(({dim},{dim2})) {f}.mean(({dim},{dim2})) {f}.amax(({dim},{dim2})) torch.sort({f},{dim})
torch.sort({f},{dim},descending=True) torch.argsort({f},{dim}) torch.topk({f},1,{dim}).values
torch.topk({f},2,{dim}).values torch.unique({i}) torch.unique({i},return_inverse=True,return_counts=True)
torch.unique_consecutive({i})
torch.renorm({f},2,{dim},0.7) F.normalize({f},dim={dim}) F.cosine_similarity({f},{same},dim={dim})
torch.sum({f},{dim},dtype=torch.float32) torch.histc({f},4,-1,1) torch.bincount({i}.abs().flatten())
torch.bucketize({f},{shape:3}.sort()[0]) {f}.sum_to_size({f}.shape) {f}.cov() torch.nanmedian({f},{dim})
torch.nanquantile({f},0.5) torch.argwhere({x}) torch.nonzero({x}) {x}[{mask}] torch.masked_select({x},{mask})
torch.linalg.norm({m}) torch.linalg.matrix_norm({m}) torch.trace({m}) torch.dist({f},{same},1)
torch.cumulative_trapezoid({f},dim={dim}) F.pairwise_distance({m},{same}) torch.cdist({m},{same})
"""

VIEWS = """
{m}.T {x}.mT {x}.transpose({dim},{dim2}) {x}.permute({perm}) {x}.reshape(-1) {x}.reshape({reshape})
{x}.view({reshape}) {x}.view(-1) {x}.flatten() {x}.flatten({dim}) {x}.unsqueeze({dim}) {x}.unsqueeze(-1) {x}.squeeze()
{x}.squeeze({dim}) {x}.unsqueeze(0).expand({expand}) {x}.narrow({dim},{start},1) {x}.select({dim},{start})
{x}[{slice}] {x}[{slice}] {x}[...,{slice}] {x}[::2] {x}[1:] {x}[-1] {x}[None] {x}[...,0] {x}[0] torch.diagonal({m})
torch.diagonal({x},0,{dim},{dim2}) {x}.unfold({dim},{one},1) {x}.unfold({dim},2,1) {x}.unfold({dim},2,2)
{x}.split(2,{dim}) {x}.chunk(2,{dim}) {x}.unbind({dim}) {x}.tensor_split(3,{dim}) torch.movedim({x},{dim},{dim2})
torch.roll({x},1,{dim}) torch.roll({x},2) torch.flip({x},({dim},)) {m}.rot90() {x}.repeat({repeat})
torch.tile({x},(2,)) torch.repeat_interleave({x},2,{dim}) {x}.contiguous() {x}.clone() {f}.float() {f}.double()
{f}.bfloat16() {x}.to(torch.float64) {x}.to(torch.int64) {x}.detach() {x}.bool() torch.view_as_real({c}+0j) {f}.real
{x}.expand_as({x}) {x}.view_as({x}) {x}.swapaxes({dim},{dim2}) {x}.ravel() torch.atleast_2d({x}) torch.tril({m})
torch.triu({m},1) torch.diag({v}) torch.diag({m}) torch.diag_embed({f}) {x}.unflatten({dim},({one},-1))
{x}.unflatten({dim},(-1,2)) {x}.movedim(0,-1) {x}.as_strided({strided})
{x}.contiguous(memory_format=torch.channels_last) {img}.to(memory_format=torch.channels_last) {x}.alias() {x}.T
{x}.new_zeros((2,3)) torch.zeros_like({x}) torch.ones_like({x}) torch.full_like({f},0.5) {x}.new_ones({x}.shape)
torch.broadcast_to({x},{x}.shape) torch.vander({v}) torch.hsplit({m},2) torch.flipud({x}) torch.fliplr({m})
torch.select_scatter({x},{x}.select({dim},0),{dim},-1) torch.slice_scatter({x},{x}.narrow({dim},0,1),{dim},0,1)
torch.diagonal_scatter({m},torch.diagonal({m})*2) torch.squeeze({x},{dim}) {x}[:] {x}[...] {x}[{slice},{slice}]
{x}[0,{slice}] {x}[{slice},...,0] {x}[None,{slice}] {x}[{slice},{slice}].T {x}.narrow({dim},{start},1).squeeze({dim})
"""

JOINING = """
torch.cat([{x},{same}],{dim}) torch.stack([{x},{same}],{dim}) torch.hstack([{x},{same}]) torch.vstack([{x},{same}])
torch.dstack([{x},{same}]) torch.cat([{x},{x}],{dim}) torch.cat([{x}.narrow({dim},0,1),{same}],{dim})
torch.block_diag({m},{same}) torch.outer({v},{same}) torch.kron({m},{same}) torch.meshgrid({v},{same},indexing="ij")
torch.cartesian_prod({v},{same}) torch.combinations({v}) torch._foreach_add([{f},{same}],2.0)
torch._foreach_mul([{f},{same}],[{same},{f}]) torch.column_stack([{x},{same}])
"""

INDEXING = """
{x}[{index0}] {x}[:,{index1}] torch.index_select({x},{dim},{index}) torch.gather({x},{dim},{gatherindex})
torch.take_along_dim({x},{gatherindex},{dim}) torch.take({x},{index0}%{x}.numel())
torch.scatter({x},{dim},{gatherindex},1) torch.scatter_add({x},{dim},{gatherindex},{same})
torch.index_add({x},{dim},{index},torch.index_select({x},{dim},{index}))
torch.index_copy({x},{dim},{index},torch.index_select({x},{dim},{index})) torch.index_fill({x},{dim},{index},0)
{x}.index_put(({index0},),{x}[{index0}],accumulate=True) torch.scatter_reduce({f},{dim},{gatherindex},{same},"amax")
torch.scatter_reduce({f},{dim},{gatherindex},{same},"mean") torch.masked_scatter({x},{mask},{same})
F.one_hot({i}.abs(),8) F.embedding({i}.abs()%4,{shape:4,3}) torch.searchsorted({v}.sort()[0],{v})
torch.put({x},{index0},{x}.flatten()[:2]) torch.where({x}) {x}[{index0},...] {x}[{index0},None]
{x}[torch.tensor([0,-1])] {x}[[0,0]] F.embedding_bag({i}.abs().reshape(-1,1)%4,{shape:4,3}) torch.isin({i},{same})
{x}.index({index0})
torch.index_reduce({f},{dim},{index},torch.index_select({f},{dim},{index}),"mean")
torch.scatter_reduce({f},{dim},{gatherindex},{same},"prod",include_self=False) {x}[{mask}]*2
torch.nonzero({x})*2+1 torch.where({b},{b},0.5) {x}[{index0}].sum(0) torch.searchsorted({f}.sort()[0],{f}.contiguous())
"""

MATRICES = """
{m}@{m}.T {m}.T@{m} {t}@{t}.mT torch.mm({m},{shape:b,4}) torch.bmm({t},{shape:a,c,2}) torch.matmul({t},{shape:c,2})
torch.matmul({m},{shape:b}) F.linear({f},{shape:4,-1}) F.linear({f},{shape:4,-1},{shape:4})
torch.addmm({shape:4},{m},{shape:b,4}) torch.addmv({shape:a},{m},{shape:b})
torch.baddbmm({shape:a,b,2},{t},{shape:a,c,2}) torch.einsum("ij,kj->ik",{m},{m}) torch.einsum("ij,ij->j",{m},{same})
torch.einsum("bij,bkj->bik",{t},{same}) torch.dot({v},{same}) torch.tensordot({m},{same},2)
torch.tensordot({m},{m},([0],[0])) torch.linalg.multi_dot([{m},{m}.T,{m}])
torch.linalg.solve({q}+3*torch.eye({q}.shape[0],dtype={q}.dtype),{q})
torch.linalg.inv({q}+3*torch.eye({q}.shape[0],dtype={q}.dtype)) torch.linalg.det({q})
torch.linalg.slogdet({q}+3*torch.eye({q}.shape[0],dtype={q}.dtype))
torch.linalg.cholesky({m}@{m}.T+torch.eye({m}.shape[0],dtype={m}.dtype)) torch.linalg.svdvals({m})
torch.matrix_power({q},2) torch.linalg.matrix_exp({q}*0.1) torch.linalg.cross({f},{same}) torch.fft.rfft({f})
torch.fft.rfft({f},dim={dim}) torch.fft.fft({c},dim={dim}) torch.fft.fftn({c}) torch.fft.ifft({c})
torch.fft.fftshift({f}) torch.linalg.eigvalsh({q}+{q}.T)
"""

NETWORKS = """
F.layer_norm({f},{f}.shape[-1:]) F.layer_norm({f},{f}.shape[-1:],{shape:-1},{shape:-1})
F.rms_norm({f},{f}.shape[-1:],{shape:-1}) F.group_norm({t},1) F.batch_norm({m},None,None,training=True)
F.batch_norm({t},None,None,{shape:b},{shape:b},True) F.instance_norm({t}) F.conv1d({t},{shape:2,b,1})
F.conv1d({t},{shape:2,b,2},padding=1) F.conv1d({t},{shape:b,1,3},padding=1,groups={t}.shape[1])
F.conv2d({img},{shape:2,b,2,2},{shape:2}) F.conv_transpose1d({t},{shape:b,2,2}) F.max_pool1d({t},2,ceil_mode=True)
F.avg_pool1d({t},2,1) F.adaptive_avg_pool1d({t},2) F.max_pool2d({img},2,padding=1) F.interpolate({t},scale_factor=2)
F.interpolate({t},size=3,mode="linear") F.interpolate({img},scale_factor=2,mode="bilinear") F.pad({f},(1,1))
F.pad({f},(0,2),value=1.0) F.pad({t},(1,0),mode="reflect") F.pad({t},(1,1),mode="circular") F.pad({f},(-1,0))
F.dropout({f},0.4) F.dropout({f},0.5,False) F.cross_entropy({m},{m}.argmax(1))
F.cross_entropy({m},torch.softmax({m},1),label_smoothing=0.1)
F.nll_loss(torch.log_softmax({m},1),{m}.argmin(1),reduction="none") F.mse_loss({f},{same})
F.mse_loss({f},{same},reduction="none") F.l1_loss({f},{same},reduction="sum") F.huber_loss({f},{same},delta=0.3)
F.smooth_l1_loss({f},{same}) F.kl_div(torch.log_softmax({f},-1),torch.softmax({same},-1),reduction="batchmean")
F.binary_cross_entropy_with_logits({f},torch.sigmoid({same})) F.scaled_dot_product_attention({t},{same},{same})
F.scaled_dot_product_attention({t},{t},{t},is_causal=True) F.glu(torch.cat([{f},{f}],-1))
F.cosine_embedding_loss({m},{same},{m}.sum(1).sign()) F.triplet_margin_loss({m},{same},{same})
F.gaussian_nll_loss({f},{same},{same}.abs()+0.1) F.local_response_norm({t},2) F.unfold({img},2,padding=1)
F.pixel_unshuffle({img}.repeat(1,1,2,2),2) F.channel_shuffle({img}.repeat(1,2,1,1),2) F.threshold({f},0.1,0.2)
F.multilabel_soft_margin_loss({m},torch.sigmoid({same})) F.bilinear({m},{same},{shape:2,b,b})
F.alpha_dropout({f},0.3,True) torch.native_layer_norm({f},{f}.shape[-1:],None,None,1e-5)
torch.bernoulli(torch.sigmoid({f})) torch.normal({f},{same}.abs()) torch.rand_like({f}) torch.randn_like({f})
torch.randint_like({f},5) torch.rrelu({f},0.1,0.3,True)
F.pad({t},(1,1),mode="replicate") F.pad({img},(1,1,0,1),mode="reflect") F.adaptive_max_pool2d({img},2)
F.grid_sample({img},{shape:a,2,3,2}.tanh(),align_corners=False) F.avg_pool2d({img},2,1,1,count_include_pad=False)
F.lp_pool1d({t},2.0,2) F.multi_margin_loss({m},{m}.argmax(1)) F.interpolate({img},scale_factor=1.5,mode="bicubic")
F.fold(F.unfold({img},2),{img}.shape[-2:],2) F.pdist({m})
F.conv2d({img},{shape:b,1,3,2},padding=1,groups={img}.shape[1])
"""

IN_PLACE = """
{w}.add_({y}) {w}.mul_(0.5) {w}.sub_({y},alpha=2) {w}.copy_({y}) {w}.zero_() {w}.fill_(0.25) {w}.clamp_(-1,1)
{w}.masked_fill_({mask},0.5) {w}.index_fill_({dim},{index},0)
{w}.index_add_({dim},{index},torch.index_select({w},{dim},{index})) {w}.scatter_({dim},{gatherindex},1) {w}.relu_()
{w}.sin_() {w}.neg_() {w}.unsqueeze_(0) {w}.transpose_({dim},{dim2}) {w}.squeeze_() {w}.t_() {w}.fill_diagonal_(0.5)
{w}.cumsum_({dim}) {w}.tril_() {w}.lerp_({same},0.5) {w}.addcmul_({y},{y}) {w}.div_({y}.abs()+1)
{w}.sort({dim})[0].mul_(2) {w}.uniform_() {w}.normal_()
{w}.index_copy_({dim},{index},torch.index_select({w},{dim},{index})) {w}[{slice}]=0.5 {w}[{slice}]=1 {w}[{mask}]=0
{w}[0]=2 {w}[...,0]=-1 {w}[{index0}]=0.5 {w}[:]={y} {w}[{slice}]*=2 {w}[0]+=1 {w}+={y} {w}*=2
{w}.select({dim},0).add_(1) {w}.narrow({dim},{start},1).mul_(3) {w}.T.mul_(2) {w}.view(-1)[0]=5 {w}.view(-1).add_(1)
{w}.reshape(-1).mul_(2) {w}.diagonal().zero_() torch.add({w},{y},out={w}) torch.mul({w},2,out={target})
torch.sum({w},{dim},out={shape:1}) {w}.detach().add_(1) {w}.index_put_(({index0},),{w}[{index0}]*2)
{w}.squeeze({dim}).mul_(2) {w}.unsqueeze(0).add_(1) {w}.flatten().mul_(2)
{w}.contiguous().mul_(2) {w}.expand_as({w}).mul_(2) {w}.put_({index0},{w}.flatten()[:2]) torch.clamp({w},-1,1,out={w})
F.relu({w},inplace=True) torch._foreach_mul_([{w}],2.0) {w}.masked_scatter_({mask},{same}) {w}.erfinv_()
{w}.sub_({w}.narrow({dim},{start},1)) {w}.mul_({w}[{slice}].sum()) {w}.masked_scatter_({mask},{w})
{w}.add_({w}.select({dim},{start}).unsqueeze({dim})) {w}[{slice}].sub_({w}[0]) {w}.addcmul_({w},{w})
{w}[{slice},{slice}]*=2 {w}.copy_({w}.flip({dim})) {w}.narrow({dim},{start},1).copy_({w}.narrow({dim},0,1))
torch.add({w},{w},out={w})
torch._foreach_mul_([{w}[0],{w}[-1]],2.0) torch._foreach_add_([{w}.select({dim},0),{w}.select({dim},-1)],[1.0,2.0])
torch._foreach_add_([{w}[:1],{w}[1:]],[{w}[-1:].clone(),{w}[1:]*2]) torch._foreach_add_(list({w}.unbind({dim})),1.0)
{w}.select({dim},0).detach().add_(1) {w}.detach()[...,0]=3 {w}.narrow({dim},{start},1).detach().add_(1)
torch._foreach_copy_([{w}[0],{w}[1]],[{w}[1],{w}[0]]) torch._foreach_exp_([-{w}.abs(),{w}[...,0]])
{w}[:].add_({y}) {w}[{slice},{slice}].add_(1) ({w}.detach()+0).requires_grad_()
torch.neg({w},out={target}) {w}.resize_as_({same}) {w}.swapaxes_({dim},{dim2})
"""

FUNCTIONS = """
Scale.apply({f},0.5) Scale.apply({f}.sum(),2.0) Scale.apply({f}.prod({dim}),0.5) Scale.apply({f}.amax({dim}),3.0)
Scale.apply({f}.mean({dim}),3.0) Multiply.apply({f},{same}) Multiply.apply({f}.sum({dim}),{f}.amax({dim}))
TwoResults.apply({f}) Straight.apply({f}) Straight.apply({f}.amin()) InPlace.apply({f}.clone())
checkpoint(torch.tanh,{f},use_reentrant=False) checkpoint(torch.sin,{f},use_reentrant=True)
checkpoint(lambda v: torch.softmax(v*2,{dim}),{f},use_reentrant=False)
checkpoint(lambda v,u: (v*u).sum({dim}),{f},{same},use_reentrant=True)
checkpoint(lambda v: F.dropout(v,0.5),{f},use_reentrant=False) torch.func.grad(lambda v: (v*v).sum())(({f}.detach()+0))
torch.func.grad(lambda v: torch.softmax(v,{dim}).square().sum())(({f}.detach()+0))
torch.func.vjp(torch.sin,({f}.detach()+0))[0] torch.func.jvp(torch.tanh,(({f}.detach()+0),),(({same}.detach()+0),))
torch.func.jvp(lambda v: v.sum({dim}),(({f}.detach()+0),),(({same}.detach()+0),))
torch.func.grad_and_value(lambda v: v.prod({dim}).sum())(({f}.detach()+0))
torch.func.jacrev(lambda v: v.sum({dim}))(({v}.detach()+0))
torch.autograd.functional.jacobian(lambda v: v*v,({v}.detach()+0))
forward_mode(torch.tanh,{f},{same}) forward_mode(lambda v: v.softmax({dim})*v.sum(),{f},{same})
forward_mode(lambda v: v@v.T,{m},{same}) forward_mode(lambda v: v.cumsum({dim})[1:],{f},{same})
torch.func.jacfwd(torch.sin)(({v}.detach()+0)) torch.func.hessian(lambda v: (v**3).sum())(({v}.detach()+0))
torch.func.vmap(torch.func.grad(lambda v: v.sin().sum()))(({m}.detach()+0))
torch.func.vmap(lambda v: v.cumsum(0),in_dims=1,out_dims=1)({m}) torch.func.vmap(lambda v: v.softmax(0)@v)({m})
checkpoint(lambda v: F.layer_norm(v.exp(),v.shape[-1:]),{f},use_reentrant=False)
checkpoint(lambda v,u: (v.sin(),u.detach().add_(1))[0].cumsum({dim}),{f},{target},use_reentrant=False)
checkpoint(lambda v,u: (v.sin(),u.detach().mul_(2))[0].amax({dim}),{f},{target},use_reentrant=False)
checkpoint(lambda v,u: (v.sin(),u.detach().mul_(2))[0][1:],{f},{target},use_reentrant=False)
torch.func.vmap(torch.sin)({m}) {f}.register_hook(doubled) {f}.register_hook(clamped) {f}.register_hook(seen)
{f}.retain_grad() {f}.item() {f}.sum().item() {x}.shape {x}.numel() {x}.tolist() {x}.is_contiguous() {x}.dim()
{x}.stride() len({x}) bool({x}.any()) torch.equal({x},{same}) torch.allclose({f},{same}) {x}.storage_offset()
{x}.element_size() {x}.size({dim})
"""


def templates(text: str) -> list[str]:
    """The templates of a table. Inside of one, blanks stand only after ``lambda`` and its colon."""
    joined = text.replace("lambda ", "lambda~").replace(": ", ":~")
    return [word.replace("~", " ") for word in joined.split()]


# how likely a statement is of each family
FAMILIES: dict[str, tuple[int, list[str]]] = {
    "pointwise": (18, templates(POINTWISE)),
    "reductions": (16, templates(REDUCTIONS)),
    "views": (24, templates(VIEWS)),
    "joining": (5, templates(JOINING)),
    "indexing": (9, templates(INDEXING)),
    "matrices": (9, templates(MATRICES)),
    "networks": (10, templates(NETWORKS)),
    "in place": (18, templates(IN_PLACE)),
    "functions": (8, templates(FUNCTIONS)),
    "forms": (12, templates(FORMS)),
    "reduced": (12, templates(REDUCED)),
    "einsums": (7, templates(EINSUMS)),
    "viewed": (12, templates(VIEWED)),
    "picked": (8, templates(PICKED)),
    "losses": (8, templates(LOSSES)),
    "written": (16, templates(WRITTEN)),
    "called": (10, templates(CALLED)),
}
WRITING = ("in place", "written")

MODULES = """
torch.nn.Linear({last},3) torch.nn.LayerNorm({last})
torch.nn.Sequential(torch.nn.Linear({last},4),torch.nn.ReLU(),torch.nn.Linear(4,2)) torch.nn.RMSNorm({last})
torch.nn.Bilinear({last},{last},2) torch.nn.GRUCell({last},3) torch.nn.PReLU()
torch.nn.TransformerEncoderLayer({last},1,4,dropout=0.0,batch_first=True)
torch.nn.LSTM({last},2,batch_first=True) torch.nn.GRU({last},2,bidirectional=True) torch.nn.RNN({last},3)
torch.nn.MultiheadAttention({last},1,batch_first=True) torch.nn.Conv1d({second},2,1) torch.nn.BatchNorm1d({second})
torch.nn.BatchNorm1d({second}).eval() torch.nn.BatchNorm1d({second},momentum=None,affine=False)
torch.nn.GroupNorm(1,{second})
torch.nn.InstanceNorm1d({second},affine=True,track_running_stats=True) torch.nn.Linear({last},2,bias=False)
torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear({last},3))
torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear({last},3)).eval() torch.nn.LSTMCell({last},2)
torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear({last},{last}))
torch.nn.LSTM({last},3,num_layers=2,proj_size=2,bidirectional=True) torch.nn.GRU({last},2,num_layers=2,bias=False)
torch.nn.TransformerDecoderLayer({last},1,4,dropout=0.0,batch_first=True)
torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer({last},1,4,dropout=0.0,norm_first=True),2)
torch.nn.ConvTranspose1d({second},2,2,stride=2)
"""
MODULE_CALLS = {"Bilinear": "{m}({x},{x})", "MultiheadAttention": "{m}({x},{x},{x})[0]", "LSTM(": "{m}({x})[0]"}
MODULE_CALLS |= {"GRU(": "{m}({x})[0]", "RNN(": "{m}({x})[0]", "Decoder": "{m}({x},{x})"}

OPTIMIZERS = """
torch.optim.SGD torch.optim.Adam torch.optim.AdamW torch.optim.Adagrad torch.optim.RMSprop torch.optim.NAdam
torch.optim.Adamax torch.optim.RAdam torch.optim.Adadelta torch.optim.ASGD
"""  # not Rprop: it goes by the sign of a gradient, which rounding decides where that is zero

# optimizers with options, parameters in groups
OPTIONS = """
torch.optim.SGD(p,0.1,momentum=0.9,nesterov=True,weight_decay=0.1) torch.optim.SGD(p,0.1,momentum=0.5,dampening=0.2)
torch.optim.Adam(p,0.1,amsgrad=True,maximize=True)
torch.optim.AdamW(p,0.1,betas=(0.5,0.9),weight_decay=0.3,foreach=False)
torch.optim.RMSprop(p,0.1,momentum=0.5,centered=True)
torch.optim.Adagrad(p,0.1,lr_decay=0.1,initial_accumulator_value=0.2)
torch.optim.SGD([{"params":p[:1],"lr":0.3},{"params":p[1:]}],lr=0.1,weight_decay=0.2)
torch.optim.AdamW([{"params":p[:1],"weight_decay":0.0},{"params":p[1:],"lr":0.2}],lr=0.1)
torch.optim.Adam(p,torch.tensor(0.1))
"""
SCHEDULES = """
torch.optim.lr_scheduler.StepLR(o,1,0.5) torch.optim.lr_scheduler.CosineAnnealingLR(o,3)
torch.optim.lr_scheduler.OneCycleLR(o,0.2,total_steps=5) torch.optim.lr_scheduler.LambdaLR(o,lambda n: 1/(n+1))
"""
