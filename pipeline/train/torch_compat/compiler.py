"""Names of torch that are not public, of its compiler; see `core.py`. Importing this does not import the compiler."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import warnings
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from pipeline.common.imports import source_hash

_collectives = torch.ops._c10d_functional


def prepare_compiler(budget: float) -> None:
    """Set up torch.compile for what is compiled from now on; settings are of the process, and read when it compiles.

    Args:
        budget: Share of the memory of activations that compiled code may keep for backward, 1 for all of it.
    """
    import torch._functorch.config

    lift_recompile_limits()
    keep_compiled_code_private()
    torch._functorch.config.activation_memory_budget = budget


def lift_recompile_limits() -> None:
    """Let torch.compile make code for any number of shapes.

    One code for each kind of layer and shape of a micro-batch is meant, however many a batch ramp has. Beyond the
    limits a run would end, or go on without the compiler where that is allowed. The same in 2.11 and 2.13.
    """
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2**20


def keep_compiled_code_private() -> None:
    """Let compiled code be kept in, and run from, a folder that no other user has made or may write to.

    By default torch takes `/tmp/torchinductor_USER`, whoever made it, and runs what it finds there. It names that
    folder in the environment when it is imported. Read in 2.13.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(_COMPILED, default_cache_dir()) != default_cache_dir():
        return  # the user's own choice
    folder = os.path.join(tempfile.gettempdir(), f"pipeline-compiled-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        folder = tempfile.mkdtemp(prefix="pipeline-compiled-")
    os.environ[_COMPILED] = folder


def close_torch_folder() -> None:
    """Take the right to write to torch's own folder for compiled code from the group of this user and from all others.

    torch makes it when its compiler is imported, by the umask, and other programs of this user run what is in it.
    """
    utilities = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if utilities is None:
        return  # nothing has made it
    with suppress(OSError):
        descriptor = os.open(utilities.default_cache_dir(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            found = os.fstat(descriptor)
            if found.st_uid == os.getuid() and found.st_mode & 0o022:
                os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~0o022)
        finally:
            os.close(descriptor)


_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def prepare_async_tp(group: dist.ProcessGroup) -> None:
    """Let code that is compiled from now on send pieces over a group while it computes others.

    The pass of inductor and its setting are private in 2.11 and 2.13. `enable_symm_mem_for_group` says in 2.13 that it
    is not needed any more, but the pass still leaves alone what it was not called for.
    """
    import torch._inductor.config
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    class _FlattenGathers(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            flatten_gathers(graph)

        def uuid(self) -> Any:
            return f"{source_hash(sys.modules[__name__]):016x}"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
    torch._inductor.config._micro_pipeline_tp = True
    torch._inductor.config.post_grad_custom_pre_pass = _FlattenGathers()


def flatten_gathers(graph: torch.fx.Graph) -> None:
    """Gather [1, S, D] as [S, D], in place.

    With one sample torch's gather along the sequence is a view, and not the pieces put together again that inductor's
    pass knows. Of two dimensions it knows it. The same in 2.11 and 2.13.
    """
    reshape = torch.ops.aten.reshape.default
    for gather in graph.find_nodes(op="call_function", target=_collectives.all_gather_into_tensor.default):
        (wait,), shard = tuple(gather.users), gather.args[0]
        size = shard.meta["val"].shape
        if len(size) != 3 or size[0] != 1 or any(user.target != reshape for user in wait.users):
            continue
        with graph.inserting_before(gather):
            flat = graph.call_function(reshape, (shard, list(size[1:])))
        flat.meta["val"] = shard.meta["val"].reshape(size[1:])
        gather.replace_input_with(shard, flat)
        for node in (gather, wait):
            node.meta["val"] = node.meta["val"].reshape(-1, size[2])
        for user in list(wait.users):
            for view in (user, *user.users):
                if view.target == reshape and view.meta["val"].shape == wait.meta["val"].shape:
                    view.replace_all_uses_with(wait)
    graph.eliminate_dead_code()


def vary_length(x: torch.Tensor) -> None:
    """Let compiled code take a tensor, which it is given from outside, with any length from 2 on.

    `mark_dynamic` is in torch's documentation, if not under a public name; the same in 2.11 and 2.13. Where nothing is
    compiled it is not imported, which would take a second or two.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.mark_dynamic(x, 0)
