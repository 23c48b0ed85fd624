"""Which faults are seeded in the layer that predicts further tokens?"""

from __future__ import annotations

from tests.mutation.fault import Fault

MTP, LOADED = "models/mtp.py", "models/mtp_weights.py"
MTP_TESTS_OF = dict.fromkeys((MTP, LOADED), ("tests/models/test_mtp.py",))

MTP_FAULTS = {
    "feature_before_the_embedding": Fault(
        MTP + "::Mtp._inputs",
        "(embedded, feature)",
        "(feature, embedded)",
        "the paper has the parts in this order, and published weights in the other",
    ),
    "feature_before_the_last_norm": Fault(
        MTP + "::Mtp.fused",
        "self.ops.rms_norm(tapped, self._target_norm, self.eps)",
        "tapped",
        "vLLM and SGLang read what comes after the target's last norm",
    ),
    "own_feature_not_normed": Fault(
        MTP + "::Mtp.computed",
        "self.ops.rms_norm(x + residual, self.norm, self.eps)",
        "x + residual",
        "its norm comes before the head, and before a further guess",
    ),
    "tap_of_the_last_layer": Fault(
        MTP + "::mtp_config",
        "(target.num_layers,)",
        "(target.num_layers - 1,)",
        "it reads what the last layer reads, not what it makes",
    ),
    "layer_without_experts": Fault(
        MTP + "::mtp_config",
        "layers=(True,)",
        "layers=target.mixture.layers[:1]",
        "the first layer is dense, and the one that predicts is not",
    ),
    "norms_exchanged": Fault(
        LOADED + "::load",
        'f"{prefix}enorm.weight": head.embedding_norm, f"{prefix}hnorm.weight": head.hidden_norm',
        'f"{prefix}hnorm.weight": head.embedding_norm, f"{prefix}enorm.weight": head.hidden_norm',
        "both have one shape",
    ),
    "something_before_the_first_key": Fault(
        MTP + "::Mtp.fill",
        "self.layer.attention.write(normed, cos, sin, step, pad_rows(step.positions, len(x)) < FIRST_KEY)",
        "self.layer.attention.write(normed, cos, sin, step)",
        "latent attention of an NPU leaves no position out, so that what lies there has to be zeros",
    ),
}
