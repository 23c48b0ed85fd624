"""Which faults are seeded in the layer that predicts further tokens?"""

from __future__ import annotations

from tests.mutation.fault import Fault

MTP, LOADED = "models/mtp.py", "models/mtp_weights.py"
MTP_TESTS_OF = dict.fromkeys((MTP, LOADED), ("tests/models/test_mtp.py",))

MTP_FAULTS = (
    Fault(
        "feature_before_the_embedding",
        MTP,
        "torch.cat((embedded, feature), -1)",
        "torch.cat((feature, embedded), -1)",
        "the paper has the parts in this order, and published weights in the other",
    ),
    Fault(
        "feature_before_the_last_norm",
        MTP,
        "        return self.ops.rms_norm(tapped, self._target_norm, self.eps)\n",
        "        return tapped\n",
        "vLLM and SGLang read what comes after the target's last norm",
    ),
    Fault(
        "own_feature_not_normed",
        MTP,
        "self.ops.rms_norm(x + residual, self.norm, self.eps)[: len(features)]",
        "(x + residual)[: len(features)]",
        "its norm comes before the head, and before a further guess",
    ),
    Fault(
        "tap_of_the_last_layer",
        MTP,
        "taps=(target.num_layers,)",
        "taps=(target.num_layers - 1,)",
        "it reads what the last layer reads, not what it makes",
    ),
    Fault(
        "layer_without_experts",
        MTP,
        "layers=(True,)",
        "layers=target.mixture.layers[:1]",
        "the first layer is dense, and the one that predicts is not",
    ),
    Fault(
        "norms_exchanged",
        LOADED,
        'f"{prefix}enorm.weight": head.embedding_norm,\n        f"{prefix}hnorm.weight": head.hidden_norm,',
        'f"{prefix}hnorm.weight": head.embedding_norm,\n        f"{prefix}enorm.weight": head.hidden_norm,',
        "both have one shape",
    ),
    Fault(
        "something_before_the_first_key",
        MTP,
        "self.layer.attention.write(normed, cos, sin, step, pad_rows(step.positions, len(x)) < FIRST_KEY)",
        "self.layer.attention.write(normed, cos, sin, step)",
        "latent attention of an NPU leaves no position out, so that what lies there has to be zeros",
    ),
)
