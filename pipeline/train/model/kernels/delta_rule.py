import torch


def delta_rule(q, k, v, g, beta, chunks, initial=None, scale=None):
    B, S, H, P = v.shape
    K, N = q.shape[2:]
    q = q.repeat_interleave(H // K, 2).float() * (N**-0.5 if scale is None else scale)
    k = k.repeat_interleave(H // K, 2).float()
    if g.ndim == 3:
        g = g[..., None].expand(B, S, H, N)
    s = v.new_zeros(B, H, N, P, dtype=torch.float32) if initial is None else initial
    os = []
    for t in range(S):
        if chunks.bounds_BS is not None:
            s = s * (chunks.bounds_BS[:, t] != t)[:, None, None, None]
        s = torch.exp(g[:, t])[..., None] * s
        old = (s * k[:, t][..., None]).sum(-2)
        s = s + (beta[:, t][..., None] * k[:, t])[..., None] * (v[:, t].float() - old)[..., None, :]
        os.append((s * q[:, t][..., None]).sum(-2))
    return torch.stack(os, 1).to(v.dtype), s
