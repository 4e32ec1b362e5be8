"""More statements: forms of arguments that are written less often. `grammar.py` says what slots there are."""

from __future__ import annotations

FORMS = """
{c}**2 2**{f} {f}//0.5 {f}%0.7 -{x} +{x} abs({c}) ~{b} ~{i} {b}|{y} {b}^{y} {i}>>1 {i}&3 {i}|{y} {f}.clip(-1,1)
torch.clamp({f},max=torch.tensor(0.3)) torch.clamp({f},min=None,max=0.2) {f}.clamp_min(0.1) torch.fmax({f},{y})
torch.div({f},{y},rounding_mode="floor") torch.div({i},3,rounding_mode="trunc") torch.remainder({f},{y}.abs()+1)
torch.floor_divide({f},2) torch.nan_to_num({f},nan=1.0,posinf=2.0) torch.round({f},decimals=1)
torch.add({f},torch.tensor(3)) {f}+np.float64(2.0) np.float64(2.0)*{f} {f}*np.float32(0.5) {x}+torch.tensor(2.5)
{f}*np.int64(3) {f}-np.array(0.5) {i}+torch.tensor(1.5,dtype=torch.float64) {f}.half()*2.0 {f}.bfloat16()+{f}.half()
{f}.half()+{y} {f}.bfloat16().sum({dim}) {i}.to(torch.uint8)-10 {i}.to(torch.int16)*30000 {i}.to(torch.int8).sum()
{i}.to(torch.uint8).prod() torch.sigmoid({i}) torch.sqrt({i}.abs()) torch.exp({b}) torch.result_type({x},2.5)
torch.special.xlog1py({f},{y}.abs()) {f}.float().half() torch.special.erfcx({f}) torch.special.i0e({f})
torch.lgamma({f}.abs()+1) torch.sinc({f}) torch.logaddexp2({f},{y}) torch.addcmul({f},{y},{y},value=2)
torch.complex({f},{same}) torch.polar({f}.abs(),{same}) {c}.conj()*{y} torch.sgn({c})
torch.view_as_complex(torch.stack([{f},{same}],-1)) F.hardshrink({f},0.2) F.softshrink({f},0.1) F.tanhshrink({f})
F.logsigmoid({f}) F.selu({f}) F.celu({f},0.5) F.relu6({f}) F.hardswish({f}) F.softsign({f})
F.gelu({f},approximate="tanh") {f}.to(torch.float8_e4m3fn).to(torch.float32) torch.where({b},{f},{f}.sum())
torch.where({f}>0,1,{f}) torch.where({f}>0,{i},{f}) {f}.sum()+{i} {f}.float().sum()*{y} {i}.sum()*{f}.float()
{b}.sum()+{f} {f}.float()*{f}.double().sum() {c}*{f}.sum() {c}*(1+2j) {f}*2j {f}.add(2,alpha=3) {f}.sub(other={y})
torch.mul(input={f},other=2) 1/({f}.abs()+1) 3-{f} 5//({i}.abs()+1) 7%({i}.abs()+1) torch.bitwise_left_shift({i},1)
torch.lerp({f},{y},torch.tensor(0.3,dtype=torch.float64)) torch.rsub({f},{y},alpha=2) {f}.eq(0.5).any()
{f}.isnan().sum() torch.equal({f},{y}) {f}.allclose({same},atol=0.1) torch.isclose({f},{same},rtol=0.1)
torch.special.logit({f}.abs()%1,eps=0.1) torch.cross({f},{same},dim=-1) torch.std({f},unbiased=False)
torch.deg2rad({i})
"""

