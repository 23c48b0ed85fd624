"""Which faults are seeded in keys and values of int8, and in their scales?"""

from __future__ import annotations

from tests.mutation.fault import Fault

INT8, PAGES, STORAGE = "devices/int8.py", "attention/int8_pages.py", "kv_cache/storage.py"
CONFIG = "models/config.py"

INT8_FAULTS = {
    "int8_truncated": Fault(
        INT8 + "::quantize_rows",
        "(wide / scale).round()",
        "wide / scale",
        "a cast rounds towards zero: twice the error, and every number too small",
    ),
    "int8_scale_of_the_next_head": Fault(
        PAGES + "::unpacked",
        "scale.clone(memory_format=torch.contiguous_format).view(SCALE)",
        "scale.clone(memory_format=torch.contiguous_format).view(SCALE).roll(1, -2)",
        "each head is multiplied by the scale of another",
    ),
    "int8_scale_of_all_heads": Fault(
        PAGES + "::packed",
        "numbers, scale = quantize_rows(x)",
        (
            "numbers, scale = quantize_rows(x.flatten(-2))\n"
            "numbers, scale = numbers.view(x.shape), scale[..., None, :].repeat(1, x.shape[-2], 1)"
        ),
        "a small head beside a large one is lost",
    ),
    "int8_scale_not_copied": Fault(
        STORAGE + "::KVCache.copy",
        "_flat(tensor)",
        "tensor[..., :-4] if tensor.dtype == torch.int8 else _flat(tensor)",
        "a page that moves gets the numbers of its source and keeps its own scales",
    ),
    "int8_scale_not_swapped": Fault(
        STORAGE + "::_exchange",
        "source, target = _flat(source, stays=stays), _flat(target, stays=stays)",
        (
            "is_int8 = source.dtype == torch.int8\n"
            "source, target = _flat(source, stays=stays), _flat(target, stays=stays)\n"
            "if is_int8:\n"
            "    source, target = (e.view(torch.int8)[..., :-4] for e in (source, target))"
        ),
        "what comes back from the host has the scales of the page's last owner",
    ),
    "int8_lost_in_a_resize": Fault(
        STORAGE + "::KVCache.resize",
        "_copy(old, read, new, written, indexed=self._indexed)",
        (
            "at = slice(-4 if old.dtype == torch.int8 else None)\n"
            "_copy(old[..., at], read, new[..., at], written, indexed=self._indexed)"
        ),
        "after a resize all scales are zero",
    ),
    "int8_scale_not_planned": Fault(
        CONFIG + "::DecoderConfig.kv_layer_bytes",
        "width + 2 * SCALE_BYTES",
        "width",
        "the plan holds more pages than the memory does",
    ),
}
INT8_TESTS_OF = dict.fromkeys((INT8, PAGES, CONFIG), ("tests/attention/test_int8_pages.py",))
