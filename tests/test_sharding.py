"""Models whose parameters are sharded over two processes (FSDP 2). This file is also the program that these run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from common import create_model

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("a_swin_micro", "a_swinv2_micro", "a_cvt_micro", "a_mvitv2_micro")


@pytest.mark.slow
def test_adaptive_models_can_be_sharded() -> None:
    """Anchors read weights of modules that run later and are still in pieces: a large model could not be trained."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == list(MODELS)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    parts = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__.endswith("Block")]
    for module in [*parts[::-1], model]:
        fully_shard(module, mesh=mesh)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for name in MODELS:
        torch.manual_seed(0)
        model, x = create_model(name).train(), torch.randn(4, 3, 32, 32)
        whole = model(x)
        whole.square().sum().backward()
        expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        shard(model, mesh)
        logits = model(x)
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-5)
        logits.square().sum().backward()
        for key, parameter in model.named_parameters():
            if key in expected:
                torch.testing.assert_close(parameter.grad.full_tensor(), expected[key], rtol=1e-3, atol=1e-4)
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
        fresh = create_model(name).train()
        fresh.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
        shard(fresh, mesh)
        assert torch.equal(model(x), fresh(x)), f"{name} has outputs of earlier weights"
        if dist.get_rank() == 0:
            print(name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