REDUCED = """
{f}.sum(()) {f}.mean(dim=None) {f}.sum(dim=[{dim}],keepdim=True) {f}.std(dim=None,correction=2)
{f}.var(({dim},),unbiased=False,keepdim=True) torch.std_mean({f}) torch.var_mean({f},({dim},{dim2}),keepdim=True)
{f}.norm(p=1) {f}.norm(p=float("-inf"),dim={dim}) {f}.norm(p=0) {f}.norm("fro") {c}.norm(2,{dim},True)
torch.linalg.vector_norm({f},3.5,({dim},),keepdim=True) torch.linalg.norm({m},"nuc") torch.linalg.norm({m},1)
torch.linalg.matrix_norm({m},float("inf")) torch.linalg.norm({c},dim={dim},ord=2) torch.prod({i}) torch.sum({b})
torch.sum({i},dtype=torch.float64) torch.mean({i},dtype=torch.float32) torch.mean({i})
torch.cumsum({f},{dim},dtype=torch.float32) torch.cumprod({i},{dim}) torch.cumsum({b},{dim})
torch.all({x},{dim},keepdim=True) torch.any({x},({dim},{dim2})) torch.max({i}) torch.max({f},{y})
torch.argsort({f},stable=True,dim={dim}) torch.sort({f},stable=True,descending=True)
torch.sort({i},stable=True,dim={dim}) torch.sort({b},stable=True,dim={dim})
torch.sort({f}.round(),stable=True,dim={dim},descending=True) {i}.argmax({dim}) {i}.amax(({dim},{dim2}))
torch.topk({f},1,{dim},largest=False) torch.topk({i}.double(),2,sorted=False).values.sort() torch.msort({f})
torch.nanmean({f},({dim},{dim2}))
torch.quantile({f},torch.tensor([0.1,0.9],dtype=torch.float64),dim={dim},interpolation="nearest")
torch.unique({i},dim=0) torch.unique_consecutive({i},return_counts=True) torch.unique_consecutive({i},dim={dim})
torch.logsumexp({f},({dim},{dim2})) torch.corrcoef({m}) torch.cov({m},correction=0) torch.gradient({f})
torch.gradient({f},dim={dim}) torch.trapezoid({f},{same},dim={dim}) torch.logcumsumexp({c},{dim})
torch.softmax({f},{dim},dtype=torch.float32) torch.softmax({i},{dim},dtype=torch.float64) {f}.argmin(keepdim=True)
{c}.mean(-1,keepdim=True) torch.diff({f},n=2,dim={dim}) torch.diff({f},dim={dim},prepend={f}.narrow({dim},0,1))
torch.bincount({i}.abs().flatten(),{i}.double().flatten().abs(),9) torch.histogram({f},3,range=(-1.0,1.0))
torch.nansum({f}) torch.amin({i},dim={dim}) {f}.aminmax(dim={dim},keepdim=True) {b}.any() {b}.all({dim})
torch.cummax({i},{dim}) {f}.cumsum(-1).cumprod(0) torch.kthvalue({f},1,{dim},keepdim=True)
torch.mode({f}.round(),{dim}) {c}.prod({dim}) {c}.cumsum({dim}) {x}.sum({dim}).sum() {f}.sum({dim}).max()
{f}.max({dim}).values.min() {f}.mean({dim},dtype=torch.float32) torch.count_nonzero({x}) {f}.logsumexp(-1,True)
"""

EINSUMS = """
torch.einsum("...j,...j->...",{f},{same}) torch.einsum("ii->i",{q}) torch.einsum("ii",{q})
torch.einsum("i,j->ij",{v},{v}) torch.einsum("ij->ji",{m}) torch.einsum("ij->",{m}) torch.einsum("...ij->...ji",{t})
torch.einsum("bij,jk",{t},{shape:c,2}) torch.einsum("bij,bij->b",{t},{same}) torch.einsum("b...,b...->...",{f},{same})
torch.einsum("ij,kj,kl->il",{m},{m},{m}) torch.einsum({m},[0,1],{m},[2,1],[0,2]) torch.einsum("...i->...",{f})
torch.einsum("bij,bik->jk",{t},{same}) torch.einsum("a...b,cb->a...c",{f},{shape:2,-1})
torch.einsum("iij->j",{q}.unsqueeze(-1)*2) torch.einsum("ij,ij",{m},{same})  {c}.mH {c}.adjoint() {m}.H
{m}.mT@{m} {t}.mT.contiguous() torch.chain_matmul({m},{m}.T) torch.inner({f},{same}) torch.vdot({v},{same})
torch.tensordot({t},{same},dims=([1,2],[1,2])) torch.linalg.vecdot({f},{same},dim={dim}) torch.mv({m},{shape:b})
{v}@{m} {m}@{shape:b} {t}@{shape:c} torch.matmul({shape:2,1,2,a},{m})
torch.baddbmm({shape:1,b,2},{t},{shape:a,c,2},beta=0.5,alpha=2) torch.addmm({m},{m},{shape:b,b},beta=0)
torch.ger({v},{same}) torch.addbmm({shape:b,2},{t},{shape:a,c,2}) torch.linalg.lu_factor({q})[0]
torch.linalg.lstsq({m},{same})[0] torch.linalg.qr({m})[1].abs() torch.logdet({q}@{q}.T+1) torch.linalg.pinv({m})
torch.linalg.matrix_rank({m})
torch.linalg.solve_triangular({q}.tril()+3*torch.eye({q}.shape[0]),{q},upper=False)
torch.cholesky_solve({q},torch.eye({q}.shape[0],dtype={q}.dtype)) torch.fft.irfft({c},dim={dim},n=4)
torch.fft.fft2({c}) torch.fft.rfftn({f},dim=({dim},)) torch.fft.ifft({c},norm="ortho") torch.fft.hfft({c})
torch.fft.ihfft({f}) torch.fft.fft({f},n=3,dim={dim})
torch.stft({v},2,1,return_complex=True,window=torch.ones(2,dtype=torch.float64)) torch.fft.fftfreq(4)*{f}.sum()
"""

