# Hybrid Task Cascade (arXiv 1901.07518): the cascade with masks refined from stage to stage.
# Without its semantic
# branch, which needs COCO's stuff maps.
_base_ = "./cascade_mask_rcnn.py"

model = dict(
    type="MoEHybridTaskCascade",
    roi_head=dict(
        type="HybridTaskCascadeRoIHead",
        interleaved=True,
        mask_info_flow=True,
        mask_head=[
            dict(_base_.model.roi_head.mask_head, type="HTCMaskHead", with_conv_res=stage > 0)
            for stage in range(3)
        ],
    ),
    test_cfg=dict(rcnn=dict(score_thr=0.001)),
)
