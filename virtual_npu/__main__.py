"""Start the virtual NPU of this machine and describe it.

    python -m virtual_npu [CHIP]

The command prints versions, libraries, device and memory.
"""

from __future__ import annotations

import sys
import time

from virtual_npu import libraries


def main(arguments: list[str]) -> int:
    """Start the virtual NPU and print what it consists of; returns the exit status."""
    start_s = time.perf_counter()
    try:
        site = libraries.wheel()
        folder = libraries.build()
        built_s = time.perf_counter()
        import torch

        import virtual_npu

        device = virtual_npu.start(*arguments)
        import torch_npu
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    free, total = torch.npu.mem_get_info()
    names, symbols = libraries.survey(site)
    lines = {
        "device": f"npu:0, VIRTUAL {device.chip}",
        "memory": f"{total / 2**30:.1f} GiB of the host's, {free / 2**30:.1f} free",
        "torch_npu": f"{torch_npu.__version__} in {site}",
        "torch": torch.__version__,
        "libraries": f"{len(names)}, with {len(symbols)} symbols of CANN, in {folder}",
        "kernels": f"{device.num_kernels} of torch, {device.num_operators} of torch_npu by contract",
        "start": f"{time.perf_counter() - start_s:.1f} s, of which libraries {built_s - start_s:.1f}",
    }
    for name, value in lines.items():
        print(f"{name:10} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