VIEWED = """
{x}[None,...,None] {x}[...,None,0] {x}[True] {x}[False] {x}[torch.tensor(True)] {x}[-1:] {x}[:-1]
{x}[{slice},None,...] {x}[()] {x}[...,-1,None] {x}[-1,...,-1] {x}.reshape(-1,1) {x}.view(*{x}.shape)
{x}.squeeze((0,-1)) {x}.flatten(0,-1) {x}.unflatten(-1,(-1,1)) {x}.narrow(-1,0,1) {x}.select(-1,-1)
torch.movedim({x},(0,-1),(-1,0)) {x}.permute(*reversed(range({x}.dim()))) torch.flip({x},(0,-1))
torch.roll({x},(1,-1),(0,-1)) torch.rot90({x},k=3,dims=(-1,0)) {x}.diagonal(offset=1,dim1=0,dim2=-1)
torch.tril({x},-1) torch.triu({x}) {x}.chunk(3,-1) {x}.split([1,{x}.shape[{dim}]-1],{dim})
{x}.tensor_split((1,2),{dim}) {x}.vsplit(1) {f}.view(torch.int64) {f}.view(torch.uint8) {x}.unsafe_chunk(2)
{x}.to(torch.float16) {x}.type(torch.float32) {x}.type_as({f}) {x}.short() {x}.cfloat() {x}.byte()
{x}.expand(2,*{x}.shape) {x}.expand(2,*{x}.shape)[1:,...,:1]
torch.repeat_interleave({x},torch.arange({x}.shape[{dim}]),{dim}) torch.atleast_3d({x}) {x}[::2,...] {x}[...,::2]
{x}[::3][:1]
{x}[1:][:-1] {x}.T[::2].T {x}.unsqueeze(0)[0] {x}.transpose(0,-1)[...,0] {x}.unfold(-1,2,1)[...,0]
{x}.unfold({dim},1,2).squeeze(-1) {x}.as_strided({strided},1) {x}.reshape({reshape}).T
{x}.contiguous().view({reshape})[1:] {x}.moveaxis(-1,0) {x}.swapdims(0,-1) {x}.view(1,-1) {x}.ravel()[1:-1]
{x}.tile(1,2) {x}.broadcast_to((2,)+tuple({x}.shape)).sum(0) torch.stack(list({x})) torch.cat(list({x}.unbind({dim})))
torch.cat([{x},{x}.new_zeros(0)]) torch.cat(({x},{same},{x}),dim=-1) torch.concat([{x}.float(),{x}],{dim})
torch.stack([{x}[0],{x}[-1]],-1) torch.cat([{i},{i}.double()],{dim}) torch.hstack([{x}[0],{x}[0]])
torch.nn.utils.rnn.pad_sequence([{x},{x}[1:]],batch_first=True)
torch.zeros_like({x},dtype=torch.float32) torch.empty_like({f}).fill_(1) {f}.new_tensor([1.0,2.0])
{f}.new_full((2,),0.5) list({x})[-1] {x}.diag_embed(offset=-1,dim1=0) torch.block_diag({x},{x})
torch.column_stack([{v},{same}]) torch.dsplit({t},1) {img}.flatten(2).transpose(1,2)
{img}.permute(0,2,3,1).contiguous() torch.select_copy({x},{dim},0) torch.t_copy({m}) torch.unbind_copy({x},{dim})
"""

