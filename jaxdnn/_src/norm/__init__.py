"""Normalisations: of rows, groups, instances and batches, local ones, and their statistics."""

from jaxdnn._src.core.manifest import Manifest

MANIFEST = Manifest(
    ops={
        "adaptive_layer_norm": "rows",
        "adaptive_layer_norm_dgrad": "rows",
        "batch_norm": "batch",
        "batch_norm_dgrad": "batch",
        "batch_norm_inference": "batch",
        "bn_finalize": "stats",
        "bn_finalize_inference": "stats",
        "dbn_weight": "stats",
        "divisive_norm": "local",
        "divisive_norm_dgrad": "local",
        "genstats": "stats",
        "group_norm": "group",
        "group_norm_dgrad": "group",
        "instance_norm": "group",
        "instance_norm_dgrad": "group",
        "layer_norm": "rows",
        "layer_norm_dgrad": "rows",
        "lp_normalize": "lp",
        "lrn": "local",
        "lrn_dgrad": "local",
        "rms_norm": "rows",
        "rms_norm_dgrad": "rows",
    },
    engines=("hopper.engine", "xla", "xla_ordered"),
    cases=("cases", "cases_local", "cases_stats"),
    timed="timed",
)
