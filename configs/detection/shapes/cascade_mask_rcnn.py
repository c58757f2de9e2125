# Cascade Mask R-CNN on a small SwinV2-MoE, from random weights, on 40 generated images of shapes.
#
#   python data/make_shapes.py data/shapes
#   swinv2-moe detect train detection/shapes/cascade_mask_rcnn \
#       --output output/cascade
#
# Hardware: one CPU core, 13 minutes.
# Measured: box AP 92.5, mask AP 93.5 after 5 epochs of 4 passes.
_base_ = ["../_base_/cascade_mask_rcnn.py", "../_base_/nano.py", "../_base_/shapes.py"]

nano = _base_.nano
bbox_head = dict(nano.bbox_head, num_classes=3)
model = dict(
    backbone=nano.backbone,
    neck=nano.neck,
    rpn_head=nano.rpn_head,
    roi_head=dict(
        bbox_roi_extractor=nano.roi_extractor,
        bbox_head=[dict(stage, **bbox_head) for stage in _base_.model.roi_head.bbox_head],
        mask_roi_extractor=nano.roi_extractor,
        mask_head=dict(nano.mask_head, num_classes=3),
    ),
    train_cfg=dict(
        rpn_proposal=nano.rpn_proposal,
        rcnn=[
            dict(stage, sampler=dict(stage.sampler, **nano.rois))
            for stage in _base_.model.train_cfg.rcnn
        ],
    ),
)