PICKED = """
{x}[{index0},:1] {x}[:1,{index1}] {x}[{index0},...,None] {x}[{mask}.to(torch.uint8)] {x}[torch.arange({x}.shape[0])>0]
{x}[0,...,[0,-1]] {x}[[0,-1],None,0] {x}[np.array(0)] {x}[...,np.array(-1),None]
{x}[np.array([0,-1])] {x}[np.int64(0)] {x}[torch.tensor(0)] {x}[torch.tensor([[0],[-1]])] {x}[[0],[0]]
{x}[{index0}][None] {x}[None,{index0}] {x}[...,{index0}%{x}.shape[-1]] {x}[{index0},{index0}%{x}.shape[1]]
{x}[{index0},0] {x}[0,{index1}] {x}[{index0}.to(torch.int32)] {x}[({index0},)] {x}[-1,{mask}[0]] {x}[{mask}[0].any()]
torch.where({f}>0)[0] torch.index_select({x},-1,torch.tensor([0]))
torch.scatter_reduce({f},{dim},{gatherindex},{same},"sum")
torch.scatter_reduce({f},{dim},{gatherindex},{same},"amin",include_self=False)
torch.scatter({f},{dim},{gatherindex},2.0,reduce="multiply")
torch.scatter({f},{dim},{gatherindex},{same},reduce="add")
torch.index_add({f},{dim},{index},torch.index_select({f},{dim},{index}),alpha=-2)
torch.take_along_dim({x},{gatherindex}.flatten()%{x}.numel()) F.embedding({i}.abs()%4,{shape:4,3},padding_idx=1)
F.embedding({i}.abs()%4,{shape:4,3},scale_grad_by_freq=True)
F.embedding_bag({i}.abs().reshape(-1,1)%4,{shape:4,3},mode="sum")
F.embedding_bag({i}.abs().flatten()%4,{shape:4,3},torch.tensor([0,0]),mode="max")
torch.bucketize({f},{shape:3}.sort()[0],right=True,out_int32=True) torch.searchsorted({v}.sort()[0],{v},side="right")
torch.index_reduce({f},{dim},{index},torch.index_select({f},{dim},{index}),"amax",include_self=False)
{x}.index_put(({index0},),{x}[{index0}])
torch.index_put({x},({mask},),{x}[{mask}]) torch.nonzero({x},as_tuple=True)
torch.masked_fill({x},{mask},torch.tensor(2)) torch.masked_select({x},{mask}).sum() torch.argwhere({x}).sum(0)
torch.put({x},{index0}%{x}.numel(),{x}.flatten()[{index0}%{x}.numel()],accumulate=True)
{x}.gather({dim},{gatherindex}).sum({dim}) {x}.take(torch.tensor([[0],[-1]])) {x}[{gatherindex}.T%{x}.shape[0]]
torch.masked_scatter({x},{mask},{x}.flatten()) F.one_hot({i}.abs())
torch.as_strided_scatter({f},{f}.flatten()[:1],(1,),(1,))
torch.select_scatter({x},torch.zeros_like({x}.select({dim},0)),{dim},0) torch.isin({i},2)
torch.isin({i},torch.tensor([1,3]),invert=True)
"""

