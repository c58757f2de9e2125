# Cascade Mask R-CNN (arXiv 1906.09756) on SwinV2-S, dense.
_base_ = ["mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py", "./small.py"]

model = dict(
    type="MoECascadeRCNN",
    backbone=_base_.small.backbone,
    neck=_base_.small.neck,
)
