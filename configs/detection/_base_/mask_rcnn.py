# Mask R-CNN (arXiv 1703.06870) on SwinV2-S, dense.
_base_ = ["mmdet::_base_/models/mask-rcnn_r50_fpn.py", "./small.py"]

model = dict(
    type="MoEMaskRCNN",
    backbone=_base_.small.backbone,
    neck=_base_.small.neck,
)