LOSSES = """
torch.kl_div({f},{same}) torch.binary_cross_entropy_with_logits({f},{same}) torch._C._nn.mse_loss({f},{same})
torch._C._nn.nll_loss({m},{m}.argmax(1)) torch.ops.aten.huber_loss({f},{same}) F.dropout({i},1.0)
F.binary_cross_entropy(torch.sigmoid({m}.T),torch.sigmoid({same}).T.clone().contiguous(),reduction="none")
F.cross_entropy({m},{m}.argmax(1),weight={shape:b}.abs(),ignore_index=0,label_smoothing=0.2,reduction="sum")
F.cross_entropy({t},{t}.argmax(1),reduction="none") F.cross_entropy({t},{t}.argmin(1),{shape:b}.abs()+0.1)
F.cross_entropy({v},{v}.argmax()) F.cross_entropy({m},torch.softmax({same},1),{shape:b}.abs(),reduction="none")
F.nll_loss(torch.log_softmax({t},1),{t}.argmax(1),{shape:b}.abs()+0.1,ignore_index=1)
F.nll_loss({m},{m}.argmax(1),reduction="sum",ignore_index=0)
F.binary_cross_entropy(torch.sigmoid({f}),torch.sigmoid({same}),weight={same}.abs())
F.binary_cross_entropy_with_logits({m},torch.sigmoid({same}),pos_weight={shape:b}.abs(),reduction="sum")
F.poisson_nll_loss({f},{same}.abs(),full=True) F.hinge_embedding_loss({f},{same}.sign(),margin=0.5)
F.margin_ranking_loss({f},{same},{f}.sign(),0.1,reduction="none")
F.soft_margin_loss({f},{same}.sign(),reduction="sum") F.multilabel_margin_loss({m},{m}.argsort(1))
F.triplet_margin_loss({m},{same},{same},p=1,swap=True,reduction="none")
F.kl_div(torch.log_softmax({f},-1),torch.log_softmax({same},-1),log_target=True,reduction="sum")
F.mse_loss({f},{same},weight={same}.abs()) F.l1_loss({f},{same},weight={same}.abs(),reduction="none")
F.gaussian_nll_loss({f},{same},{same}.abs()+0.1,full=True,reduction="sum") F.smooth_l1_loss({f},{same},beta=0.0)
F.huber_loss({f},{same},reduction="sum",delta=2.0) F.cosine_embedding_loss({v},{same},torch.tensor(1))
F.multi_margin_loss({m},{m}.argmax(1),p=2,margin=0.3,weight={shape:b}.abs(),reduction="none")
F.layer_norm({t},{t}.shape[1:]) F.layer_norm({t},{t}.shape[1:],{shape:b,c},None,1e-3)
F.group_norm({img},1,{shape:b},{shape:b})
F.batch_norm({m},{shape:b}.detach(),{shape:b}.detach().abs()+1,training=False) F.rms_norm({t},{t}.shape[1:],eps=1e-3)
F.conv1d({t},{shape:2,b,3},padding="same") F.conv1d({t},{shape:2,b,1},padding="valid",stride=2)
F.conv2d({img},{shape:2,b,2,1},stride=(2,1),dilation=(1,2),padding=(1,0))
F.conv_transpose2d({img},{shape:b,2,2,2},stride=2,output_padding=1)
F.conv_transpose1d({t},{shape:b,2,3},{shape:2},stride=2,padding=1) F.max_pool2d({img},2,stride=1,return_indices=True)
F.max_pool1d({t},3,2,1,return_indices=True) F.adaptive_avg_pool2d({img},(None,1))
F.adaptive_max_pool1d({t},2,return_indices=True) F.avg_pool1d({t},3,2,1,True,False) F.lp_pool2d({img},2,2)
F.interpolate({t},size=2,mode="nearest-exact") F.interpolate({img},size=(3,2),mode="bilinear",align_corners=True)
F.interpolate({img},scale_factor=2.3) F.interpolate({t},scale_factor=1.7)
(lambda m,v: F.batch_norm({t},m,v,training=True)+F.batch_norm(-{t},m,v,training=True))({shape:b}.detach(),{shape:b}**2)
F.interpolate({img},size=(3,2),mode="bilinear",antialias=True) F.interpolate({img},size=(5,4),mode="area")
F.pad({img},(0,1,-1,1)) F.pad({f},(1,-1),"constant",0.5) F.pad({img},(1,0,0,1),mode="circular")
F.softmax({f},{dim},dtype=torch.float32) F.log_softmax({f},{dim},dtype=torch.float64)
F.gumbel_softmax({f},tau=0.5,dim={dim}) F.normalize({f},p=1,dim={dim},eps=0.1)
F.scaled_dot_product_attention({t},{same},{same},attn_mask={t}@{t}.mT>0)
F.scaled_dot_product_attention({t},{same},{same},attn_mask={t}@{same}.mT,scale=0.3)
F.scaled_dot_product_attention({img},{same},{same},is_causal=True)
F.grid_sample({img},{shape:a,2,3,2}.tanh(),mode="nearest",padding_mode="border",align_corners=True)
 F.dropout1d({t},0.5) F.dropout2d({img},0.5)
F.feature_alpha_dropout({t},0.3,True) F.instance_norm({t},weight={shape:b},bias={shape:b})
F.pixel_shuffle({img}.repeat(1,4,1,1),2) F.cosine_similarity({f},{y},dim={dim},eps=0.1)
F.pairwise_distance({m},{same},p=1.0,keepdim=True) F.pdist({m},p=1.0) torch.cdist({t},{same},p=1.0)
F.bilinear({m},{same},{shape:2,b,b},{shape:2}) F.max_unpool1d(*F.max_pool1d({t},2,return_indices=True),2)
"""

