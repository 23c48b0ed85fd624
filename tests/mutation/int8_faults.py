"""Which faults are seeded in keys and values of int8, and in their scales?"""

from __future__ import annotations

from tests.mutation.fault import Fault

INT8, PAGES, STORAGE = "devices/int8.py", "attention/int8_pages.py", "kv_cache/storage.py"
CONFIG = "models/config.py"

INT8_FAULTS = (
    Fault(
        "int8_truncated",
        INT8,
        "(wide / scale).round().to(torch.int8)",
        "(wide / scale).to(torch.int8)",
        "a cast rounds towards zero: twice the error, and every number too small",
    ),
    Fault(
        "int8_scale_of_the_next_head",
        PAGES,
        ".view(SCALE)",
        ".view(SCALE).roll(1, -2)",
        "each head is multiplied by the scale of another",
    ),
    Fault(
        "int8_scale_of_all_heads",
        PAGES,
        "    numbers, scale = quantize_rows(x)\n",
        "    numbers, scale = quantize_rows(x.flatten(-2))\n"
        "    numbers, scale = numbers.view(x.shape), scale[..., None, :].repeat(1, x.shape[-2], 1)\n",
        "a small head beside a large one is lost",
    ),
    Fault(
        "int8_scale_not_copied",
        STORAGE,
        "            pages = _flat(tensor)\n",
        "            pages = tensor[..., :-4] if tensor.dtype == torch.int8 else _flat(tensor)\n",
        "a page that moves gets the numbers of its source and keeps its own scales",
    ),
    Fault(
        "int8_scale_not_swapped",
        STORAGE,
        "    source, target = _flat(source, stays=stays), _flat(target, stays=stays)\n",
        "    is_int8 = source.dtype == torch.int8\n"
        "    source, target = _flat(source, stays=stays), _flat(target, stays=stays)\n"
        "    if is_int8:\n"
        "        source, target = (e.view(torch.int8)[..., :-4] for e in (source, target))\n",
        "what comes back from the host has the scales of the page's last owner",
    ),
    Fault(
        "int8_lost_in_a_resize",
        STORAGE,
        "                    _copy(old, read, new, written, indexed=self._indexed)\n",
        "                    at = slice(-4 if old.dtype == torch.int8 else None)\n"
        "                    _copy(old[..., at], read, new[..., at], written, indexed=self._indexed)\n",
        "after a resize all scales are zero",
    ),
    Fault(
        "int8_scale_not_planned",
        CONFIG,
        "width + 2 * SCALE_BYTES if",
        "width if",
        "the plan holds more pages than the memory does",
    ),
)
INT8_TESTS_OF = dict.fromkeys((INT8, PAGES, CONFIG), ("tests/attention/test_int8_pages.py",))
