# What every detection run of this project has: its own names known to mmdetection, experts in
# checkpoints of one file
# each, the gradient norm over all ranks, and COCO's metric as faster-coco-eval computes it.
_base_ = "mmdet::_base_/default_runtime.py"

custom_imports = dict(imports=["swinv2_moe.detection.registry"], allow_failed_imports=False)
runner_type = "MoERunner"
default_hooks = dict(
    checkpoint=dict(
        _delete_=True, type="ExpertStoreHook", interval=1, keep_last=1, save_best="coco/bbox_mAP"
    )
)
optim_wrapper = dict(
    type="MoEOptimWrapper",
    constructor="LayerDecayConstructor",
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