WRITTEN = """
{w}[None]=1.5 {w}[...]=2 {w}[True]=3 {w}[torch.tensor(0)]=4 {w}[{index0}]+=1 {w}[{index0},...]=0.5 {w}[:,{index1}]=1.0
{w}[{mask}]={w}[{mask}]*2 {w}[{mask}]=torch.tensor(0.5) {w}[{slice}]={w}[{slice}].clone()*2 {w}[-1]={w}[0].clone()
{w}[...,None,0]=7 {w}[0]=np.float64(3) {w}[{mask}]+=1 {w}[[0,-1]]=2 {w}[{slice},...]*=3 {w}[None,{slice}]=0.5
{w}[...,{slice}]=2.5 {w}[:,0]=0.25 {w}[{mask}[0].any()]=0.5 {w}[...,-1,None]={w}[...,0,None].clone() {w}[0,...,0]=1
{w}[0,...,[-1,0]]={w}[-1,...,[0,-1]].clone() {w}[[0,-1],None,-1]=3 {w}[np.array(0)]*=2 {w}[np.array(-1)].add_(1)
{w}[0,:,{index1}%{w}.shape[-1]]=0.5
{w}[:1,{index1}]=3 {w}[{index0},0]=2 {w}[np.array([0])]=1.5 {w}[{slice}]={w}[{slice}].flip(0) {w}[::2]+=1
{w}[...,::2]*=2 {w}.index_put_(({index0},),torch.tensor(1.0,dtype={w}.dtype),accumulate=True)
 {w}.scatter_add_({dim},{gatherindex},{same})
{w}.scatter_reduce_({dim},{gatherindex},{same},"amax") {w}.cumprod_({dim}) {w}.clamp_(min=0) {w}.clamp_(max={y})
{w}.pow_(2) {w}.abs_() {w}.round_(decimals=1) {w}.copysign_(-1.0) {w}.mul_({i}.sum()) {w}.triu_(1)
{w}.floor_divide_(2) {w}.tanh_() {w}.exp_().log1p_() {w}.mul_(torch.tensor(2)) {w}.add_(True) {w}.add_({y},alpha=0.5)
{w}.copy_({y}.float()) {w}.copy_(torch.tensor(1.0)) {w}.bernoulli_(0.4) {w}.masked_fill_({mask},torch.tensor(3.0))
{w}.addcdiv_({y},{y}.abs()+1) {w}.atan2_({y}) {w}.where({mask},{same}).mul_(2) {w}.nan_to_num_() {w}.data.mul_(2)
{w}.data[...,0]=3 {w}.data.add_({y}) {w}.data[{slice}].mul_(3) {w}[{slice}].data.zero_() {w}.view(-1)[::2].mul_(3)
{w}.split(1)[0].mul_(2) {w}.unfold({dim},1,1).mul_(2) {w}.T.T.add_(1) {w}.flatten()[0].add_(1)
{w}.movedim(0,-1).mul_(0.5) {w}.transpose(0,-1)[0].add_(2) {w}.squeeze_(0) {w}.swapdims_(0,-1)
{w}.unsqueeze(-1).unsqueeze(0).mul_(2) {w}[1:][:-1].add_(1) {w}[:][{slice}].neg_() torch.exp({w},out={w})
torch.sub({same},{y},out={w}) torch.matmul({m},{m}.T,out={shape:a,a}) torch.cumsum({w},{dim},out={target})
torch.where({mask},{same},{same},out={w}) torch.clamp({w},min=0,out={target}) torch.cat([{w},{w}],{dim},out={shape:1})
torch.max({w},{same},out={target}) torch.abs({same},out={w}[...]) torch.stack([{w},{w}],out={shape:1})
torch.add({w},1,out={w}.T) torch.index_select({w},{dim},{index},out={shape:1})
torch._foreach_add_([{w},{target}],[{same},{same}],alpha=2) torch._foreach_lerp_([{w}],[{same}],0.5)
torch._foreach_clamp_min_([{w}],0.1) torch._foreach_addcmul_([{w}],[{same}],[{same}],[0.5])
torch._foreach_zero_([{w}[0],{w}[-1]]) torch.nn.init.constant_({w},0.3) torch.nn.init.uniform_({w})
torch.nn.init.eye_({w}) torch.nn.init.xavier_uniform_({w}) {w}.requires_grad_(False) {w}.detach_() {w}.grad=None
"""

CALLED = """
torch.autograd.grad({f}.square().sum(),{f})[0]
torch.autograd.grad(({f}*2).sum(),[{f},{same}],allow_unused=True,materialize_grads=True)
torch.autograd.grad({v}.square(),{v},torch.eye(len({v}),dtype={v}.dtype),is_grads_batched=True)[0]
torch.autograd.grad({f}*2,{f},torch.ones_like({f}),create_graph=True)[0]
torch.autograd.grad([{f}.sum(),{f}.exp()],[{f}],[None,torch.ones_like({f})])
torch.autograd.grad(torch.autograd.grad({f}.pow(3).sum(),{f},create_graph=True)[0].sum(),{f})[0]
torch.autograd.grad({f}.sum({dim}),{f},{f}.detach().sum({dim}))[0]
torch.func.grad(lambda v: torch.func.grad(lambda u: (u**3).sum())(v).sum())({f}.detach()+0)
torch.func.vmap(lambda v: v*v.sum(),in_dims=-1)({f}) torch.func.vmap(torch.func.vmap(torch.sin))({t})
torch.func.vmap(lambda v,u: v@u,in_dims=(0,None))({m},{shape:b})
torch.func.jacrev(torch.func.jacfwd(lambda v: v.prod()))({v}.detach()+0)
torch.func.jacfwd(torch.func.grad(lambda v: v.exp().sum()))({v}.detach()+0)
torch.func.vjp(lambda v: v.softmax({dim}),{f}.detach()+0)[1]({same}.detach()+0)
torch.func.grad(lambda v,u: (v*u).sum(),argnums=(0,1))({f}.detach()+0,{same}.detach()+0)
torch.func.vmap(lambda v: v.sort(0).values,chunk_size=1)({m})
torch.autograd.functional.hessian(lambda v: v.pow(3).sum(),{v}.detach()+0)
torch.autograd.functional.vhp(lambda v: v.pow(3).sum(),{f}.detach()+0,{same}.detach()+0)
torch.autograd.functional.jvp(torch.sin,{f}.detach()+0,{same}.detach()+0) quietly(torch.tanh,{f})
quietly(lambda v: v.T,{f}) inferred(torch.tanh,{f}) inferred(lambda v: v.cumsum(0),{f}) enabled(torch.exp,{f})
in_bfloat16(lambda v: v@v.T,{m}) in_bfloat16(lambda v: F.linear(v,v),{m}.float())
in_bfloat16(lambda v: (v@v.mT).softmax(-1).sum(),{t}.float())
 {f}.register_hook(lambda g: None)
{f}.register_hook(lambda g: g.clone().mul_(2)) {f}.register_hook(lambda g: g.flip(0))
checkpoint(lambda v: (v.sin(),v.cos()),{f},use_reentrant=False)
checkpoint(lambda v,u=None: v.cumsum({dim}),{f},use_reentrant=True)
checkpoint(lambda v: checkpoint(torch.exp,-v.abs(),use_reentrant=False),{f},use_reentrant=False)
torch.func.functional_call(torch.nn.Linear({f}.shape[-1],2).double(),{"weight":{shape:2,-1},"bias":{shape:2}},({f},))
torch.nn.functional.softmax({f},dim={dim}).argmax({dim}) torch.nn.utils.parameters_to_vector([{f},{same}])
torch.special.softmax({f},{dim}) {x}.__len__() {x}.__contains__(1) float({f}.sum()) int({i}.sum()) complex({c}.sum())
{f}.double().tolist() {x}.numpy(force=True).shape {x}.__array__().dtype.name [float(v)~for~v~in~{v}] {x}.nelement()
{x}.ndim {x}.is_floating_point() {x}.dtype.itemsize {x}.requires_grad {x}.is_leaf {x}.grad_fn~is~None {x}.nbytes
{x}.is_complex() {x}.is_signed() tuple({x}.shape)
"""
